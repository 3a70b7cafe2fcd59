"""Files that other programs wrote with torch.save: the zip format's CRC-32, which torch.load ignores, reveals a damaged
byte in any tensor."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.load import load_checkpoint
from megatron.cli import convert_checkpoint as convert_cli
from megatron.cli import verify_checkpoint as verify_cli
from megatron.errors import CheckpointError
from megatron.interop.hf.importer import open_folder, read_tensors
from megatron.interop.hf.weights import compare_share, weights_files
from megatron.torch_files import member_checks
from tests.helpers import torch_dist
from tests.helpers.megatron_lm import Layout, with_moments, write
from tests.helpers.other_programs import find_checkpoint
from tests.unit.checkpoint.support import make_params, make_state, one_process, save
from tests.unit.checkpoint.test_strange_files import hugging_face_folder
from tests.unit.interop.megatron_lm.test_step import GPT2, LLAMA, make, params_of

DAMAGED = r"is damaged \(its CRC-32 is [0-9a-f]{8}, but [0-9a-f]{8} was written\); copy or download"


@dataclass(frozen=True)
class Storage:
    """Bytes of a tensor's storage in a file."""

    path: Path
    name: str
    start: int
    length: int

    @contextmanager
    def damaged(self) -> Iterator[None]:
        """Flips one bit in the middle."""
        self._flip()
        yield
        self._flip()

    def _flip(self) -> None:
        place = self.start + self.length // 2
        with open(self.path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 4]), place)


def storages(path: Path, start: int = 0, length: int | None = None) -> Iterator[Storage]:
    """Storages of a zip file, or of one inside a file."""
    data = path.read_bytes()[start:][:length]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            if "/data/" in member.filename and member.file_size:
                header = data[member.header_offset : member.header_offset + 30]
                names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                yield Storage(path, member.filename, start + member.header_offset + 30 + names, member.file_size)


def items(folder: Path) -> Iterator[tuple[str, Storage]]:
    """Storages of a distributed directory with the keys of their tensors, by torch's own classes."""
    for index, info in pickle.loads((folder / ".metadata").read_bytes()).storage_data.items():
        if index.offset is not None:
            for storage in storages(folder / info.relative_path, info.offset, info.length):
                yield index.fqn, storage


def loaded(folder: Path, **options: Any) -> dict[str, Tensor]:
    """Weights and optimizer that a run loads."""
    lines: list[str] = options.pop("lines", [])
    params = params_of(LLAMA)
    found = find_checkpoint(folder, parallel=one_process(), log=lines.append, check_hashes=options.pop("check", True))
    assert found is not None
    state = load_checkpoint(found, parallel=one_process(), params=params, log=lines.append, **options)
    moments = {f"{n} {kind}": t for n, held in (state.optimizer or {}).items() for kind, t in held.items()}
    return {**{name: tensor.detach() for name, (_, tensor) in params.items()}, **moments}


def differ(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() != other.keys() or any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", ["fp32", "distributed"])
def test_every_storage_of_a_rank_tree(tmp_path: Path, optimizer: str) -> None:
    write(tmp_path, with_moments(make(LLAMA)), Layout(tp=2, optimizer=optimizer))
    sound = loaded(tmp_path)
    found = [each for path in sorted(tmp_path.glob("*/*/*.pt")) for each in storages(path)]
    unseen = []
    for storage in found:
        with storage.damaged():
            try:
                again = loaded(tmp_path)
            except CheckpointError as error:
                assert f"{storage.path}: tensor " in str(error)
                assert " is damaged (its CRC-32 " in str(error)
            else:
                assert not differ(sound, again), storage
                unseen.append(storage)
    assert not differ(sound, loaded(tmp_path))
    # Not read, and so not compared: what the ranks have in common (it is read of the first one), and the masters of
    # weights that are in full precision themselves.
    common = [each for each in unseen if each.path.name == "model_optim_rng.pt"]
    assert all(each.path.parent.name == "mp_rank_01" for each in common)
    masters = [each for each in unseen if each not in common]
    assert (len(found), len(common), len(masters)) == {"fp32": (162, 27, 0), "distributed": (60, 9, 2)}[optimizer]


def test_every_item_of_a_distributed_directory(tmp_path: Path) -> None:
    folder = torch_dist.write(tmp_path, with_moments(make(LLAMA)), optimizer="model_space")
    found = list(items(folder))
    assert len(found) > 30
    for key, storage in found:
        with storage.damaged():
            if ".fp32_param." in key:  # of weights that are in full precision themselves
                continue
            with pytest.raises(CheckpointError, match=rf"{storage.path.name}: tensor {key} {DAMAGED}"):
                loaded(tmp_path)


def as_bin(folder: Path) -> Path:
    """A Hugging Face folder's model with distinct weights, in a file as older programs write it."""
    from safetensors.torch import load_file

    shapes = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def test_every_storage_of_a_hugging_face_bin(tmp_path: Path) -> None:
    path = as_bin(hugging_face_folder(tmp_path))
    found = list(storages(path))
    assert len(found) == len(list(open_folder(tmp_path).files)) == 11
    for storage in found:
        with storage.damaged(), pytest.raises(CheckpointError, match=rf"{path.name}: tensor model\.\S+ {DAMAGED}"):
            list(read_tensors(open_folder(tmp_path)))
    list(read_tensors(open_folder(tmp_path)))


def converted(source: Path, to: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = convert_cli.main(["--load", str(source), "--to", "native", "--save", str(to)])
    told = capsys.readouterr()
    return code, told.out + told.err


def tree(folder: Path) -> Storage:
    write(folder, make(GPT2), Layout())
    return list(storages(next(folder.glob("*/*/*.pt"))))[5]


def directory(folder: Path) -> Storage:
    return dict(items(torch_dist.write(folder, make(GPT2))))["decoder.final_layernorm.weight"]


def hugging_face(folder: Path) -> Storage:
    folder.mkdir(exist_ok=True)
    return list(storages(as_bin(hugging_face_folder(folder))))[5]


FORMS: dict[str, Callable[[Path], Storage]] = {"tree": tree, "directory": directory, "bin": hugging_face}


@pytest.mark.parametrize("form", FORMS)
def test_the_tools_refuse(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = FORMS[form](tmp_path / "theirs")
    with storage.damaged():
        code, told = converted(tmp_path / "theirs", tmp_path / "ours", capsys)
        assert code == CheckpointError.exit_code and told.count(f"{storage.path}: tensor ") == 1
        assert not (tmp_path / "ours").exists() or not list((tmp_path / "ours").glob("iter_*"))
        if form != "bin":
            assert verify_cli.main([str(tmp_path / "theirs"), "--deep"]) == 1
            assert "iter_0000500: corrupt: " in capsys.readouterr().out
    code, told = converted(tmp_path / "theirs", tmp_path / "ours", capsys)
    assert code == 0 and "warning" not in told


@pytest.mark.parametrize("form", FORMS)
def test_a_file_without_checksums_is_taken_with_a_line(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        storage = FORMS[form](tmp_path / "theirs")
    finally:
        torch.serialization.set_crc32_options(True)
    code, told = converted(tmp_path / "theirs", tmp_path / "ours", capsys)
    assert code == 0
    assert told.count("was written without the checksums that torch.save adds; damage to this file, and to other") == 1
    with storage.damaged():  # nothing in the file says otherwise
        assert converted(tmp_path / "theirs", tmp_path / "again", capsys)[0] == 0


def test_storages_that_were_filled_later_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torch.serialization.skip_data leaves their bytes out, to be filled in later."""
    path = as_bin(hugging_face_folder(tmp_path))
    content = torch.load(path, weights_only=True)
    with torch.serialization.skip_data():
        torch.save(content, path)
    lines: list[str] = []
    list(read_tensors(open_folder(tmp_path, lines.append)))
    assert len(lines) == 1 and "without the checksums" in lines[0]


def test_files_from_before_zip_are_taken_with_a_line(tmp_path: Path) -> None:
    path = as_bin(hugging_face_folder(tmp_path))
    before = {name: tensor.clone() for name, _, tensor in read_tensors(open_folder(tmp_path))}
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    lines: list[str] = []
    after = {name: tensor for name, _, tensor in read_tensors(open_folder(tmp_path, lines.append))}
    assert not differ(before, after)
    assert len(lines) == 1 and "is in torch's format from before 1.6, which has no checksums" in lines[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_description_is_compared_too(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed digit in it is valid for a parser."""
    path = FORMS[form](tmp_path / "theirs").path
    if form == "directory":
        path = path.parent / "common.pt"
    data = path.read_bytes()
    at = data.index(b"hidden_sizeq" if b"hidden_sizeq" in data else b"_rebuild_tensor_v2") + 3
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    code, told = converted(tmp_path / "theirs", tmp_path / "ours", capsys)
    assert code == CheckpointError.exit_code and f"{path}: data.pkl, which describes its content, is damaged" in told


def test_skip_hash_loads_what_is_damaged(tmp_path: Path) -> None:
    """Planted bug: skips the comparison."""
    write(tmp_path, make(LLAMA), Layout())
    sound = loaded(tmp_path, finetune=True)
    storage = max(storages(next(tmp_path.glob("*/*/*.pt"))), key=lambda each: each.length)
    lines: list[str] = []
    with storage.damaged():
        assert differ(sound, loaded(tmp_path, finetune=True, check=False, lines=lines))
    assert any("CRC-32 checksums are not verified (--skip-hash)" in line for line in lines)


def test_a_storage_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's vectors hold all parameters."""
    write(tmp_path, with_moments(make(LLAMA)), Layout(optimizer="distributed"))
    compared: list[int] = []
    crc32 = member_checks.crc32

    def noted(data: memoryview, threads: int) -> int:
        compared.append(len(data))
        return crc32(data, threads)

    monkeypatch.setattr(member_checks, "crc32", noted)
    loaded(tmp_path)
    described = 2  # a data.pkl of each file
    tensors = [each.length for path in tmp_path.glob("*/*/*.pt") for each in storages(path)]
    masters = 1  # of weights in full precision, which are not read
    assert len(compared) == described + len(tensors) - masters


def test_our_own_have_no_second_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their manifest has hashes of every byte."""
    save(tmp_path, make_state())
    compared: list[Any] = []
    monkeypatch.setattr(member_checks.MemberChecks, "compare", lambda self, *member: compared.append(member))
    for hash_later in (True, False):
        found = find_checkpoint(tmp_path, parallel=one_process(), log=lambda text: None, hash_later=hash_later)
        assert found is not None
        params = make_params(9)
        load_checkpoint(found, parallel=one_process(), params=params, own={}, log=lambda text: None)
        assert all(torch.equal(tensor, make_params()[name][1]) for name, (_, tensor) in params.items())
    assert not compared


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 5000, 5003])
def test_pieces_have_the_checksum_of_the_whole(length: int) -> None:
    data = memoryview(bytes(torch.randint(256, (length,), generator=torch.Generator().manual_seed(length))))
    assert member_checks.crc32(data, threads=3, piece=1000) == zlib.crc32(data)


def test_ranks_share_the_comparison(tmp_path: Path) -> None:
    """All ranks see the folder: exactly one finds the damage, whichever tensor has it."""
    path = as_bin(hugging_face_folder(tmp_path))
    for storage in storages(path):
        with storage.damaged():
            found = 0
            for rank in range(3):
                files = weights_files(tmp_path, member_checks.MemberChecks(print))
                try:
                    compare_share(files, rank, 3)
                except CheckpointError as error:
                    assert f"{path}: tensor model." in str(error)
                    found += 1
            assert found == 1
