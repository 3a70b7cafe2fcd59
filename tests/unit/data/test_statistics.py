from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.indexed.statistics import (
    Bin,
    document_lengths,
    draw_histogram,
    draw_svg,
    length_statistics,
    log_bins,
)
from tests.unit.data.oracle import random_documents, write_dataset


def test_numbers_against_plain_python(tmp_path: Path) -> None:
    texts = random_documents(3, 200, 50)
    found = length_statistics(IndexedDataset(write_dataset(tmp_path / "d", texts)))
    lengths = sorted(len(text) for text in texts)
    assert (found.documents, found.sequences, found.tokens) == (200, 200, sum(lengths))
    assert (found.shortest, found.longest, found.mean) == (lengths[0], lengths[-1], sum(lengths) / 200)
    assert len(texts[found.longest_document]) == lengths[-1]
    assert found.empty == found.empty_sequences == lengths.count(0) > 0
    assert found.percentiles[50] in lengths[98:102] and found.percentiles[99] in lengths[196:199]
    for b in found.bins:
        assert b.documents == sum(b.first <= length <= b.last for length in lengths)


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "d", "uint16") as builder:
        builder.add_document([1, 2, 3, 4, 5], [2, 0, 3])
        builder.add_document([], [])
        builder.add_document([1], [1])
    data = IndexedDataset(tmp_path / "d")
    assert document_lengths(data).tolist() == [5, 0, 1]
    found = length_statistics(data)
    assert (found.sequences, found.empty, found.empty_sequences) == (4, 1, 1)


def test_empty(tmp_path: Path) -> None:
    found = length_statistics(IndexedDataset(write_dataset(tmp_path / "d", [])))
    assert (found.documents, found.longest, found.mean, found.bins) == (0, 0, 0.0, ())
    assert draw_histogram(found.bins) and ElementTree.fromstring(draw_svg(found.bins, "t")) is not None


def test_bins_double() -> None:
    bins = log_bins(np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 2**33]))
    assert [(b.first, b.last, b.documents) for b in bins[:6]] == [
        (0, 0, 1),
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 2),
        (8, 15, 2),
        (16, 31, 1),
    ]
    assert bins[-1] == Bin(2**33, 2**34 - 1, 1)
    assert log_bins(np.array([5, 6]))[0].first == 4  # nothing before the shortest


def test_pictures() -> None:
    bins = [Bin(1, 1, 1000), Bin(2, 3, 500), Bin(4, 7, 1), Bin(8, 15, 0)]
    bars = [line.count("#") for line in draw_histogram(bins, width=40, block="#").splitlines()]
    assert bars == [0, 40, 20, 1, 0]  # one document is seen, none is not
    picture = ElementTree.fromstring(draw_svg(bins, "a < b & c"))
    widths = [float(r.get("width", "0")) for r in picture.iter("{http://www.w3.org/2000/svg}rect") if r.get("x")]
    assert widths[0] == 2 * widths[1] > widths[2] > 0 == widths[3]
