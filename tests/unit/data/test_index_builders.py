"""C++, numpy and plain loops give equal arrays, equal to Megatron's; planted bugs are found."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import index_builders
from megatron.data.index_builders import (
    Builders,
    epochs_needed,
    position_dtype,
    samples_in,
    separate_last_epoch,
    shuffle_dtype,
)
from megatron.errors import ConfigError
from tests.unit.data import oracle

HAVE_CPP = Builders.resolve().helpers is not None
IMPLEMENTATIONS = ["numpy", *(["c++"] if HAVE_CPP else [])]
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 0)


def build(implementation: str, lengths: list[int], wanted: int, seq: int, seed: int) -> oracle.Order:
    """The arrays, built as in GPTDataset."""
    builders = Builders.resolve(implementation)  # type: ignore[arg-type]
    tokens = sum(lengths)
    epochs = epochs_needed(tokens, seq, wanted)
    separate = separate_last_epoch(tokens, seq, epochs, wanted)
    total = samples_in(epochs * tokens, seq)
    random = np.random.RandomState(seed)
    documents = builders.document_index(0, len(lengths), epochs, separate, random)
    samples = builders.sample_index(np.array(lengths, dtype=np.int32), documents, seq, total)
    first = samples_in((epochs - 1) * tokens, seq) if separate else total
    order = builders.shuffle_index(first, total, random)
    assert (documents.dtype, samples.dtype, order.dtype) == (np.int32, np.int32, np.uint32)
    return oracle.Order(epochs, separate, documents.tolist(), [tuple(row) for row in samples.tolist()], order.tolist())


# Printed by Megatron-LM (core 0.16.1) for documents of 3, 0, 7, 2, 5 and 1 tokens, seq 4: (samples, seed) -> indices
MEGATRON = {
    (4, 1234): (
        [2, 1, 5, 0, 4, 3],
        [[0, 0], [0, 4], [3, 0], [4, 1], [5, 0]],
        [0, 2, 1, 3],
    ),
    (12, 1234): (
        [5, 3, 5, 4, 1, 2, 0, 2, 4, 1, 1, 3, 2, 4, 0, 5, 0, 3],
        [[0, 0], [3, 0], [3, 4], [5, 3], [6, 0], [7, 1], [7, 5], [8, 2], [11, 1], [12, 3], [13, 0], [13, 4], [15, 0],
         [17, 0]],
        [4, 7, 1, 10, 9, 3, 8, 12, 11, 5, 0, 2, 6],
    ),
    (20, 7): (
        [2, 5, 1, 3, 5, 5, 0, 0, 3, 5, 0, 1, 4, 0, 4, 0, 2, 2, 4, 3, 2, 2, 1, 5, 1, 3, 4, 1, 4, 3],
        [[0, 0], [0, 4], [3, 0], [6, 0], [7, 1], [9, 0], [12, 0], [12, 4], [14, 0], [14, 4], [16, 0], [16, 4], [17, 1],
         [17, 5], [18, 2], [19, 1], [20, 3], [21, 0], [21, 4], [25, 0], [26, 2], [28, 1], [29, 0]],
        [20, 13, 15, 5, 16, 17, 10, 1, 21, 11, 8, 12, 3, 7, 19, 18, 4, 6, 14, 9, 2, 0],
    ),
}  # fmt: skip


@both
@pytest.mark.parametrize("case", MEGATRON)
def test_numbers_of_megatron(implementation: str, case: tuple[int, int]) -> None:
    documents, samples, order = MEGATRON[case]
    got = build(implementation, [3, 0, 7, 2, 5, 1], case[0], 4, case[1])
    assert got.documents == documents
    assert got.samples == [tuple(bound) for bound in samples]
    assert got.order == order


@both
@settings(max_examples=150, deadline=None)
@given(lengths=lengths_lists, wanted=st.integers(0, 200), seq=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_equal_to_plain_loops(implementation: str, lengths: list[int], wanted: int, seq: int, seed: int) -> None:
    expected = oracle.gpt_order(lengths, list(range(len(lengths))), wanted, seq, seed)
    assert build(implementation, lengths, wanted, seq, seed) == expected


# Enough epochs for a last one that is, and one that is not, shuffled by itself
MANY_EPOCHS = [([3, 0, 7, 2, 5, 1], wanted, 2, 3) for wanted in range(1, 60)]


def differs(lengths: list[int], wanted: int, seq: int, seed: int) -> bool:
    expected = oracle.gpt_order(lengths, list(range(len(lengths))), wanted, seq, seed)
    try:
        return build("numpy", lengths, wanted, seq, seed) != expected
    except IndexError:
        return True


@pytest.mark.parametrize(
    "bug", ["none", "threshold", "threshold <=", "one sample more", "off by one", "shuffle before", "one shuffle"]
)
def test_planted_bugs_are_seen(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    real_sample, real_order = Builders.sample_index, Builders.shuffle_index
    if bug == "threshold":
        monkeypatch.setitem(globals(), "separate_last_epoch", lambda tokens, seq, epochs, wanted: (
            epochs > 1 and wanted - samples_in((epochs - 1) * tokens, seq) < int(0.7 * samples_in(tokens, seq))
        ))  # fmt: skip
    elif bug == "threshold <=":
        monkeypatch.setitem(globals(), "separate_last_epoch", lambda tokens, seq, epochs, wanted: (
            epochs > 1 and wanted - samples_in((epochs - 1) * tokens, seq) <= int(0.8 * samples_in(tokens, seq))
        ))  # fmt: skip
    elif bug == "one sample more":
        monkeypatch.setitem(globals(), "samples_in", lambda tokens, seq: tokens // seq)
    elif bug == "off by one":

        def shifted(self: Builders, *args: object) -> np.ndarray:
            samples = real_sample(self, *args)  # type: ignore[arg-type]
            samples[1:, 1] += 1
            return samples

        monkeypatch.setattr(Builders, "sample_index", shifted)
    elif bug == "shuffle before":

        def other_order(
            self: Builders, first: int, count: int, epochs: int, separate: bool, rng: np.random.RandomState
        ):
            rng.random_sample()
            return real_documents(self, first, count, epochs, separate, rng)

        real_documents = Builders.document_index
        monkeypatch.setattr(Builders, "document_index", other_order)
    elif bug == "one shuffle":
        monkeypatch.setattr(
            Builders, "shuffle_index", lambda self, first, total, rng: real_order(self, total, total, rng)
        )
    assert any(differs(*case) for case in MANY_EPOCHS) == (bug != "none")


@pytest.mark.skipif(not HAVE_CPP, reason="the C++ helpers are not built")
@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(0, 3000),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(["int32", "uint32", "int64"]),
    before=st.integers(0, 700),
)
def test_shuffle_is_that_of_numpy_draw_for_draw(count: int, seed: int, dtype: str, before: int) -> None:
    ours, numpys = np.random.RandomState(seed), np.random.RandomState(seed)
    for random in (ours, numpys):
        random.randint(0, 100, before)
    mine, theirs = np.arange(count, dtype=dtype), np.arange(count, dtype=dtype)
    Builders.resolve("c++").shuffle(mine, ours)
    numpys.shuffle(theirs)
    assert np.array_equal(mine, theirs)
    assert ours.random_sample() == numpys.random_sample()  # and the generator's state is right


@pytest.mark.skipif(not HAVE_CPP, reason="the C++ helpers are not built")
@pytest.mark.parametrize("count", [2**16, 2**16 + 1, 300_001])
def test_shuffle_of_long_arrays(count: int) -> None:
    mine, theirs = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32)
    Builders.resolve("c++").shuffle(mine, np.random.RandomState(5))
    np.random.RandomState(5).shuffle(theirs)
    assert np.array_equal(mine, theirs)


@both
def test_blocks_of_the_numpy_twin(implementation: str) -> None:
    """More documents than one block, with empty ones at the boundary."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 3, 1000).astype(np.int32)
    documents = random.integers(0, 1000, (1 << 18) + 5000).astype(np.int32)
    lengths[documents[(1 << 18) - 3 : (1 << 18) + 3]] = 0
    tokens = int(lengths[documents].sum(dtype=np.int64))
    got = Builders.resolve(implementation).sample_index(lengths, documents, 1000, samples_in(tokens, 1000))  # type: ignore[arg-type]
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    numbers = np.arange(1, len(got), dtype=np.int64) * 1000
    places = np.searchsorted(ends, numbers, side="right")
    assert np.array_equal(got[1:, 0], places)
    assert np.array_equal(got[1:, 1], numbers - (ends[places] - lengths[documents[places]]))


@pytest.mark.skipif(not HAVE_CPP, reason="the C++ helpers are not built")
@settings(max_examples=100, deadline=None)
@given(
    lengths=lengths_lists,
    epochs=st.integers(1, 4),
    seq=st.integers(1, 40),
    threads=st.integers(1, 9),
    wide=st.booleans(),
    seed=st.integers(0, 99),
)
def test_threads_change_nothing(lengths: list[int], epochs: int, seq: int, threads: int, wide: bool, seed: int) -> None:
    """Includes more threads than documents, and both widths of document numbers."""
    cpp = Builders.resolve("c++")
    documents = cpp.document_index(0, len(lengths), epochs, False, np.random.RandomState(seed))
    documents = documents.astype(np.int64) if wide else documents
    table = np.array(lengths, dtype=np.int32)
    samples = samples_in(epochs * sum(lengths), seq)
    expected = Builders.resolve("numpy").sample_index(table, documents, seq, samples)
    assert cpp.helpers is not None
    for dtype in ("int32", "int64"):
        out = np.full((samples + 1, 2), -1, dtype=dtype)
        if dtype == "int64" or expected.dtype == np.int32:
            cpp.helpers.sample_index(table, documents, seq, out, threads=threads)
            assert np.array_equal(out, expected)


@pytest.mark.skipif(not HAVE_CPP, reason="the C++ helpers are not built")
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_over_several_rounds(threads: int) -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(0, 4, 5000).astype(np.int32)
    documents = random.integers(0, 5000, 2 * (1 << 20) + 12345).astype(np.int32)
    samples = samples_in(int(lengths[documents].sum(dtype=np.int64)), 77)
    expected = Builders.resolve("numpy").sample_index(lengths, documents, 77, samples)
    helpers = Builders.resolve("c++").helpers
    assert helpers is not None
    out = np.empty_like(expected)
    helpers.sample_index(lengths, documents, 77, out, threads=threads)
    assert np.array_equal(out, expected)
    documents[-1] = 5000  # in the part of the last thread
    with pytest.raises(IndexError, match="outside the dataset"):
        helpers.sample_index(lengths, documents, 77, out, threads=threads)


@both
def test_long_work_is_said_and_short_work_is_not(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    builders = Builders.resolve(implementation, say=said.append)  # type: ignore[arg-type]
    for entries, lines in (
        (1 << 25, []),
        (
            5,
            [
                "data index: shuffling 6 sequences ...",
                "data index: concatenating 6 sequences ...",
                "data index: shuffling 9 samples ...",
                "data index: choosing the source of each of 7 samples ...",
            ],
        ),
    ):
        monkeypatch.setattr(index_builders, "_WORTH_SAYING", entries)
        documents = builders.document_index(0, 3, 2, False, np.random.RandomState(1))
        builders.sample_index(np.full(3, 4, dtype=np.int32), documents, 2, 9)
        builders.shuffle_index(9, 9, np.random.RandomState(1))
        builders.blend(np.array([0.5, 0.5]), 7)
        assert said == lines


def test_number_of_threads() -> None:
    """Small arrays use no threads; never more threads than usable cores."""
    resolved = Builders.resolve()
    assert resolved.threads_for(1000) == 1 and resolved.threads_for(1 << 40) == resolved.threads
    assert 1 <= resolved.threads <= 8
    assert Builders(None, "", threads=4).threads_for(3 << 18) == 3


@both
def test_no_memory_but_that_of_the_arrays(implementation: str) -> None:
    """numpy reports a peak of the arrays plus one block, for any number of epochs."""
    builders = Builders.resolve(implementation)  # type: ignore[arg-type]
    count = 3_000_000
    lengths = np.full(count, 100, dtype=np.int32)
    for epochs in (1, 3):
        random = np.random.RandomState(1)
        tracemalloc.start()
        documents = builders.document_index(0, count, epochs, epochs > 1, random)
        samples = builders.sample_index(lengths, documents, 512, samples_in(epochs * count * 100, 512))
        order = builders.shuffle_index(len(samples) - 1, len(samples) - 1, random)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < (documents.nbytes + samples.nbytes + order.nbytes) + (12 << 20)


@both
def test_unaligned_lengths(implementation: str) -> None:
    """Lengths come from a mapped file, at offset 34."""
    raw = np.zeros(34 + 40, dtype=np.uint8)
    lengths = raw[34:].view(np.int32)
    lengths[:] = range(10)
    documents = np.arange(10, dtype=np.int32)
    got = Builders.resolve(implementation).sample_index(lengths, documents, 7, 6)  # type: ignore[arg-type]
    assert [tuple(row) for row in got.tolist()] == oracle.walk(list(range(10)), list(range(10)), 7, 6)


@both
def test_wide_document_numbers(implementation: str) -> None:
    builders = Builders.resolve(implementation)  # type: ignore[arg-type]
    first = 2**31 - 3
    wide = builders.document_index(first, 5, 1, False, np.random.RandomState(1))
    assert wide.dtype == np.int64 and sorted(wide.tolist()) == list(range(first, first + 5))
    documents = np.array([2, 0, 1], dtype=np.int64)
    got = builders.sample_index(np.array([3, 4, 5], dtype=np.int32), documents, 2, 5)
    assert got.dtype == np.int32
    assert [tuple(row) for row in got.tolist()] == oracle.walk([3, 4, 5], [2, 0, 1], 2, 5)


def test_dtype_thresholds() -> None:
    assert position_dtype(2**31 - 1) == np.int32 and position_dtype(2**31) == np.int64
    assert shuffle_dtype(2**32 - 3) == np.uint32 and shuffle_dtype(2**32 - 2) == np.int64


@both
def test_too_few_tokens(implementation: str) -> None:
    builders = Builders.resolve(implementation)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="fewer tokens"):
        builders.sample_index(np.array([3], dtype=np.int32), np.array([0], dtype=np.int32), 2, 2)
    with pytest.raises(IndexError):
        builders.sample_index(np.array([3], dtype=np.int32), np.array([1], dtype=np.int32), 2, 1)


# ---- blend ----------------------------------------------------------------------------------------------------

weights_lists = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


def as_lists(pair: tuple[np.ndarray, np.ndarray]) -> tuple[list[int], list[int]]:
    datasets, numbers = pair
    assert datasets.dtype == np.int16 and numbers.dtype == np.int64
    return datasets.tolist(), numbers.tolist()


def shares(weights: list[float]) -> np.ndarray:
    array = np.array(weights)
    return array / array.sum()


@both
@settings(max_examples=100, deadline=None)
@given(weights=weights_lists, size=st.integers(0, 400))
def test_blend_equals_plain_loops(implementation: str, weights: list[float], size: int) -> None:
    builders = Builders.resolve(implementation)  # type: ignore[arg-type]
    assert as_lists(builders.blend(shares(weights), size)) == oracle.blend(weights, size)


@both
@settings(max_examples=50, deadline=None)
@given(weights=weights_lists, size=st.integers(1, 2000))
def test_blend_counts_stay_near_the_shares(implementation: str, weights: list[float], size: int) -> None:
    """Megatron's order is not always within one sample of the shares, so the bound grows slowly with the sources."""
    datasets, _ = Builders.resolve(implementation).blend(shares(weights), size)  # type: ignore[arg-type]
    counts = np.bincount(datasets, minlength=len(weights))
    assert np.all(np.abs(counts - size * shares(weights)) <= max(1.0, np.log2(len(weights)) + 1))


@both
def test_ties_go_to_the_first(implementation: str) -> None:
    datasets, numbers = Builders.resolve(implementation).blend(np.full(4, 0.25), 8)  # type: ignore[arg-type]
    assert datasets.tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and numbers.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.skipif(not HAVE_CPP, reason="the C++ helpers are not built")
@pytest.mark.parametrize("kind", ["random", "equal", "skewed", "steps"])
def test_thousands_of_sources(kind: str) -> None:
    """C++ skips sources that cannot be next, and numpy compares all."""
    random = np.random.default_rng(0)
    count = 3000
    weights = {
        "random": random.random(count),
        "equal": np.ones(count),
        "skewed": 1.0 / np.arange(1, count + 1) ** 1.2,
        "steps": random.integers(1, 4, count).astype(float),
    }[kind]
    fast = Builders.resolve("c++").blend(shares(weights), 7001)
    slow = Builders.resolve("numpy").blend(shares(weights), 7001)
    assert np.array_equal(fast[0], slow[0]) and np.array_equal(fast[1], slow[1])


@pytest.mark.skipif(not HAVE_CPP, reason="the C++ helpers are not built")
def test_thousands_of_sources_with_limits() -> None:
    """Most sources are used up before the end, some from the beginning."""
    limits = np.random.default_rng(0).integers(0, 7, 2500)
    weights = shares(np.random.default_rng(1).random(2500).tolist())
    size = int(limits.sum())
    fast = Builders.resolve("c++").blend(weights, size, limits)
    slow = Builders.resolve("numpy").blend(weights, size, limits)
    assert np.array_equal(fast[0], slow[0]) and np.array_equal(fast[1], slow[1])
    assert np.array_equal(np.bincount(fast[0], minlength=2500), limits)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=300).filter(lambda sizes: sum(sizes) > 0))
def test_limits_are_kept_and_reached(sizes: list[int]) -> None:
    limits = np.array(sizes)
    results = [
        as_lists(Builders.resolve(name).blend(shares(sizes), sum(sizes), limits))  # type: ignore[arg-type]
        for name in IMPLEMENTATIONS
    ]
    assert all(result == results[0] for result in results)
    assert np.bincount(results[0][0], minlength=len(sizes)).tolist() == sizes


@both
def test_more_than_all_limits(implementation: str) -> None:
    with pytest.raises(IndexError, match="fewer samples"):
        Builders.resolve(implementation).blend(np.array([0.5, 0.5]), 4, np.array([1, 2]))  # type: ignore[arg-type]


# ---- which implementation -------------------------------------------------------------------------------------


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Builders.resolve("numpy").reason == "numpy: asked for"

    def absent() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(index_builders, "helpers", absent)
    resolved = Builders.resolve()
    assert resolved.helpers is None and resolved.reason == "numpy: C++ not built; run: python csrc/build.py"
    with pytest.raises(ConfigError, match="in C\\+\\+: not built"):
        Builders.resolve("c++")
    monkeypatch.setattr(index_builders, "helpers", lambda: SimpleNamespace(interface=-1))
    stale = Builders.resolve()
    assert stale.helpers is None and "other sources" in stale.reason
