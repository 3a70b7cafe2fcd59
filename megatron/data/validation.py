"""Counts the samples of validation sets before their sample order is built."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megatron.config.blend import data_sources
from megatron.config.validation import ONE_SET, SET_PREFIX, named_sets
from megatron.data.index_builders import samples_in
from megatron.data.sources import Sources
from megatron.errors import DataError

if TYPE_CHECKING:
    from megatron.config.sections.data import DataConfig


def empty_set(flag: str, prefix: str, what: str, tokens: int, seq_length: int) -> DataError:
    return DataError(
        f"{flag} {prefix}: the {what} is empty ({tokens} tokens, but one sample takes {seq_length + 1}); remove it, or "
        "add text to it"
    )


def sizes_of_sets(config: "DataConfig", sources: Sources) -> Iterator[tuple[str, int]]:
    """Yields (`split` in log records, number of samples) of each validation set that has its own files. Raises for an
    empty set. Skips conversations and weighted blends, because their length is known only when they are built."""
    asked = data_sources(config)
    blend = None if asked.cut else asked.blends[1]
    if blend is None or config.sft or blend.weights is not None:
        return
    sets: list[tuple[str, str, tuple[str, ...]]]
    if config.multiple_validation_sets:
        sets = [(f"{SET_PREFIX}{name}", f"validation set {name}", (each,)) for name, each in named_sets(config, blend)]
    else:
        sets = [(ONE_SET, "validation set", blend.prefixes)]
    for split, what, prefixes in sets:
        tokens = [int(sources.open(prefix).data.sequence_lengths.sum(dtype=np.int64)) for prefix in prefixes]
        samples = sum(samples_in(each, config.seq_length) for each in tokens)
        if not samples:
            raise empty_set(blend.flag, prefixes[0], what, sum(tokens), config.seq_length)
        yield split, samples
