"""Output of a worker: three files per key on disk, with their sizes and checksums."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.data.indexed.files import array_bytes
from megatron.errors import MegatronError
from megatron.preprocess.input.files import InputFile
from megatron.utils.typed import typed

_STEM = re.compile(r"[0-9]{8,}-[0-9A-Za-z-]+")
PARTS = ("tokens", "lengths", "counts")  # tokens; the length of each sequence; the sequences per document


@dataclass(slots=True)
class Totals:
    """Counts of one key."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    max_id: int = -1
    longest: int = 0  # tokens of the longest document
    empty: int = 0

    def add(self, other: "Totals") -> None:
        self.documents += other.documents
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.max_id = max(self.max_id, other.max_id)
        self.longest = max(self.longest, other.longest)
        self.empty += other.empty


@dataclass(slots=True)
class WorkerOutput:
    """Sizes and checksums of one key's files."""

    totals: Totals
    sizes: list[int]  # of PARTS, in bytes
    digests: list[str]


@dataclass(slots=True)
class SegmentResult:
    """Result of a finished segment. Small and plain, because it goes through a pipe and the journal."""

    number: int
    source: str
    start: int
    stop: int
    position: int
    stem: str  # of its files in the work folder
    lines: int = 0
    size: int = 0
    documents: int = 0
    blank: int = 0
    bad: dict[str, int] = field(default_factory=dict)  # by kind
    examples: list[tuple[int, str]] = field(default_factory=list)  # the first bad lines (from 0) and the reasons
    outputs: list[WorkerOutput] = field(default_factory=list)  # one for each key

    def file(self, folder: Path, key: int, part: str) -> Path:
        return folder / f"{self.stem}.{key}.{part}"

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "SegmentResult":
        """Parses a journal entry; raises ValueError. The stem is checked because it becomes a path to delete."""
        result = typed(cls, content)
        if not _STEM.fullmatch(result.stem):
            raise ValueError(f"{result.stem[:100]!r} is not the stem of a segment's files")
        for output in result.outputs:
            if not len(output.sizes) == len(output.digests) == len(PARTS) or min(output.sizes) < 0:
                raise ValueError(f"sizes {output.sizes[:4]} cannot belong to the files of a segment")
        if min(result.number, result.start, result.stop, result.position) < 0:
            raise ValueError("a segment has a negative place")
        return result


@dataclass(slots=True)
class SegmentFailure:
    """Error that ends the run, as a value."""

    number: int
    error: type[MegatronError]
    message: str
    source: InputFile
    start: int
    line: int | None = None  # in the segment, counted from 0


@dataclass(slots=True)
class Encoded:
    """Concatenated documents of one key."""

    tokens: np.ndarray  # as in the .bin
    lengths: np.ndarray  # int32, of each sequence
    counts: np.ndarray  # int32, sequences of each document: 0 for an empty one
    text_bytes: int


class OutputWriter:
    """Writes the three files of one key; holds only the current documents in memory."""

    def __init__(self, paths: list[Path]) -> None:
        self._streams: list[BinaryIO] = []
        self._hashes = [hashlib.sha256() for _ in PARTS]
        self._sizes = [0] * len(PARTS)
        self._totals = Totals()
        for path in paths:
            self._streams.append(open(path, "wb", buffering=1 << 18))  # noqa: SIM115

    def add(self, encoded: Encoded) -> None:
        for number, array in enumerate((encoded.tokens, encoded.lengths, encoded.counts)):
            view = array_bytes(array)
            self._streams[number].write(view)
            self._hashes[number].update(view)
            self._sizes[number] += len(view)
        self._totals.add(_totals(encoded))

    def finish(self) -> WorkerOutput:
        self.close()
        return WorkerOutput(self._totals, self._sizes, [digest.hexdigest() for digest in self._hashes])

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def _totals(encoded: Encoded) -> Totals:
    ends = np.cumsum(encoded.lengths, dtype=np.int64)
    bounds = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(encoded.counts)])]
    per_document = np.diff(bounds)
    return Totals(
        documents=len(encoded.counts),
        sequences=len(encoded.lengths),
        tokens=len(encoded.tokens),
        text_bytes=encoded.text_bytes,
        max_id=int(encoded.tokens.max(initial=0)) if len(encoded.tokens) else -1,
        longest=int(per_document.max(initial=0)),
        empty=int(np.count_nonzero(per_document == 0)),
    )
