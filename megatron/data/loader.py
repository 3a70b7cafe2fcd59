"""Collates samples into batches of tensors, prefetched by worker processes.

No other module of this package imports torch at module level. The loader never touches the random state of the process,
and a batch depends only on the dataset and its sample indices.
"""

import atexit
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron.data.blended import TokenDataset
from megatron.data.masks import ALL_FIELDS, MaskConfig, document_starts, loss_mask, position_ids, without_marks
from megatron.errors import DataError, MegatronError
from megatron.ops.documents import Documents
from megatron.utils.log import print_line
from megatron.utils.process import die_with, how_to_continue, signals_held
from megatron.utils.read_ahead import ReadAhead

Batch = dict[str, Any]
_ALIGNMENT = 64  # bytes
_UNREAD = -1  # invalid as a token: an embedding lookup fails
_STOPPED_AFTER, _STOPPED_EVERY = 5.0, 30.0  # seconds without a batch, after which stopped workers are reported
_PATIENCE = 1.0  # seconds to wait for a batch in flight when the loader is closed


class BatchDataset(Dataset[Batch | MegatronError]):
    """Maps a list of sample indices to a batch. Returns errors, because an exception in a worker loses its message."""

    def __init__(
        self, dataset: TokenDataset, masks: MaskConfig, vocab_size: int | None, fields: Set[str] = ALL_FIELDS
    ) -> None:
        self.dataset, self.masks, self.vocab_size, self.fields = dataset, masks, vocab_size, fields

    def __getitem__(self, sample_ids: list[int]) -> Batch | MegatronError:
        try:
            return self.batch(sample_ids)
        except MegatronError as error:
            return error

    def batch(self, sample_ids: list[int]) -> Batch:
        marked, text = self._read(sample_ids)
        tokens = marked[:, :-1]
        make: dict[str, Callable[[], np.ndarray]] = {
            "tokens": lambda: text[:, :-1],
            "labels": lambda: text[:, 1:],
            "loss_mask": lambda: loss_mask(tokens, self.masks),
            "position_ids": lambda: position_ids(tokens, self.masks),
        }
        made = {name: array() for name, array in make.items() if name in self.fields}
        made["sample_ids"] = np.array(sample_ids, dtype=np.int64)
        batch: Batch = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in made.items()}
        if "document_ids" in self.fields and (starts := document_starts(tokens, self.masks)) is not None:
            batch["document_ids"] = Documents.of_starts(torch.from_numpy(starts))
        return batch

    def _read(self, sample_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples, and their ids without marks, both [b, s + 1]. The values are placeholders if no field
        depends on the tokens."""
        shape = len(sample_ids), self.dataset.seq_length + 1
        if not self.masks.depend_on_tokens(self.fields):
            unread = np.broadcast_to(np.int64(_UNREAD), shape)
            return unread, unread
        samples = np.empty(shape, dtype=np.int64)
        for row, sample in enumerate(sample_ids):
            samples[row] = self.dataset[sample]
        text = without_marks(samples) if self.masks.conversations else samples
        self._check_range(text, sample_ids)
        return samples, text

    def _check_range(self, text: np.ndarray, sample_ids: list[int]) -> None:
        if self.vocab_size is None or (text.min() >= 0 and text.max() < self.vocab_size):
            return
        row, column = np.argwhere((text < 0) | (text >= self.vocab_size))[0].tolist()
        raise DataError(
            f"{self.dataset.locate(sample_ids[row], column)} (sample {sample_ids[row]}): token id "
            f"{text[row, column]} is not in the vocabulary of {self.vocab_size} tokens; "
            f"use the tokenizer that the data was made with"
        )


@dataclass(frozen=True)
class PackedBatch:
    """A batch in one buffer, sent through the worker's pipe. torch's shared memory would need a socket and a thread. A
    killed worker leaves the socket in the temporary folder, and the thread prints errors when the worker ends."""

    memory: torch.Tensor
    layout: dict[str, tuple[int, torch.dtype, torch.Size]]  # offset, dtype and shape of each tensor
    documents: dict[str, tuple[int, int, bool]]  # (rows, seq, divide_rows) of each tensor that comes from a `Documents`

    @classmethod
    def of(cls, batch: Batch) -> "PackedBatch":
        layout, size = {}, 0
        documents = {name: value for name, value in batch.items() if isinstance(value, Documents)}
        tensors = {**batch, **{name: value.keys for name, value in documents.items()}}
        for name, tensor in tensors.items():
            layout[name] = size, tensor.dtype, tensor.shape
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(size, dtype=torch.uint8)
        sizes = {name: (value.rows, value.seq, value.divide_rows) for name, value in documents.items()}
        packed = cls(memory, layout, sizes)
        for name, place in packed._tensors().items():
            place.copy_(tensors[name])
        return packed

    def unpacked(self) -> Batch:
        batch: Batch = dict(self._tensors())
        return batch | {name: Documents.of_boundaries(batch[name], *size) for name, size in self.documents.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, (start, dtype, shape) in self.layout.items():
            part = self.memory[start : start + shape.numel() * dtype.itemsize]
            tensors[name] = part.view(dtype).view(shape)
        return tensors

    def __reduce__(self) -> "tuple[Callable[..., PackedBatch], tuple[np.ndarray, dict[str, Any], dict[str, Any]]]":
        return _received, (self.memory.numpy(), self.layout, self.documents)

    def pin_memory(self) -> "PackedBatch":
        """Pins the buffer; called by torch's loader."""
        return PackedBatch(self.memory.pin_memory(), self.layout, self.documents)


def pack_batch(batch: Any) -> Any:
    """Packs a mapping of plain CPU tensors for the transfer from worker to trainer. Returns any other batch unchanged,
    such as one of a script's own dataset; torch then transfers it."""
    if isinstance(batch, Mapping) and all(_is_plain(value) for value in batch.values()):
        return PackedBatch.of(dict(batch))
    return batch


def _is_plain(value: Any) -> bool:
    value = value.keys if isinstance(value, Documents) else value
    return type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"


def _received(memory: np.ndarray, layout: dict[str, Any], documents: dict[str, Any]) -> PackedBatch:
    return PackedBatch(torch.from_numpy(memory), layout, documents)


class BatchIterator(Iterator[Batch]):
    """Iterator over the batches of one rank. Its workers end on `close()`, with this object, or with the process."""

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_ids: Iterator[list[int]],
        *,
        num_workers: int,
        pin_memory: bool,
        collate: Callable[[Any], Any] | None = None,
        read_ahead: int = 2,
    ) -> None:
        """Starts the workers. `dataset[ids]` is a whole batch, which `collate` converts for the transfer. `read_ahead`
        batches are prefetched in this process, in addition to the workers' batches."""
        loader = DataLoader(
            dataset,
            batch_size=None,  # the sampler yields whole batches
            sampler=sample_ids,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=collate,
            worker_init_fn=partial(_live_with_the_trainer, os.getpid()),
            generator=torch.Generator(),  # otherwise the loader draws a seed from the global generator
        )
        # A signal to the process group would end a new worker that does not ignore it yet, so signals are blocked.
        with _child_signal_kept(), signals_held(signal.SIGINT, signal.SIGTERM):
            source: Iterator[Any] = iter(loader)
        self.workers: list[BaseProcess] = list(getattr(source, "_workers", []))
        ahead = ReadAhead(map(_unpacked, source), depth=read_ahead) if self.workers else None
        self._ahead = ahead
        self._batches: Iterator[Any] = source if ahead is None else ahead
        # At exit Python waits for its children, and the workers ignore SIGTERM. This handler is registered after
        # torch's, which waits 5 s per worker, so it runs first.
        self._end = weakref.finalize(self, _end_workers, source, ahead, self.workers, os.getpid())
        if self.workers:
            atexit.register(self._end)

    def __next__(self) -> Batch:
        self._report_stopped_workers()
        try:
            batch = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:  # a dead worker may also break the transfer of a batch
            ends = self._ends_of_dead_workers()
            if not ends:
                raise
            self.close()
            raise DataError(
                f"a data worker died ({ends}): memory or shared memory ran out, or a .bin file was truncated while in "
                f"use; lower --num-workers (0 loads data in the training process)"
            ) from error
        if isinstance(batch, MegatronError):
            self.close()
            raise batch
        return batch

    def _report_stopped_workers(self) -> None:
        """Waits for the next batch, and reports stopped workers. A run of one rank has no other timeout."""
        seconds = _STOPPED_AFTER
        while self._ahead is not None and not self._ahead.wait(seconds):
            seconds = _STOPPED_EVERY
            for worker in self.workers:
                if line := how_to_continue(worker.pid or 0):
                    print_line(f"warning: data {line}", sys.stderr)

    def _ends_of_dead_workers(self) -> str:
        for worker in self.workers:
            worker.join(0.2)  # the pipe may break a moment before the process exits
        return ", ".join(_how_it_ended(worker) for worker in self.workers if not worker.is_alive())

    def close(self) -> None:
        self._batches, self._ahead = iter(()), None
        self._end()
        atexit.unregister(self._end)
        self.workers = []


def _unpacked(batch: Any) -> Any:
    return batch.unpacked() if isinstance(batch, PackedBatch) else batch


def _end_workers(batches: Iterator[Any], ahead: ReadAhead[Any] | None, workers: list[BaseProcess], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked worker of another loader inherited this object
    if ahead is not None:
        ahead.stop(_PATIENCE)
    stop = getattr(batches, "_shutdown_workers", None)
    if stop is not None:
        stop()
    for worker in workers:
        worker.kill()  # a no-op if it has ended


@contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Undoes torch's SIGCHLD handler, which raises at any point of a step or save when a worker dies. The next batch
    still reports the dead worker."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    if before is not None and signal.getsignal(signal.SIGCHLD) is not before:
        signal.signal(signal.SIGCHLD, before)


def _how_it_ended(worker: BaseProcess) -> str:
    code = worker.exitcode or 0
    return f"pid {worker.pid}: " + (signal.Signals(-code).name if code < 0 else f"exit code {code}")


def build_loader(
    dataset: TokenDataset,
    sample_ids: Iterator[list[int]],
    *,
    num_workers: int = 0,
    masks: MaskConfig | None = None,
    vocab_size: int | None = None,
    pin_memory: bool = False,
    read_ahead: int = 2,
    fields: Set[str] = ALL_FIELDS,
) -> BatchIterator:
    """Returns the micro-batches of these samples: sample_ids [b] and the requested `fields`. Tokens, labels and
    position_ids are int64 [b, s], loss_mask is float32 [b, s]; document_ids is
    a `Documents` and needs reset_attention_mask or --sft.
    Samples are read, and workers started, only if a field depends on the tokens."""
    masks = masks or MaskConfig()
    num_workers = num_workers if masks.depend_on_tokens(fields) else 0
    return BatchIterator(
        BatchDataset(dataset, masks, vocab_size, fields),
        sample_ids,
        num_workers=num_workers,
        pin_memory=pin_memory,
        collate=pack_batch if num_workers else None,
        read_ahead=read_ahead,
    )


def _live_with_the_trainer(trainer: int, worker: int) -> None:
    """Makes a worker ignore the signals that a launcher sends to the process group: the trainer still needs batches to
    finish its step and save. The worker ends with the trainer, even if the trainer died before the worker was
    ready. torch's own check misses that case."""
    die_with(trainer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
