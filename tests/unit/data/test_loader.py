"""Batches are correct, in order and independent of the number of workers; every failure is reported."""

from __future__ import annotations

import multiprocessing.process
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed.dataset import IndexedDataset
from megatron.data.loader import BatchIterator, PackedBatch, build_loader, pack_batch
from megatron.data.masks import MaskConfig
from megatron.data.mock import MockDataset
from megatron.data.sampler import BlockShape, sample_batches
from megatron.errors import DataError
from megatron.ops.documents import Documents
from tests.unit.data.oracle import random_documents, write_dataset

MASKS = MaskConfig(eod_id=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    data = IndexedDataset(write_dataset(tmp_path / "d", random_documents(3, 60, 40, vocab=20)))
    return GPTDataset(data, first=0, last=len(data), num_samples=80, seq_length=8, seed=1)


def loader(
    dataset: object,
    *,
    consumed_samples: int = 0,
    micro_batch_size: int = 2,
    dataloader_type: str = "single",
    **options: object,
) -> BatchIterator:
    shape = BlockShape(micro_batch_size=micro_batch_size, dp_rank=0, dp_size=1)
    sample_ids = sample_batches(dataloader_type, len(dataset), consumed_samples, shape)  # type: ignore[arg-type]
    return build_loader(dataset, sample_ids, **options)  # type: ignore[arg-type]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


def equal(a: torch.Tensor | Documents, b: torch.Tensor | Documents) -> bool:
    if isinstance(a, Documents) and isinstance(b, Documents):
        sizes = (a.rows, a.seq, a.longest, a.divide_rows) == (b.rows, b.seq, b.longest, b.divide_rows)
        return sizes and torch.equal(a.keys, b.keys) and torch.equal(a.queries, b.queries)
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def test_batch(dataset: GPTDataset) -> None:
    batch = next(loader(dataset, consumed_samples=6, masks=MASKS, vocab_size=20))
    assert batch["sample_ids"].tolist() == [6, 7]
    for row, sample in enumerate((6, 7)):
        assert batch["tokens"][row].tolist() == dataset[sample][:-1].tolist()
        assert batch["labels"][row].tolist() == dataset[sample][1:].tolist()
    documents = batch.pop("document_ids")
    assert (documents.rows, documents.seq, documents.keys.dtype) == (2, 8, torch.int32)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in batch.items()} == {
        "tokens": (torch.int64, (2, 8)),
        "labels": (torch.int64, (2, 8)),
        "loss_mask": (torch.float32, (2, 8)),
        "position_ids": (torch.int64, (2, 8)),
        "sample_ids": (torch.int64, (2,)),
    }
    assert torch.equal(batch["loss_mask"] == 0, batch["tokens"] == 0)
    assert "document_ids" not in next(loader(dataset))


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_workers_change_nothing_and_resume_is_exact(dataset: GPTDataset, kind: str) -> None:
    runs = {}
    for workers in (0, 1, 2):
        batches = loader(dataset, num_workers=workers, masks=MASKS, dataloader_type=kind)
        runs[workers] = [next(batches) for _ in range(20)]
        batches.close()
    resumed = loader(dataset, consumed_samples=14, masks=MASKS, dataloader_type=kind)
    for step in range(20):
        assert same(runs[0][step], runs[1][step]) and same(runs[0][step], runs[2][step])
        if step >= 7:
            assert same(next(resumed), runs[0][step])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_global_random_state_is_untouched(dataset: GPTDataset, workers: int, kind: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    batches = loader(dataset, num_workers=workers, dataloader_type=kind)
    for _ in range(3):
        next(batches)
    batches.close()
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_single_ends_with_the_data(dataset: GPTDataset) -> None:
    assert sum(1 for _ in loader(dataset, micro_batch_size=3)) == len(dataset) // 3


@pytest.mark.parametrize("workers", [0, 2])
def test_token_outside_the_vocabulary(tmp_path: Path, workers: int) -> None:
    texts = [[1] * 30, [2] * 10 + [77] + [2] * 9, [3] * 30]
    data = IndexedDataset(write_dataset(tmp_path / "d", texts))
    dataset = GPTDataset(data, first=0, last=3, num_samples=10, seq_length=8, seed=1)
    batches = loader(dataset, num_workers=workers, vocab_size=50)
    with pytest.raises(DataError) as caught:
        for _ in range(5):
            next(batches)
    batches.close()
    message = str(caught.value)
    assert f"{tmp_path / 'd'}, document 1, token 10 of sequence 1 (sample " in message
    assert "token id 77 is not in the vocabulary of 50" in message and "\n" not in message


def test_negative_token(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", [[1] * 20], dtype="int32")
    np.full(20, -5, dtype="<i4").tofile(tmp_path / "d.bin")
    dataset = GPTDataset(IndexedDataset(tmp_path / "d"), first=0, last=1, num_samples=1, seq_length=8, seed=1)
    with pytest.raises(DataError, match="token id -5 is not in the vocabulary"):
        next(loader(dataset, micro_batch_size=1, vocab_size=50))


class DyingDataset(MockDataset):
    """Kills its process at sample 5, like a bus error or the OOM killer."""

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_dying_worker_fails_the_run_with_its_reason() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    batches = loader(DyingDataset(size=50, seq_length=4, vocab_size=9, seed=0, split=0), num_workers=1)
    assert signal.getsignal(signal.SIGCHLD) is handler  # nothing is raised in the middle of a step
    with pytest.raises(DataError, match=r"a data worker died \(pid \d+: SIGKILL\).*--num-workers"):
        for _ in range(10):
            next(batches)


def test_workers_leave_the_signals_of_a_launcher_to_the_trainer(dataset: GPTDataset) -> None:
    batches = loader(dataset, num_workers=2)
    next(batches)
    workers = batches.workers
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    for _ in range(20):
        next(batches)
    batches.close()
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


class StoppingDataset(MockDataset):
    """Stops its worker where the third batch begins."""

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stopped_worker_is_named_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits, because the worker may have been stopped for a debugger."""
    lines: list[str] = []

    def read(line: str, _stream: object) -> None:
        """Resumes the worker, as the line says, at the second line: only then has it certainly stopped."""
        lines.append(line)
        if len(lines) == 2:
            os.kill(int(line.split("kill -CONT ")[1].split()[0]), signal.SIGCONT)

    monkeypatch.setattr("megatron.data.loader.print_line", read)
    monkeypatch.setattr("megatron.data.loader._STOPPED_AFTER", 0.1)
    monkeypatch.setattr("megatron.data.loader._STOPPED_EVERY", 0.1)
    batches = loader(StoppingDataset(size=50, seq_length=4, vocab_size=9, seed=0, split=0), num_workers=1)
    (worker,) = batches.workers
    next(batches), next(batches)
    assert next(batches)["sample_ids"].tolist() == [4, 5]
    batches.close()
    assert len(lines) > 1 and set(lines) == {
        f"warning: data worker {worker.pid} is stopped (SIGSTOP, or a debugger), and all wait for it: "
        f"kill -CONT {worker.pid} continues it"
    }


def test_idle_worker_killed_from_outside(dataset: GPTDataset) -> None:
    """Kills a worker like the OOM killer. Prefetched batches are used up, then the run ends within torch's 5 s."""
    batches = loader(dataset, num_workers=2)
    next(batches)
    os.kill(batches.workers[0].pid, signal.SIGKILL)  # type: ignore[arg-type]
    others = batches.workers
    with pytest.raises(DataError, match=r"a data worker died \(pid \d+: SIGKILL\)") as caught:
        for _ in range(40):
            next(batches)
    assert "\n" not in str(caught.value)
    for worker in others:
        worker.join(10)
        assert not worker.is_alive()


FORGETFUL = """
import os, signal, sys
from megatron.data.loader import build_loader
from megatron.data.mock import MockDataset

dataset = MockDataset(size=5000, seq_length=16, vocab_size=9, seed=0, split=0)
batches = build_loader(dataset, iter([[0, 1], [2, 3]] * 100), num_workers=2)
next(batches)
print(*[worker.pid for worker in batches.workers], flush=True)
if sys.argv[1] == "raises":
    raise ValueError("in the middle of a step")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "evaluates":  # another loader's workers inherit this one, and must leave it alone
    other = build_loader(dataset, iter([[8, 9]] * 100), num_workers=1)
    first = next(other)["sample_ids"].tolist()
    other.close()
    assert first == [8, 9] and next(batches)["sample_ids"].tolist() == [2, 3]
"""


@pytest.mark.parametrize("how", ["ends", "raises", "killed", "evaluates"])
def test_workers_that_nobody_closed_end_with_the_process(how: str) -> None:
    """The workers ignore SIGTERM, which Python sends to its children before it waits for them."""
    root = Path(__file__).resolve().parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", FORGETFUL, how], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == {"ends": 0, "raises": 1, "killed": -signal.SIGKILL, "evaluates": 0}[how], ended.stderr
    deadline = time.monotonic() + 30  # a worker checks for its trainer every 5 s
    for pid in map(int, ended.stdout.split()):
        while _lives(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_signal_before_the_first_batch(dataset: GPTDataset) -> None:
    """A worker ignores signals from its start."""
    for _ in range(5):
        batches = loader(dataset, num_workers=2)
        for worker in batches.workers:
            os.kill(worker.pid, signal.SIGTERM)  # type: ignore[arg-type]
        assert next(batches)["sample_ids"].tolist() == [0, 1]
        batches.close()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}


@settings(max_examples=50, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text(max_size=5),
        st.tuples(
            st.sampled_from([torch.int64, torch.float32, torch.uint8, torch.bool, torch.int16]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    )
)
def test_packed_in_one_piece(tensors: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {
        name: torch.randint(0, 2, shape, generator=generator).to(dtype) for name, (dtype, shape) in tensors.items()
    }
    one = pack_batch(batch)
    assert isinstance(one, PackedBatch) and one.memory.dtype == torch.uint8
    assert same(one.unpacked(), batch)
    for tensor in one.unpacked().values():
        assert tensor.storage_offset() * tensor.element_size() % 64 == 0


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(2), "name": ["a", "b"]}, {"x": torch.ones(2).to_sparse()}, [torch.ones(2)], {"x": {}}]
)
def test_what_is_not_plain_tensors_stays_as_it_is(batch: Any) -> None:
    assert pack_batch(batch) is batch


def test_workers_leave_nothing_in_the_temporary_folder(
    dataset: GPTDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch shares a tensor through a socket in a folder pymp-..., which a kill would leave behind."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    batches = loader(dataset, num_workers=2, masks=MASKS)
    for _ in range(4):
        assert next(batches)["tokens"].shape == (2, 8)
    for worker in batches.workers:
        worker.kill()
        worker.join(10)
    assert list(folder.iterdir()) == []
    batches.close()


def test_batches_do_not_share_memory(dataset: GPTDataset) -> None:
    batches = loader(dataset, num_workers=1)
    first, second = next(batches), next(batches)
    before = second["tokens"].clone()
    for tensor in first.values():
        tensor.zero_()
        assert not tensor.is_shared()  # containers limit shared memory
    assert torch.equal(second["tokens"], before)
    batches.close()


def test_more_consumed_than_there_is(dataset: GPTDataset) -> None:
    with pytest.raises(DataError, match="consumed 100000 samples"):
        next(loader(dataset, consumed_samples=100000))


def test_bin_cut_while_mapped_fails_the_run(tmp_path: Path) -> None:
    """Reading beyond the end of a mapped file is a bus error, which kills the worker; the run must report it."""
    prefix = write_dataset(tmp_path / "d", [[1] * 1000] * 300)
    dataset = GPTDataset(IndexedDataset(prefix), first=0, last=300, num_samples=10000, seq_length=8, seed=1)
    os.truncate(f"{prefix}.bin", 4096)
    batches = loader(dataset, num_workers=1)
    with pytest.raises(DataError, match=r"a data worker died .*SIGBUS.*was truncated while in use"):
        for _ in range(50):
            next(batches)
