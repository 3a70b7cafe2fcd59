"""A small sample of the input, the same for every run, from which the sentence splitter learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from megatron.errors import ConfigError
from megatron.preprocess.input.files import InputFile
from megatron.preprocess.input.segments import Segment, plan_segments, read_batches

Item = TypeVar("Item")

SAMPLED_SOURCES, SAMPLED_SEGMENTS, SEGMENT_BYTES = 16, 16, 1 << 19


def texts_of_sample(sources: Sequence[InputFile], keys: Sequence[str]) -> Iterator[str]:
    """Texts from evenly spaced files and places in them, independent of the partition. Skips bad lines, which the run
    itself reports."""
    for source in sources:
        if source.kind == "stdin":
            raise ConfigError(
                f"--split-sentences: sentence ends cannot be learned from {source.path}, which is read only once; "
                "give a file, or install NLTK's punkt_tab data"
            )
    chosen = _evenly(sources, SAMPLED_SOURCES)
    for source in chosen:
        for segment in _segments(source, max(1, SAMPLED_SEGMENTS // len(chosen))):
            for batch in read_batches(segment, keys):
                for _, texts_of_keys in batch.documents:
                    for texts in texts_of_keys:
                        yield from texts


def _segments(source: InputFile, count: int) -> list[Segment] | Iterator[Segment]:
    if source.kind == "lines":  # by arithmetic, because the plan of a terabyte has millions of segments
        starts = _evenly(range(0, source.size, SEGMENT_BYTES), count)
        stops = [min(start + SEGMENT_BYTES, source.size) for start in starts]
        return [Segment(source, i, start, stop, None, stop) for i, (start, stop) in enumerate(zip(starts, stops))]
    return islice(plan_segments([source], segment_bytes=SEGMENT_BYTES), count)  # read from the beginning


def _evenly(items: Sequence[Item], count: int) -> list[Item]:
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
