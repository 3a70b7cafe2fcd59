"""Datasets being written, one per key. They grow in the work folder and are renamed when all are complete."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron.data.indexed.checksums import BLOCK_BYTES
from megatron.data.indexed.dataset import bin_path, idx_path
from megatron.data.indexed.growing import GrowingIndex
from megatron.data.indexed.record import record_path
from megatron.errors import ConfigError
from megatron.preprocess.worker_output import PARTS, SegmentResult, Totals
from megatron.utils.durable import BlockHasher

_COPY_BYTES = 4 << 20


def refuse_existing(prefix: str, outputs: Sequence[str]) -> None:
    """Rejects existing outputs: before any work, and again before the final renames."""
    for output in outputs:
        for path in (bin_path(output), idx_path(output)):
            if os.path.lexists(path):
                raise ConfigError(
                    f"--output-prefix {prefix}: {path} exists; give --overwrite to replace it "
                    "(--resume continues an interrupted run)"
                )


@dataclass
class GrowingOutput:
    """Files of one key: the segments merged so far, concatenated."""

    folder: Path
    key: int
    dtype: np.dtype
    totals: Totals = field(default_factory=Totals)
    checksums: BlockHasher = field(default_factory=lambda: BlockHasher(BLOCK_BYTES))
    sizes: list[int] = field(default_factory=lambda: [0] * len(PARTS))
    streams: list[BinaryIO] = field(default_factory=list)

    def path(self, part: str) -> Path:
        return self.folder / f"{self.key}.{part}"

    def open(self) -> None:
        """Opens the files for appending, truncated to their verified part."""
        for part, size in zip(PARTS, self.sizes, strict=True):
            stream = open(self.path(part), "ab+", buffering=0)  # noqa: SIM115
            self.streams.append(stream)
            stream.truncate(size)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def append(self, result: SegmentResult) -> bool:
        """Appends an output; returns False if one of its files does not match the worker's checksum."""
        output = result.outputs[self.key]
        for number, part in enumerate(PARTS):
            path = result.file(self.folder, self.key, part)
            if not _copy(path, self.streams[number], output.digests[number], self.checksums if not number else None):
                return False
        self.take(result)
        return True

    def take(self, result: SegmentResult) -> None:
        output = result.outputs[self.key]
        self.totals.add(output.totals)
        for number, size in enumerate(output.sizes):
            self.sizes[number] += size

    def holds(self, result: SegmentResult) -> bool:
        """Returns True if the files continue with the bytes of this segment. Then adds its tokens to the checksums."""
        output = result.outputs[self.key]
        for number, part in enumerate(PARTS):
            if _sha256_of(self.path(part), self.sizes[number], output.sizes[number]) != output.digests[number]:
                return False
        for block in _blocks_of(self.path("tokens"), self.sizes[0], output.sizes[0]):
            self.checksums.update(block)
        return True

    def write_index(self, implementation: str) -> None:
        GrowingIndex(self.streams[1], self.streams[2]).write(self.path("idx"), self.dtype, implementation)
        os.fsync(self.streams[0].fileno())


def shard_is_whole(result: SegmentResult, folder: Path) -> bool:
    return all(
        _sha256_of(result.file(folder, key, part), 0, None) == output.digests[number]
        for key, output in enumerate(result.outputs)
        for number, part in enumerate(PARTS)
    )


def _sha256_of(path: Path, start: int, size: int | None) -> str | None:
    """Returns the sha256 of `size` bytes (None: all) from `start`; None if the file is shorter or missing."""
    digest, length = hashlib.sha256(), 0
    try:
        for block in _blocks_of(path, start, size):
            digest.update(block)
            length += len(block)
    except FileNotFoundError:
        return None
    return digest.hexdigest() if size is None or length == size else None


def _blocks_of(path: Path, start: int, size: int | None) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as stream:
        stream.seek(start)
        left = size
        while left is None or left:
            block = stream.read(_COPY_BYTES if left is None else min(left, _COPY_BYTES))
            if not block:
                return
            left = None if left is None else left - len(block)
            yield block


def _copy(path: Path, stream: BinaryIO, wanted: str, checksums: BlockHasher | None) -> bool:
    digest = hashlib.sha256()
    for block in _blocks_of(path, 0, None):
        digest.update(block)
        if checksums is not None:
            checksums.update(block)
        _write_all(stream, block)
    return digest.hexdigest() == wanted


def _write_all(stream: BinaryIO, block: bytes) -> None:
    """Writes a whole block, because an unbuffered write may be partial."""
    view = memoryview(block)
    while view:
        view = view[stream.write(view) :]


def take_names_back(folder: Path, outputs: Sequence[str]) -> None:
    """Undoes the renames if the run was killed between them, so that it can be resumed."""
    for key, output in enumerate(outputs):
        kept = folder / f"{key}.tokens"
        if not kept.exists() and bin_path(output).is_file():
            for path in (record_path(output), idx_path(output)):
                path.unlink(missing_ok=True)
            bin_path(output).replace(kept)
