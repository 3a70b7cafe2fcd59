"""Every rank reads its own share of the same samples in every layout, without waiting for other ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from megatron.config.sections.data import DataConfig
from megatron.data.loader import build_loader
from megatron.data.sampler import BlockShape, sample_batches
from megatron.data.split_datasets import build_train_valid_test
from tests.unit.data.oracle import random_documents, write_dataset

GLOBAL_BATCH, STEPS = 16, 3
LAYOUTS = [(micro, size) for micro in (1, 2, 4) for size in (1, 2, 4)]


def batches_of_rank(path: tuple[str, ...], cache: str, micro: int, rank: int, size: int, consumed: int) -> list[Any]:
    """Steps of (sample ids, tokens), as one rank of a data-parallel run sees them."""
    config = DataConfig(seq_length=8, data_path=path, data_cache_path=cache, split="1,0,0")
    total = (STEPS + 2) * GLOBAL_BATCH
    built = build_train_valid_test(config, num_samples=(total, 0, 0), seed=3, vocab_size=1000, eod_id=0)
    assert built.train is not None
    shape = BlockShape(micro_batch_size=micro, dp_rank=rank, dp_size=size)
    loader = build_loader(built.train, sample_batches("single", len(built.train), consumed, shape), vocab_size=1000)
    steps = []
    for _ in range(STEPS):
        batches = [next(loader) for _ in range(GLOBAL_BATCH // (micro * size))]
        steps.append(
            [pair for batch in batches for pair in zip(batch["sample_ids"].tolist(), batch["tokens"].tolist())]
        )
    return steps


def rank_process(results: Any, rank: int, arguments: tuple[Any, ...]) -> None:
    results.put((rank, batches_of_rank(*arguments)))


def run_ranks_alone(path: tuple[str, ...], folder: Path, micro: int, size: int, consumed: int) -> list[list[Any]]:
    """Steps of all ranks: one process per rank with its own cache directory and without a process group."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = []
    for rank in range(size):
        arguments = (path, str(folder / f"node{rank}"), micro, rank, size, consumed)
        processes.append(context.Process(target=rank_process, args=(results, rank, arguments)))
    for process in processes:
        process.start()
    by_rank = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert sorted(by_rank) == list(range(size))
    return [sorted(pair for rank in range(size) for pair in by_rank[rank][step]) for step in range(STEPS)]


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("consumed", [0, 2 * GLOBAL_BATCH])
def test_samples_of_a_step_are_the_same_on_every_layout(tmp_path: Path, blend: bool, consumed: int) -> None:
    first = write_dataset(tmp_path / "a", random_documents(0, 60, 30))
    second = write_dataset(tmp_path / "b", random_documents(1, 40, 30))
    path = ("0.3", first, "0.7", second) if blend else (first,)
    reference = run_ranks_alone(path, tmp_path / "reference", 1, 1, consumed)
    assert [[sample for sample, _ in step] for step in reference] == [
        list(range(consumed + k * GLOBAL_BATCH, consumed + (k + 1) * GLOBAL_BATCH)) for k in range(STEPS)
    ]
    for micro, size in LAYOUTS:
        steps = run_ranks_alone(path, tmp_path / f"{micro}x{size}", micro, size, consumed)
        assert steps == reference, (micro, size)


def test_ranks_of_one_machine_share_a_cache_they_build_at_once(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "a", random_documents(0, 200, 50))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = ((prefix,), str(tmp_path / "cache"), 1, 0, 1, 0)
    processes = [context.Process(target=rank_process, args=(results, rank, arguments)) for rank in range(4)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60)[1] for _ in processes]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert all(answer == answers[0] for answer in answers)
    assert len(list((tmp_path / "cache").iterdir())) == 4  # three arrays and their description; nothing temporary


def test_a_sampler_that_overlaps_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: every rank takes the first micro-batch of the block."""
    from megatron.data import sampler

    def overlapping(total: int, consumed: int, shape: BlockShape) -> Any:
        wrong = BlockShape(micro_batch_size=shape.micro_batch_size, dp_rank=0, dp_size=shape.dp_size)
        return right(total, consumed, wrong)

    right = sampler.single_batches

    prefix = write_dataset(tmp_path / "a", random_documents(0, 60, 30))
    reference = run_ranks_alone((prefix,), tmp_path / "reference", 1, 1, 0)
    monkeypatch.setattr(sampler, "single_batches", overlapping)
    assert run_ranks_alone((prefix,), tmp_path / "bug", 2, 2, 0) != reference
