"""Loader of `training_data`: each rank gets its share of every epoch, in micro-batches."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megatron.distributed.parallel_state import Axis
from megatron.errors import ConfigError


class EpochLoader:
    """Iterates over one epoch at a time, each in a new order that all ranks share. Drops a last, incomplete
    micro-batch, so that all ranks make the same number of steps."""

    def __init__(
        self, data: Dataset[Any], micro_batch: int, dp: Axis, collate: Callable[..., Any] | None, device: torch.device
    ) -> None:
        try:
            samples = len(data)  # type: ignore[arg-type]
        except TypeError:
            raise ConfigError(
                f"megatron.compat.initialize(): training_data is a {type(data).__name__} without a length; give a "
                "dataset with len() and [index], or make the DataLoader yourself"
            ) from None
        if samples // dp.size < micro_batch:
            raise ConfigError(
                f"megatron.compat.initialize(): training_data has {samples} samples for {dp.size} ranks, less than one "
                f"micro-batch of {micro_batch} for each; give more samples, or lower train_micro_batch_size_per_gpu"
            )
        self.sampler: DistributedSampler[Any] = DistributedSampler(data, dp.size, dp.rank, drop_last=True)
        self.loader: DataLoader[Any] = DataLoader(
            data,
            batch_size=micro_batch,
            sampler=self.sampler,
            collate_fn=collate,
            drop_last=True,
            pin_memory=device.type != "cpu",
        )
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self.loader)
