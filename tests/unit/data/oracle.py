"""The sample order from the format's description, in plain loops that share no code with the package."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed.builder import IndexedDatasetBuilder


def write_dataset(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> str:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for tokens in documents:
            builder.add_document(tokens)
    return str(prefix)


def random_documents(seed: int, count: int, longest: int, vocab: int = 1000) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab, random.integers(0, longest + 1)).tolist() for _ in range(count)]


@dataclass
class Order:
    epochs: int
    separate: bool
    documents: list[int]
    samples: list[tuple[int, int]]
    order: list[int]


def gpt_order(lengths: list[int], chosen: list[int], wanted: int, seq: int, seed: int) -> Order:
    per_epoch = sum(lengths[d] for d in chosen)
    epochs = 1
    while (epochs * per_epoch - 1) // seq < wanted:
        epochs += 1
    separate = False
    if epochs > 1:
        in_all_but_last = ((epochs - 1) * per_epoch - 1) // seq
        separate = wanted - in_all_but_last < int(0.8 * ((per_epoch - 1) // seq))

    random = np.random.RandomState(seed)
    groups = [epochs - 1, 1] if separate else [epochs]
    documents: list[int] = []
    for repeats in groups:
        part = np.array(chosen * repeats, dtype=np.int32)
        random.shuffle(part)
        documents += part.tolist()

    total = (epochs * per_epoch - 1) // seq
    samples = walk(lengths, documents, seq, total)

    first = ((epochs - 1) * per_epoch - 1) // seq if separate else total
    order: list[int] = []
    for begin, end in ((0, first), (first, total)):
        part = np.arange(begin, end, dtype=np.uint32)
        random.shuffle(part)
        order += part.tolist()
    return Order(epochs, separate, documents, samples, order)


def walk(lengths: list[int], documents: list[int], seq: int, total: int) -> list[tuple[int, int]]:
    """Walks token by token: a new sample starts on the last token of the one before."""
    bounds = [(0, 0)]
    seen = 0
    for place, document in enumerate(documents):
        for offset in range(lengths[document]):
            if seen and seen % seq == 0 and len(bounds) <= total:
                bounds.append((place, offset))
            seen += 1
    assert len(bounds) == total + 1
    return bounds


def gpt_samples(texts: list[list[int]], chosen: list[int], wanted: int, seq: int, seed: int) -> list[list[int]]:
    """Tokens of every sample in training order."""
    order = gpt_order([len(text) for text in texts], chosen, wanted, seq, seed)
    stream = [token for document in order.documents for token in texts[document]]
    return [stream[number * seq : number * seq + seq + 1] for number in order.order]


def blend(weights: list[float], size: int) -> tuple[list[int], list[int]]:
    total = np.sum(np.array(weights))
    weights = [float(weight / total) for weight in weights]
    taken = [0] * len(weights)
    datasets, numbers = [], []
    for sample in range(size):
        best, best_error = 0, -math.inf
        for dataset, weight in enumerate(weights):
            error = weight * max(sample, 1) - taken[dataset]
            if error > best_error:
                best, best_error = dataset, error
        datasets.append(best)
        numbers.append(taken[best])
        taken[best] += 1
    return datasets, numbers
