"""Learns a GPT-2 style byte-level BPE from text."""

import json
from collections.abc import Iterable

from megatron.errors import ConfigError
from megatron.tokenizer.base import END_OF_TEXT
from megatron.tokenizer.bpe_files import BPE, merge_pair
from megatron.tokenizer.byte_alphabet import CHARACTER_OF_BYTE

SMALLEST_VOCABULARY = len(CHARACTER_OF_BYTE) + 1  # every byte, and the end of document

LARGEST_VOCABULARY = 10_000_000
"""Largest accepted vocabulary size. The library allocates a table of the vocabulary size before it reads text, and
aborts the process if the allocation fails."""


def train_bpe(texts: Iterable[str], vocab_size: int, *, min_frequency: int = 2, show_progress: bool = False) -> BPE:
    """Learns at most `vocab_size` tokens: the 256 bytes, the merges in order and, last as in GPT-2, `<|endoftext|>`.

    The result is deterministic. Too little text gives fewer tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"--vocab-size {vocab_size}: must be at least {SMALLEST_VOCABULARY} (256 bytes and {END_OF_TEXT})"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise ConfigError(f"--vocab-size {vocab_size}: must be at most {LARGEST_VOCABULARY}")
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        initial_alphabet=list(CHARACTER_OF_BYTE),
        show_progress=show_progress,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
    merges = [merge_pair(merge) for merge in model["merges"]]
    return BPE({**vocab, END_OF_TEXT: len(vocab)}, merges)
