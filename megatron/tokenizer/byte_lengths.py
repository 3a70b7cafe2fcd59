"""Counts the bytes of text of each id, to convert a loss per token to a loss per byte."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from megatron.tokenizer.byte_alphabet import token_bytes

Lengths = npt.NDArray[np.int32]


def of_alphabet(vocab: Mapping[str, int], size: int) -> Lengths:
    """Returns the byte lengths of a vocabulary in GPT-2's byte alphabet. [size]"""
    lengths = np.zeros(size, dtype=np.int32)
    for token, index in vocab.items():
        lengths[index] = len(token_bytes(token))
    return lengths


def by_decoding(size: int, decode: Callable[[list[int]], str], anchor: int, known: Mapping[int, int]) -> Lengths:
    """Returns the number of bytes that each id adds between two letter tokens, [size]. A word mark counts as a space.

    `anchor`: id of a letter token. `known`: lengths that decoding does not show, such as those of single bytes.
    """
    alone = len(decode([anchor, anchor]).encode("utf-8"))
    lengths = np.zeros(size, dtype=np.int32)
    for index in range(size):
        shown = known.get(index)
        if shown is None:
            shown = max(len(decode([anchor, index, anchor]).encode("utf-8")) - alone, 0)
        lengths[index] = shown
    return lengths


def bytes_of_fallback(vocab: Iterable[tuple[str, int]]) -> dict[int, int]:
    """Maps the ids of <0x00> to <0xFF>, each of which stands for one byte, to the length 1."""
    return {index: 1 for token, index in vocab if len(token) == 6 and token.startswith("<0x") and token.endswith(">")}
