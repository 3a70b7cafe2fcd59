"""Shared parts of the conversions: a directory that is replaced as a whole or not at all, torch files written tensor by
tensor, and progress."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import classic
from megatron.checkpoint.lock import DirectoryLock
from megatron.cli.convert_checkpoint import main as convert
from megatron.errors import CheckpointError, NonFiniteError
from megatron.interop.hf import export
from megatron.torch_files import safe_load
from megatron.torch_files.torch_file import TorchFile
from megatron.torch_files.writer import Deferred, write_torch_file
from megatron.utils import progress
from tests.helpers.megatron_lm import Layout
from tests.helpers.megatron_lm import write as write_megatron
from tests.unit.interop.megatron_lm.test_step import LLAMA, make


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """The same model in every format."""
    found = {name: tmp_path / name for name in ("megatron", "native", "hf")}
    write_megatron(found["megatron"], make(LLAMA), Layout(names="core"))
    rows = "--true-vocab-size=300"
    assert convert(["--load", str(found["megatron"]), "--to", "native", "--save", str(found["native"]), rows]) == 0
    assert convert(["--load", str(found["native"]), "--to", "hf", "--save", str(found["hf"])]) == 0
    return found


WAYS = [("hf", "native"), ("megatron", "native"), ("native", "hf"), ("native", "megatron"), ("megatron", "hf")]


@pytest.mark.parametrize("source, to", WAYS)
def test_overwrite_replaces_what_was_there(
    sources: dict[str, Path], source: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["--load", str(sources[source]), "--from", source, "--to", to, "--save", str(out)]
    assert convert(command) == 0
    fresh = {path.relative_to(out): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    (out / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert convert(command) == 2 and (out / "notes.txt").exists()
    assert "--overwrite" in (said := capsys.readouterr().err) and said.count("\n") == 1
    assert convert([*command, "--overwrite"]) == 0
    again = {path.relative_to(out): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    assert {path.name for path in again} == {path.name for path in fresh} and not (out / "notes.txt").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert str(tmp_path / "out") in capsys.readouterr().out


def test_a_converted_table_is_padded_as_a_saved_one(sources: dict[str, Path]) -> None:
    """Some tools read the file without its manifest."""
    saved = torch.load(sources["native"] / "release/mp_rank_00/model_optim_rng.pt", weights_only=True)
    words = saved["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert words.shape[0] == saved["args"].padded_vocab_size == 384 and not words[300:].any()


def test_a_conversion_that_fails_leaves_what_was_there(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sources["hf"] / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-4:] = torch.tensor(float("nan")).numpy().tobytes()
    weights.write_bytes(changed)
    out = tmp_path / "out"
    out.mkdir()
    (out / "latest_checkpointed_iteration.txt").write_text("7")
    command = ["--load", str(sources["hf"]), "--to", "native", "--save", str(out), "--overwrite"]
    assert convert(command) == NonFiniteError.exit_code
    assert [path.name for path in out.iterdir()] == ["latest_checkpointed_iteration.txt"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_overwrite_deletes_neither_the_source_nor_a_run_in_progress(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native = sources["native"]
    for save in (native, native / "release", tmp_path):
        assert convert(["--load", str(native), "--to", "hf", "--save", str(save), "--overwrite"]) == 2
        assert f"replacing --save {save} would delete files of --load {native}" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(native)
    link = ["--load", str(sources["hf"]), "--to", "native", "--save", str(tmp_path / "link"), "--overwrite"]
    assert convert(link) == 2 and "is a file or a symbolic link" in capsys.readouterr().err
    lock = DirectoryLock.acquire(native, "a run")
    try:
        assert convert(["--load", str(sources["hf"]), "--to", "native", "--save", str(native), "--overwrite"]) == 2
        assert "in use by" in capsys.readouterr().err
    finally:
        lock.release()
    assert (native / "release/manifest.json").is_file()


# ---------------------------------------------------------------- files of torch


class Forward:
    """A stream that cannot seek."""

    def __init__(self) -> None:
        self.written = io.BytesIO()

    def write(self, data: bytes | memoryview, /) -> int:
        return self.written.write(data)

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""


def test_a_file_written_tensor_by_tensor_is_one_of_torch(tmp_path: Path) -> None:
    """torch, our reader of torch's files and any reader of zip files can read it."""
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 5, generator=draw)
    plain = {
        "half": torch.randn(7, generator=draw).bfloat16(),
        "turned": weight.t(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "long": torch.arange(3),
    }
    rows = Deferred.of((3, 5), torch.float32, lambda: weight).with_rows(8)
    numbers = [0, -1, True, None, 2**31, -(2**40), 2**62, 0.5, "é", [], {}, (), [[1], {"a": (2,)}]]
    tree = {"args": classic.attribute_dict({"hidden_size": 5}), "deep": {"rows": rows}, "numbers": numbers, **plain}
    stream, path = Forward(), tmp_path / "x.pt"
    write_torch_file(tree, stream)
    path.write_bytes(stream.written.getvalue())
    expected = {**plain, "rows": torch.nn.functional.pad(weight, (0, 0, 0, 5))}
    ours = TorchFile.open(path, None)
    for found in (torch.load(path, weights_only=True), safe_load.load_file(path)):
        assert found["args"].hidden_size == 5 and found["numbers"] == numbers
        for name, tensor in expected.items():
            read = found["deep"]["rows"] if name == "rows" else found[name]
            assert read.dtype == tensor.dtype and torch.equal(read, tensor), name
            assert read.data_ptr() % 64 == 0 or not read.numel(), name
    for name, tensor in plain.items():
        assert torch.equal(ours.tensor(ours.content[name]), tensor), name
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert Path(path).stat().st_size < 4096


def test_a_tensor_that_is_not_what_was_promised_is_seen() -> None:
    for wrong in (torch.zeros(4), torch.zeros(3).double()):
        with pytest.raises(AssertionError):
            write_torch_file([Deferred.of((3,), torch.float32, lambda wrong=wrong: wrong)], Forward())


# ---------------------------------------------------------------- progress, and the older files


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "source, to, verbs", [("hf", "native", ["converted"]), ("native", "hf", ["exported", "checked"])]
)
def test_progress_is_shown(
    sources: dict[str, Path], source: str, to: str, verbs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows a bar on a terminal, and lines at their interval elsewhere."""
    command = ["--load", str(sources[source]), "--to", to, "--save", str(tmp_path / "out"), "--overwrite"]
    with monkeypatch.context() as patched:
        patched.setattr(progress, "BYTES_PAUSE", 0.0)
        patched.setattr(sys, "stderr", io.StringIO())
        assert convert(command) == 0
        lines = sys.stderr.getvalue().splitlines()
    for verb in verbs:
        assert any(line.startswith(f"{verb} 0.00 of 0.00 GB (") for line in lines), lines
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Terminal())
        assert convert(command) == 0
        shown = sys.stderr.getvalue()
    for verb in verbs:
        assert f"{verb}: 100%" in shown


@pytest.mark.parametrize("shards", [[], ["--max-shard-size", "20KB"]])
def test_pytorch_model_bin_on_request(sources: dict[str, Path], shards: list[str], tmp_path: Path) -> None:
    """transformers and our own import read the same weights and logits from it."""
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    command = [
        "--load",
        str(sources["native"]),
        "--to",
        "hf",
        "--save",
        str(out),
        "--no-safe-serialization",
        "--verify",
    ]
    assert convert([*command, *shards]) == 0
    files = sorted(path.name for path in out.glob("*.bin*"))
    assert not list(out.glob("*.safetensors*")) and (len(files) > 3) == bool(shards)
    if shards:
        assert files[0] == f"pytorch_model-00001-of-{len(files) - 1:05d}.bin"
        assert files[-1] == "pytorch_model.bin.index.json"
        assert max(path.stat().st_size for path in out.glob("*.bin")) < 40_000
    else:
        assert files == ["pytorch_model.bin"]
        held = torch.load(out / "pytorch_model.bin", weights_only=True)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in held.values())
    load = transformers.AutoModelForCausalLM.from_pretrained
    one, other = load(out).state_dict(), load(sources["hf"]).state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_tensors_of_a_bin_file_in_another_order_are_seen(sources: dict[str, Path], tmp_path: Path) -> None:
    """Planted bug: two tensors are swapped on the way into the file."""
    out, made = tmp_path / "out", export._converted
    command = ["--load", str(sources["native"]), "--to", "hf", "--save", str(out)]

    def swapped(*arguments: object) -> object:
        tensors = list(made(*arguments))  # type: ignore[arg-type]
        names = [name for name, _ in tensors]
        tensors[1], tensors[2] = tensors[2], tensors[1]
        yield from ((name, tensor) for name, (_, tensor) in zip(names, tensors, strict=True))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export, "_converted", swapped)
        with pytest.raises((AssertionError, CheckpointError)):
            assert convert([*command, "--no-safe-serialization"]) == 0
    assert not out.exists()
