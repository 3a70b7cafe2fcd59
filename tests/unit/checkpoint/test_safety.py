"""Opening a checkpoint executes no code, and damaged bytes are never used."""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import manifest, storage
from megatron.checkpoint.verify import inspect_step
from megatron.cli import verify_checkpoint as verify_cli
from megatron.errors import CheckpointError
from megatron.torch_files import safe_load
from megatron.torch_files.torch_file import TorchFile
from tests.unit.checkpoint.support import load, make_state, save

EARLIER = Path(__file__).parents[2] / "golden" / "checkpoint"
STEP = "iter_0000010"
MODEL = f"{STEP}/mp_rank_00/model_optim_rng.pt"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path, make_state())
    return tmp_path


class Evil:
    """Touches a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def rewrite_manifest(directory: Path, change: Any) -> None:
    """Rewrites the manifest with a valid checksum, as an attacker would."""
    path = directory / STEP / "manifest.json"
    body = json.loads(path.read_text())["manifest"]
    change(body)
    import hashlib

    digest = hashlib.sha256(storage.canonical_json(body)).hexdigest()
    path.write_bytes(storage.canonical_json({"manifest": body, "sha256": digest}))


def replace_file(directory: Path, content: Any) -> None:
    path = directory / MODEL
    torch.save(content, path)
    list_as_it_is(directory, path)


def list_as_it_is(directory: Path, path: Path) -> None:
    record = storage.hash_file(path, manifest.read(directory / STEP).hash)
    entry = {"size": record.size, "blocks": list(record.blocks)}
    name = path.relative_to(directory / STEP).as_posix()
    rewrite_manifest(directory, lambda body: body["files"].update({name: entry}))


def test_a_pickle_that_executes_never_does(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "executed"
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    replace_file(saved, {"model": Evil(marker), "beside": torch.zeros(10_000)})
    load(saved, finetune=True)  # by the starts in the manifest: nothing is unpickled
    _, problems = inspect_step(saved / STEP, deep=True)
    assert [problem.kind for problem in problems] == ["unsafe"]
    shutil.rmtree(saved / STEP)
    shutil.copytree(EARLIER / STEP, saved / STEP)  # of a schema without starts
    replace_file(saved, {"model": Evil(marker)})
    with pytest.raises(CheckpointError, match="cannot be read as plain weights"):
        load(saved, finetune=True)
    assert not marker.exists()
    (saved / STEP / "manifest.json").unlink()  # and not as a foreign checkpoint either
    with pytest.raises(CheckpointError):
        load(saved, finetune=True)
    assert not marker.exists()


def test_compressed_members_are_refused(saved: Path) -> None:
    path = saved / MODEL
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(safe_load.UnsafeFileError, match="compressed members"):
        safe_load.load_file(path)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_that_claim_more_than_the_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (10**9,))}, path)
    with pytest.raises(CheckpointError):
        safe_load.load_file(path)
    torch.save({"a": torch.empty(10**9, device="meta")}, path)
    with pytest.raises(CheckpointError):
        safe_load.load_file(path)


def test_files_that_are_not_torchs_zip_are_refused(tmp_path: Path) -> None:
    for raw in (b"", b"PK", b"\x80\x02}q\x00.", os.urandom(1000)):
        (tmp_path / "x.pt").write_bytes(raw)
        with pytest.raises(CheckpointError):
            safe_load.load_file(tmp_path / "x.pt")


def test_a_tensor_that_is_the_negative_of_what_is_stored_is_left_to_torch_or_refused(tmp_path: Path) -> None:
    """torch stores the original numbers of such a tensor with a flag, in both formats."""
    negative = torch.view_as_complex(torch.randn(3, 2)).conj().imag[1:2]
    for zipped in (True, False):
        torch.save({"a": negative, "b": torch.ones(2)}, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
        assert torch.load(tmp_path / "file.pt")["a"].is_neg()
        file = TorchFile.open(tmp_path / "file.pt", None)
        with pytest.raises(safe_load.UnsafeFileError, match="has a tensor with a pending negation or conjugation"):
            file.tensor(file.content["a"])
        assert torch.equal(file.tensor(file.content["b"]), torch.ones(2))


@pytest.mark.parametrize("name", ["../escape.pt", "/etc/passwd", "mp_rank_00/../../x.pt", "", "a\0b", "./x"])
def test_manifest_names_outside_of_the_step_are_refused(saved: Path, name: str) -> None:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = {"size": 1, "blocks": []}

    rewrite_manifest(saved, change)
    _, problems = inspect_step(saved / STEP)
    assert problems[0].kind == "unsafe"
    with pytest.raises(CheckpointError, match=r"outside of its directory|not in its shortest form"):
        load(saved)


def test_links_below_a_step_are_refused(saved: Path) -> None:
    file = saved / MODEL
    file.rename(saved / "elsewhere.pt")
    file.symlink_to(saved / "elsewhere.pt")
    _, problems = inspect_step(saved / STEP)
    assert {problem.kind for problem in problems} == {"unsafe"}
    with pytest.raises(CheckpointError, match="symbolic link"):
        load(saved)


def test_every_flipped_bit_is_found(saved: Path) -> None:
    """200 random bits over every file of the step, the manifest included."""
    rng = random.Random(5)
    files = [path for path in (saved / STEP).rglob("*") if path.is_file()]
    assert len(files) == 4
    for number in range(200):
        path = files[number % len(files)]
        raw = bytearray(path.read_bytes())
        place = rng.randrange(len(raw))
        raw[place] ^= 1 << rng.randrange(8)
        original = path.read_bytes()
        path.write_bytes(raw)
        _, problems = inspect_step(saved / STEP)
        assert problems and path.name in problems[0].text, (path, place)
        path.write_bytes(original)
    assert inspect_step(saved / STEP, deep=True)[1] == []


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, -1])
def test_truncated_files_are_found(saved: Path, kept: float) -> None:
    for path in [path for path in (saved / STEP).rglob("*") if path.is_file()]:
        original = path.read_bytes()
        length = int(len(original) * kept) if isinstance(kept, float) else kept
        path.write_bytes(original[:length])
        if path.read_bytes() != original:
            assert inspect_step(saved / STEP)[1], path
            with pytest.raises(CheckpointError):
                load(saved)
        path.write_bytes(original)


def test_missing_and_extra_files_are_found(saved: Path) -> None:
    shutil.copy(saved / MODEL, saved / STEP / "mp_rank_00/model_00000.pt")
    assert [problem.kind for problem in inspect_step(saved / STEP)[1]] == ["corrupt"]
    (saved / STEP / "mp_rank_00/model_00000.pt").unlink()
    (saved / MODEL).unlink()
    assert [problem.kind for problem in inspect_step(saved / STEP)[1]] == ["incomplete"]


def test_a_shard_of_another_step_is_found(tmp_path: Path) -> None:
    save(tmp_path, make_state(9, seed=1), run_id="same")
    save(tmp_path, make_state(10, seed=2), run_id="same")
    shutil.copy(tmp_path / "iter_0000009/mp_rank_00/model_optim_rng.pt", tmp_path / MODEL)
    assert "differs from what was written" in inspect_step(tmp_path / STEP)[1][0].text


def test_a_large_file_names_the_damaged_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BLOCK_BYTES", 4096)
    save(tmp_path, make_state())
    raw = bytearray((tmp_path / MODEL).read_bytes())
    raw[9000] ^= 1
    (tmp_path / MODEL).write_bytes(raw)
    assert "first between bytes 8192 and 12288 (1 of" in inspect_step(tmp_path / STEP)[1][0].text


def test_edited_manifest_is_refused(saved: Path) -> None:
    path = saved / STEP / "manifest.json"
    path.write_text(path.read_text().replace('"step": 10', '"step": 11'))
    with pytest.raises(manifest.BrokenManifestError, match="damaged or edited"):
        manifest.read(saved / STEP)
    for raw in (b"", b"[]", b"{}", b'{"manifest": {}, "sha256": ""}', b"[" * 100_000, b"\xff\xfe", b"1"):
        path.write_bytes(raw)
        with pytest.raises(manifest.BrokenManifestError):
            manifest.read(saved / STEP)


def test_hash_as_written_equals_hash_as_read(saved: Path) -> None:
    record = manifest.read(saved / STEP)
    for name, expected in record.files.items():
        assert storage.hash_file(saved / STEP / name) == expected


# ---------------------------------------------------------------- tools/verify_checkpoint.py


def test_verify_tool(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_cli.main([str(saved), "--deep"]) == 0
    assert "iter_0000010: good" in capsys.readouterr().out
    assert verify_cli.main([str(saved / STEP)]) == 0
    assert verify_cli.main([str(saved / "nowhere")]) == 2
    (saved / "latest_checkpointed_iteration.txt").write_text("11")
    assert verify_cli.main([str(saved)]) == 4
    (saved / "latest_checkpointed_iteration.txt").write_text("10")
    whole = (saved / MODEL).read_bytes()
    (saved / MODEL).write_bytes(b"x")
    assert verify_cli.main([str(saved), "--all"]) == 1
    assert "corrupt" in capsys.readouterr().out
    (saved / STEP / "manifest.json").unlink()
    assert verify_cli.main([str(saved)]) == 1
    (saved / MODEL).write_bytes(whole)
    assert verify_cli.main([str(saved)]) == 4
    (saved / STEP / "manifest.json").symlink_to("/etc/hostname")
    assert verify_cli.main([str(saved)]) == 3


def test_verify_tool_on_an_empty_directory(tmp_path: Path) -> None:
    assert verify_cli.main([str(tmp_path)]) == 4


def test_deep_verification_finds_what_a_consistent_manifest_hides(saved: Path) -> None:
    content = torch.load(saved / MODEL, weights_only=True)
    (piece,) = manifest.read(saved / STEP).model["final_layernorm.weight"].slices
    assert piece.start is not None
    with open(saved / MODEL, "r+b") as file:
        file.seek(piece.start + 8)
        file.write(torch.tensor(float("inf")).numpy().tobytes())
    list_as_it_is(saved, saved / MODEL)
    assert inspect_step(saved / STEP)[1] == []
    assert "NaN or infinite" in inspect_step(saved / STEP, deep=True)[1][0].text
    del content["model"]["language_model"]["encoder"]["final_layernorm.weight"]
    replace_file(saved, content)
    texts = [problem.text for problem in inspect_step(saved / STEP, deep=True)[1]]
    assert any("final_layernorm.weight is missing" in text for text in texts)
    assert any("begins at byte" in text for text in texts), "torch puts tensors elsewhere"
