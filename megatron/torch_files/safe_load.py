"""Loads `.pt` files by torch's loader. No code in them runs, and they cannot decompress to more than their size.

The loader gets `weights_only=True`, which no environment variable can undo, and is never called without it.
"""

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.errors import CheckpointError
from megatron.torch_files.pickle_instructions import PickleRefused
from megatron.torch_files.pickle_scan import scan

_MAX_MEMBERS = 1_000_000


class MissingPartError(CheckpointError):
    """Files of some ranks are missing."""


class UnsafeFileError(CheckpointError):
    """A file that contains more than tensors and plain values."""


def load_file(path: Path, *, allow: Sequence[Callable | tuple[Callable, str]] = ()) -> Any:
    """Loads one file with its tensors mapped from disk. `allow`: further classes to accept, of another program's
    format."""
    check_container(path)
    check_pickle(path, allow)
    try:
        with torch.serialization.safe_globals(list(allow)):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0][:200]
        raise UnsafeFileError(
            f"{path} cannot be read as plain weights ({type(error).__name__}: {first_line}); copy or download it again"
        ) from error
    check_storages(content, path)
    return content


def check_container(path: Path) -> None:
    """Rejects zip files that torch did not write. Members of torch's files are uncompressed and have unique names."""
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint file of torch's zip format ({error}); copy or download it again"
        ) from error
    check_members(path, members, size)


def check_members(path: Path, members: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Checks the members of a zip file: torch's are uncompressed, have unique names and together fit into `size`."""
    if len(members) > _MAX_MEMBERS:
        raise UnsafeFileError(f"{path} has {len(members)} members; at most {_MAX_MEMBERS} are supported")
    if any(m.compress_type != zipfile.ZIP_STORED or m.file_size != m.compress_size for m in members):
        raise UnsafeFileError(
            f"{path} has compressed members, which torch never writes; write it again with torch.save"
        )
    if sum(m.file_size for m in members) > size:
        raise UnsafeFileError(f"{path} has members that claim more bytes than the file has; copy or download it again")
    if len({m.filename for m in members}) != len(members):
        raise UnsafeFileError(f"{path} has two members with the same name; copy or download it again")


def check_pickle(path: Path, allow: Sequence[Callable | tuple[Callable, str]]) -> None:
    names = {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__name__}" for each in allow}
    try:
        scan(torch._C.PyTorchFileReader(str(path)).get_record("data.pkl"), names)  # as torch.load reads it
    except (PickleRefused, RuntimeError) as error:
        first_line = str(error).partition("\n")[0][:200]
        raise UnsafeFileError(
            f"{path} cannot be read as plain weights: {first_line}; use a file that torch.save wrote with only tensors "
            "and plain values"
        ) from error


def check_storages(content: Any, path: Path) -> None:
    """Raises if the tensors claim more memory than the file has."""
    seen: dict[int, int] = {}
    for tensor in tensors_in(content):
        if tensor.layout != torch.strided or tensor.is_meta:
            raise UnsafeFileError(f"{path} holds a sparse or meta tensor; only dense tensors are supported")
        storage = tensor.untyped_storage()
        if tensor.nbytes > storage.nbytes():
            raise UnsafeFileError(f"{path} holds a tensor that is larger than its storage; save it after contiguous()")
        seen[storage._cdata] = storage.nbytes()
    if sum(seen.values()) > path.stat().st_size:
        raise UnsafeFileError(
            f"{path} holds tensors that claim more bytes than the file has; copy or download it again"
        )


def tensors_in(content: Any) -> list[Tensor]:
    found: list[Tensor] = []
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            waiting.extend(item)
    return found
