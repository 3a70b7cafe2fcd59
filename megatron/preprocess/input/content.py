"""Determines the kind of an input file by its ending or its first bytes."""

import json
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from megatron.errors import ConfigError

UTF8_BOM = b"\xef\xbb\xbf"
KINDS = {".gz": "gzip", ".zst": "zstd", ".parquet": "parquet"}
SNIFFED_BYTES = 1 << 14
_BEGINNINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
_UNPACKED_BYTES = 1 << 20  # many, because they may begin with white space


def look_into(file: BinaryIO, path: str, size: int) -> tuple[str, bool]:
    """Returns the kind, by the ending or else by the first bytes, and whether the file is one JSON array."""
    head = file.read(SNIFFED_BYTES)
    if head and not size:
        return "stdin", False  # some file systems report no size; the file must not count as empty
    kind = KINDS.get(Path(path).suffix.lower())
    if kind is None:
        kind = next((kind for beginning, kind in _BEGINNINGS.items() if head.startswith(beginning)), "lines")
    if kind == "lines" and begins_array(_behind_blanks(file, head)):
        return "array", True
    if kind == "parquet":
        reader_of(".parquet")  # fails before anything is read
    if kind in ("gzip", "zstd") and not size:
        raise ConfigError(
            f"--input {path}: has 0 bytes, but even an empty archive has more; fetch it again, or remove it from "
            "--input"
        )
    return kind, kind in ("gzip", "zstd") and begins_array(_decompressed_head(kind, head))


def _behind_blanks(file: BinaryIO, head: bytes) -> bytes:
    """Returns the first bytes after white space."""
    while head and not head.removeprefix(UTF8_BOM).strip():
        head = file.read(SNIFFED_BYTES)
    return head


def begins_array(head: bytes) -> bool:
    """True for one JSON array, false for JSON lines whose first line is a list."""
    head = head.removeprefix(UTF8_BOM).lstrip()
    line, _, others = head.partition(b"\n")
    return head.startswith(b"[") and not (others.strip() and _is_json(line))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def reader_of(ending: str) -> Any:
    """Imports the module that reads files with this ending, from an optional package."""
    module = {".zst": "zstandard", ".parquet": "pyarrow.parquet"}[ending]
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError(f"--input: reading {ending} needs the package {package}; pip install {package}") from None


def _decompressed_head(kind: str, head: bytes) -> bytes:
    """Decompresses the head of a file as far as possible. Damage is reported when the file is read."""
    if kind == "gzip":
        try:
            return zlib.decompressobj(wbits=31).decompress(head, _UNPACKED_BYTES)
        except zlib.error:
            return b""
    zstandard = reader_of(".zst")
    try:
        found: bytes = zstandard.ZstdDecompressor().stream_reader(head).read(_UNPACKED_BYTES)
        return found
    except zstandard.ZstdError:
        return b""
