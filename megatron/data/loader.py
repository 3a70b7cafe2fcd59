"""From samples to batches of tensors, in worker processes that stay ahead of the training step.

The only module of this package that needs torch. The random state of the process is never touched, and a batch
depends on nothing but the dataset and the numbers of its samples.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron.data.blended import TokenDataset
from megatron.data.masks import MaskConfig, document_ids, loss_mask, position_ids
from megatron.data.sampler import BlockShape, cyclic_batches, single_batches
from megatron.errors import ConfigError, DataError, MegatronError

Batch = dict[str, torch.Tensor]


class BatchDataset(Dataset[Batch | MegatronError]):
    """A whole batch for a list of sample numbers. Errors are returned: raised in a worker they lose their words."""

    def __init__(self, dataset: TokenDataset, masks: MaskConfig, vocab_size: int | None) -> None:
        self.dataset, self.masks, self.vocab_size = dataset, masks, vocab_size

    def __getitem__(self, sample_ids: list[int]) -> Batch | MegatronError:
        try:
            return self.batch(sample_ids)
        except MegatronError as error:
            return error

    def batch(self, sample_ids: list[int]) -> Batch:
        text = np.empty((len(sample_ids), self.dataset.seq_length + 1), dtype=np.int64)  # [b, s + 1]
        for row, sample in enumerate(sample_ids):
            text[row] = self.dataset[sample]
        self._check_range(text, sample_ids)
        tokens = np.ascontiguousarray(text[:, :-1])
        arrays = {
            "tokens": tokens,
            "labels": np.ascontiguousarray(text[:, 1:]),
            "loss_mask": loss_mask(tokens, self.masks),
            "position_ids": position_ids(tokens, self.masks),
            "sample_ids": np.array(sample_ids, dtype=np.int64),
        }
        documents = document_ids(tokens, self.masks)
        if documents is not None:
            arrays["document_ids"] = documents
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _check_range(self, text: np.ndarray, sample_ids: list[int]) -> None:
        if self.vocab_size is None or (text.min() >= 0 and text.max() < self.vocab_size):
            return
        row, column = np.argwhere((text < 0) | (text >= self.vocab_size))[0].tolist()
        raise DataError(
            f"{self.dataset.locate(sample_ids[row], column)} (sample {sample_ids[row]}): token id "
            f"{text[row, column]} is not in the vocabulary of {self.vocab_size}; "
            f"use the tokenizer that the data was made with"
        )


class BatchIterator(Iterator[Batch]):
    """The batches of one rank. `close()` ends the workers; so does forgetting it."""

    def __init__(self, loader: DataLoader[Batch | MegatronError]) -> None:
        with _child_signal_kept():
            self._batches: Iterator[Batch | MegatronError] = iter(loader)

    @property
    def workers(self) -> list[BaseProcess]:
        return list(getattr(self._batches, "_workers", []))

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:  # a batch of a dead worker may break on its way, too
            ends = self._ends_of_dead_workers()
            if not ends:
                raise
            self.close()
            raise DataError(
                f"a data worker died ({ends}): out of memory or of shared memory, or a .bin file was cut while in use; "
                f"use a smaller --num-workers, or 0 to load in the training process"
            ) from error
        if isinstance(batch, MegatronError):
            self.close()
            raise batch
        return batch

    def _ends_of_dead_workers(self) -> str:
        for worker in self.workers:
            worker.join(0.2)  # the pipe may break a moment before the process is gone
        return ", ".join(_how_it_ended(worker) for worker in self.workers if not worker.is_alive())

    def close(self) -> None:
        workers, stop = self.workers, getattr(self._batches, "_shutdown_workers", None)
        self._batches = iter(())
        if stop is not None:
            stop()
        for worker in workers:
            worker.kill()  # of those still there: they do not listen to a polite request


@contextmanager
def _child_signal_kept() -> Iterator[None]:
    """torch reports a dead worker by raising in the handler of SIGCHLD: anywhere, in the middle of a step or of a
    save. Without that handler it is reported all the same, by the next batch."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if before is not None and signal.getsignal(signal.SIGCHLD) is not before:
        signal.signal(signal.SIGCHLD, before)


def _how_it_ended(worker: BaseProcess) -> str:
    code = worker.exitcode or 0
    return f"pid {worker.pid}: " + (signal.Signals(-code).name if code < 0 else f"exit code {code}")


def build_loader(
    dataset: TokenDataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    num_workers: int = 0,
    masks: MaskConfig | None = None,
    vocab_size: int | None = None,
    dataloader_type: str = "single",
    data_sharding: bool = True,
    pin_memory: bool = False,
    prefetch_factor: int = 2,
) -> BatchIterator:
    """Micro-batches of this rank from `consumed_samples` on: tokens, labels, position_ids [b, s] int64, loss_mask
    [b, s] float32, sample_ids [b], and document_ids [b, s] under reset_attention_mask."""
    shape = BlockShape(micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size)
    if dataloader_type == "single":
        batches = single_batches(len(dataset), consumed_samples, shape)
    elif dataloader_type == "cyclic":
        batches = cyclic_batches(len(dataset), consumed_samples, shape, data_sharding=data_sharding)
    else:
        raise ConfigError(f"--dataloader-type {dataloader_type}: not known; use single or cyclic")
    options: dict[str, Any] = {}
    if num_workers:
        options = {"prefetch_factor": prefetch_factor, "worker_init_fn": _leave_signals_to_the_trainer}
    loader = DataLoader(
        BatchDataset(dataset, masks or MaskConfig(), vocab_size),
        batch_size=None,  # the sampler hands out whole batches
        sampler=batches,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else the loader draws a seed from the global generator
        collate_fn=_as_it_is,
        **options,
    )
    return BatchIterator(loader)


def _leave_signals_to_the_trainer(worker: int) -> None:
    """A launcher signals the whole process group. The trainer still needs batches to finish its step and save;
    a worker ends when the trainer does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _as_it_is(batch: Any) -> Any:
    return batch
