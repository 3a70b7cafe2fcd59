"""Measures index building (against numpy and lower bounds), start-up, and a run's first batch.

    python benchmarks/index_build.py                            # 10 M documents, 1 G tokens, one epoch of seq 1024
    python benchmarks/index_build.py --start-up 1e8             # opening 1e8 documents: 2 GB of index
    python benchmarks/index_build.py --first-batch 1e7          # from an empty cache and from a warm one

Megatron-LM's helpers cannot be installed without a build, so the peer is its algorithm in numpy: np.mgrid,
RandomState.shuffle, a shuffled arange, and instead of the C++ loop cumsum and searchsorted (which are as fast). The
script checks that its arrays equal ours. The lower bounds are RandomState.shuffle alone, gathering the lengths in
shuffled order, and copying as many bytes as the arrays have. Contenders take turns, and a ratio is the median over
rounds of times within one round. Memory is the growth of a fresh process from its resident size to ru_maxrss (Linux),
over the bytes of the arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.data.index_builders import Builders, samples_in
from megatron.data.indexed.index_file import HEADER, MAGIC, VERSION

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
SEED, VOCAB = 1234, 50304


# ---- the index --------------------------------------------------------------------------------------------------


def make_lengths(documents: int, tokens: int) -> np.ndarray:
    """Draws lengths between 1 and about twice the mean, without temporaries that would distort the measured memory."""
    lengths = np.empty(documents, dtype=np.int32)
    random, most = np.random.default_rng(SEED), max(2, 2 * tokens // documents)
    for start in range(0, documents, 1 << 14):
        part = lengths[start : start + (1 << 14)]
        part[:] = random.integers(1, most, len(part), dtype=np.int32)
    return lengths


def ours(lengths: np.ndarray, seq: int, builders: Builders) -> Arrays:
    """Builds the arrays as GPTDataset does."""
    random = np.random.RandomState(SEED)
    total = samples_in(int(lengths.sum(dtype=np.int64)), seq)
    documents = builders.document_index(0, len(lengths), 1, False, random)
    samples = builders.sample_index(lengths, documents, seq, total)
    return documents, samples, builders.shuffle_index(total, total, random)


def peer(lengths: np.ndarray, seq: int) -> Arrays:
    random = np.random.RandomState(SEED)
    documents = np.mgrid[0:1, 0 : len(lengths)][1].reshape(-1).astype(np.int32)
    random.shuffle(documents)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    bounds = np.arange(1, (int(ends[-1]) - 1) // seq + 1, dtype=np.int64) * seq
    places = np.searchsorted(ends, bounds, side="right")
    samples = np.zeros((len(bounds) + 1, 2), dtype=np.int32)
    samples[1:, 0] = places
    samples[1:, 1] = bounds - np.where(places > 0, ends[places - 1], 0)
    order = np.arange(len(bounds), dtype=np.uint32)
    random.shuffle(order)
    return documents, samples, order


def contenders(lengths: np.ndarray, seq: int) -> dict[str, Callable[[], Any]]:
    makers: dict[str, Callable[[], Any]] = {}
    fast = Builders.resolve()
    if fast.helpers is not None:
        makers[f"ours, C++, {fast.threads} threads"] = lambda: ours(lengths, seq, fast)
    else:
        print(f"ours in C++: left out: {fast.reason}")
    makers["ours, numpy"] = lambda: ours(lengths, seq, Builders.resolve("numpy"))
    makers["peer"] = lambda: peer(lengths, seq)
    return makers


def limits(lengths: np.ndarray, arrays: Arrays) -> dict[str, Callable[[], Any]]:
    documents = arrays[0].copy()
    numbers = np.arange(len(lengths), dtype=np.int32)
    source = np.ones(sum(array.nbytes for array in arrays), dtype=np.uint8)
    target = np.zeros_like(source)
    return {
        "limit: RandomState.shuffle": lambda: np.random.RandomState(SEED).shuffle(numbers),
        "limit: gather of lengths": lambda: lengths[documents],
        "limit: copy of the bytes": lambda: np.copyto(target, source),
    }


def in_turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # rotates the order
            start = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - start)
    return times


def memory_growth(name: str, documents: int, tokens: int, seq: int) -> float:
    """Memory growth of a fresh process, over the bytes of the arrays."""
    call = [sys.executable, __file__, "--memory-of", name]
    call += ["--documents", str(documents), "--tokens", str(tokens), "--seq", str(seq)]
    return float(subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_memory_growth(name: str, documents: int, tokens: int, seq: int) -> None:
    lengths = make_lengths(documents, tokens)
    contenders(lengths[:1000], 8)[name]()  # memory of code that is loaded at first use does not count
    make = contenders(lengths, seq)[name]
    # The current resident size; the peak so far was higher.
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    arrays = make()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    print(grown / sum(array.nbytes for array in arrays))


def measure_index(documents: int, tokens: int, seq: int, rounds: int) -> dict[str, Any]:
    names = contenders(np.empty(0, dtype=np.int32), seq)
    memory = {
        name: memory_growth(name, documents, tokens, seq) for name in names
    }  # measured first, because the peak memory of a child process starts at that of its parent
    lengths = make_lengths(documents, tokens)
    makers = contenders(lengths, seq)
    arrays = peer(lengths, seq)
    for name, make in makers.items():
        assert all(np.array_equal(a, b) for a, b in zip(arrays, make(), strict=True)), f"{name}: different arrays"
    times = in_turns({**makers, **limits(lengths, arrays)}, rounds)
    size = sum(array.nbytes for array in arrays) / 1e6
    print(
        f"\n{documents:,} documents, {int(lengths.sum(dtype=np.int64)):,} tokens, seq {seq}, {rounds} rounds;", end=" "
    )
    print(f"the arrays have {size:.0f} MB\n\n| | ms | peer's time / this | peak memory / arrays |\n|---|---|---|---|")
    for name, seconds in times.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(times["peer"], seconds, strict=True))
        peak = f"{memory[name]:.2f}" if name in memory else ""
        print(f"| {name} | {statistics.median(seconds) * 1e3:.0f} | {ratio:.2f} | {peak} |")
    return {"seconds": times, "memory": memory}


# ---- start-up and the first batch -------------------------------------------------------------------------------


def write_synthetic(prefix: Path, documents: int, mean: int) -> None:
    """Writes a dataset of `documents` documents: the .idx, a sparse .bin of zeros, and the record beside them."""
    from megatron.data.indexed.dataset import IndexedDataset
    from megatron.data.indexed.record import DataRecord, write_record

    lengths = make_lengths(documents, documents * mean)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        lengths.tofile(stream)
        end = 0
        for start in range(0, documents, 1 << 20):
            ends = end + 2 * np.cumsum(lengths[start : start + (1 << 20)], dtype=np.int64)
            np.concatenate([[end], ends[:-1]]).tofile(stream)
            end = int(ends[-1])
        for start in range(0, documents + 1, 1 << 20):
            np.arange(start, min(start + (1 << 20), documents + 1), dtype=np.int64).tofile(stream)
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(end)
    data = IndexedDataset(prefix)
    counts = {"documents": documents, "sequences": documents, "tokens": data.num_tokens, "max_id": 0}
    about: dict[str, Any] = {"tokenizer_fingerprint": "none", "vocab_size": VOCAB, "eod_id": 0, "dtype": "uint16"}
    write_record(prefix, DataRecord(**about, **counts, index_fingerprint=data.fingerprint, source=()))


class Clock:
    """Seconds of each part of a start, in order."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[part] = time.perf_counter() - start


def start_up(prefix: Path, cache: Path, seq: int) -> dict[str, float]:
    """Measures the parts of one start in this process."""
    clock = Clock()
    with clock("import of megatron.data"):
        from megatron.data.cache import CachePlace, IndexCache
        from megatron.data.gpt_dataset import GPTDataset
        from megatron.data.indexed.dataset import IndexedDataset
    with clock("open, every entry checked"):
        data = IndexedDataset(prefix)
    with clock("fingerprint"):
        fingerprint = data.fingerprint
    warm = cache.exists()
    with clock("index read from the cache" if warm else "index built and cached"):
        whole: dict[str, Any] = {"first": 0, "last": len(data), "num_samples": None, "seq_length": seq, "seed": SEED}
        dataset = GPTDataset(data, **whole, cache=IndexCache(CachePlace(cache)), fingerprint=fingerprint)
    with clock("first sample"):
        dataset[0]
    return {**clock.parts, "all": sum(clock.parts.values())}


def first_batch(prefix: Path, cache: Path, seq: int, workers: int, step: float) -> dict[str, float]:
    """Measures pretrain_gpt.py's data work before its first step, then the waits of 40 steps."""
    clock = Clock()
    with clock("import of torch"):
        import torch
    with clock("import of megatron.data"):
        from megatron.config import DataConfig
        from megatron.data.loader import build_loader
        from megatron.data.sampler import BlockShape, single_batches
        from megatron.data.split_datasets import build_train_valid_test
    torch.set_num_threads(1)
    config = DataConfig(data_path=(str(prefix),), split="969,30,1", seq_length=seq, data_cache_path=str(cache))
    with clock("datasets: open, check, record, indices"):
        built = build_train_valid_test(config, num_samples=(None, 100, 10), seed=SEED, vocab_size=VOCAB, eod_id=0)
        assert built.train is not None
    with clock(f"first batch of 8, {workers} workers"):
        samples = single_batches(len(built.train), 0, BlockShape(micro_batch_size=8, dp_rank=0, dp_size=1))
        batches = build_loader(built.train, samples, num_workers=workers, vocab_size=VOCAB)
        next(batches)
    parts = {**clock.parts, "all but the imports": sum(list(clock.parts.values())[2:])}
    waits = []
    for _ in range(40):
        time.sleep(step)
        start = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - start)
    batches.close()
    return {**parts, f"wait for a batch, at {step * 1e3:.0f} ms a step": statistics.median(waits)}


def measure_start(kind: str, documents: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measures starts in fresh processes: one with an empty cache, and the median of others with a warm one."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        prefix = Path(folder) / "data"
        write_synthetic(prefix, documents, args.tokens // args.documents)
        call = [sys.executable, __file__, "--child", kind, str(prefix), "--seq", str(args.seq)]
        call += ["--workers", str(args.workers), "--step", str(args.step)]
        runs = []
        for _ in range(1 + args.rounds):
            output = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs.append(json.loads(output.splitlines()[-1]))
        size = os.path.getsize(f"{prefix}.idx") / 1e6
    cold, warm = runs[0], runs[1:]
    print(f"\n{kind}: {documents:,} documents, an .idx of {size:.0f} MB\n")
    print("| ms | empty cache | warm cache |\n|---|---|---|")
    for part in dict.fromkeys([*cold, *warm[0]]):
        cells = [f"{cold[part] * 1e3:.1f}" if part in cold else ""]
        cells += [f"{statistics.median(run[part] for run in warm) * 1e3:.1f}" if part in warm[0] else ""]
        print(f"| {part} | {cells[0]} | {cells[1]} |")
    return {"cold": cold, "warm": warm}


def child(kind: str, prefix: Path, args: argparse.Namespace) -> None:
    cache = prefix.parent / "cache"
    if kind == "start-up":
        print(json.dumps(start_up(prefix, cache, args.seq)))
    else:
        print(json.dumps(first_batch(prefix, cache, args.seq, args.workers, args.step)))


def count(text: str) -> int:
    return int(float(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=count, default=10_000_000)
    parser.add_argument("--tokens", type=count, default=1_000_000_000)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start-up", type=count, help="measure a start on this many documents instead")
    parser.add_argument("--first-batch", type=count, help="measure the first batch on this many documents instead")
    parser.add_argument("--workers", type=int, default=2, help="processes of the data loader")
    parser.add_argument("--step", type=float, default=0.05, help="seconds of a simulated training step")
    parser.add_argument("--folder", help="folder for the synthetic files, 20 bytes per document (default: temporary)")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print_memory_growth(args.memory_of, args.documents, args.tokens, args.seq)
        return
    if args.child:
        child(args.child[0], Path(args.child[1]), args)
        return
    results: dict[str, Any] = {}
    if args.start_up:
        results["start-up"] = measure_start("start-up", args.start_up, args)
    if args.first_batch:
        results["first batch"] = measure_start("first batch", args.first_batch, args)
    if not results:
        results["index"] = measure_index(args.documents, args.tokens, args.seq, args.rounds)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
