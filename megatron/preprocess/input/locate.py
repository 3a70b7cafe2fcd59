"""Finds the line of a document. Segments are cut by bytes, so lines are counted only for messages."""

from dataclasses import dataclass, replace

from megatron.errors import MegatronError
from megatron.preprocess.input.files import InputFile
from megatron.preprocess.input.segments import Segment, count_lines
from megatron.preprocess.worker_output import SegmentResult

_QUICK = 1 << 30  # most bytes that are read to find a line number, because the failed run waits for it


@dataclass(slots=True)
class Assigned:
    """Segment that a worker is encoding, without its data."""

    segment: Segment
    lines: int | None  # None: unknown without reading
    done: int = 0  # of its lines


def assigned(segment: Segment) -> Assigned:
    if segment.data is None:
        return Assigned(segment, None)
    return Assigned(replace(segment, data=None), segment.data.count(b"\n"))


class Lines:
    """Counts the lines of an input file as its segments finish in order."""

    def __init__(self) -> None:
        self._source: InputFile | None = None
        self._first_start = self._before = 0
        self._end = 0  # where the segments counted so far end

    def enter(self, source: InputFile, start: int) -> None:
        """Sets the next segment by its source and start."""
        if self._source is None or source.path != self._source.path:
            self._source, self._first_start, self._end, self._before = source, start, start, 0

    def leave(self, result: SegmentResult) -> None:
        self._before += result.lines
        self._end = result.stop

    def place(self, line: int) -> str:
        """Returns the place of a line of the next segment. `line` counts from 0, the message from 1."""
        assert self._source is not None
        share = count_lines(self._source, 0, self._first_start)  # a partition may begin inside a file
        return self._source.place(share + self._before + line + 1)

    def place_range(self, lost: Assigned, between: list[Assigned]) -> str:
        """Returns the unprocessed lines of a lost segment; the segments `between` are also unfinished."""
        try:
            return self._place_range(lost, between)
        except (OSError, MegatronError):  # the lines of a missing or changed file cannot be counted
            unit = "row groups" if lost.segment.source.kind == "parquet" else "bytes"
            return f"{lost.segment.source.path}, {unit} {lost.segment.start} to {lost.segment.stop}"

    def _place_range(self, lost: Assigned, between: list[Assigned]) -> str:
        segment = lost.segment
        source = segment.source
        if source.kind == "parquet":
            first = count_lines(source, 0, segment.start)
            last = first + count_lines(source, segment.start, segment.stop)
            return f"{source.path}, rows {first + lost.done + 1} to {last}"
        before = [other for other in between if other.segment.source.path == source.path]
        same = self._source is not None and self._source.path == source.path
        if segment.source.kind == "lines":
            counted_to = self._end if same else 0
            if (0 if same else segment.start) + segment.stop - counted_to > _QUICK or (same and self._first_start):
                return f"{source.path}, bytes {segment.start} to {segment.stop}"
            first = (self._before if same else 0) + count_lines(source, counted_to, segment.start)
            last = first + count_lines(source, segment.start, segment.stop)
        else:
            first = (self._before if same else 0) + sum(other.lines or 0 for other in before)
            last = first + (lost.lines or 0)
        name = "items" if source.array else "lines"
        return f"{source.path}, {name} {first + lost.done + 1} to {max(last, first + lost.done + 1)}"

    def place_waiting(self, first: InputFile) -> str:
        return f"{(self._source or first).path}, after line {self._before}"
