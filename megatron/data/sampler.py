"""Chooses the samples of each rank and step. They follow from the layout and the number of consumed samples.

Each block of micro_batch_size * dp_size samples is split among the data-parallel ranks. A global batch is a whole
number of blocks, so the samples of a step depend only on the global batch size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def block(self) -> int:
        return self.micro_batch_size * self.dp_size


def sample_batches(
    order: str, total_samples: int, consumed_samples: int, shape: BlockShape, *, data_sharding: bool = True
) -> Iterator[list[int]]:
    """Yields the sample ids of each micro-batch of one rank, in the order of --dataloader-type."""
    if order == "single":
        return single_batches(total_samples, consumed_samples, shape)
    return cyclic_batches(total_samples, consumed_samples, shape, data_sharding=data_sharding)


def single_batches(total_samples: int, consumed_samples: int, shape: BlockShape) -> Iterator[list[int]]:
    """Yields contiguous micro-batches of sample ids, in order from `consumed_samples`. Drops an incomplete block."""
    if consumed_samples > total_samples:
        raise DataError(
            f"the earlier run consumed {consumed_samples} samples, but the data has {total_samples}, so the data or "
            f"--train-samples/--train-iters have changed; give those of the earlier run"
        )
    for start in range(consumed_samples, total_samples - shape.block + 1, shape.block):
        begin = start + shape.dp_rank * shape.micro_batch_size
        yield list(range(begin, begin + shape.micro_batch_size))


def cyclic_batches(
    total_samples: int, consumed_samples: int, shape: BlockShape, *, data_sharding: bool = True
) -> Iterator[list[int]]:
    """Yields micro-batches of endless epochs, each shuffled by torch.randperm seeded with the epoch's number.

    With data_sharding every rank shuffles its own bucket, as in Megatron, so the order depends on the number of
    data-parallel ranks. Without it all ranks share one permutation, for any number of ranks.
    """
    import torch  # imported lazily: this module must work without torch

    active = total_samples - total_samples % shape.block
    if not active:
        raise DataError(
            f"--dataloader-type cyclic: {total_samples} samples do not fill one block of {shape.block} "
            f"(micro-batch {shape.micro_batch_size} x {shape.dp_size} ranks); use more data, or lower "
            "--micro-batch-size"
        )
    if consumed_samples % active % shape.block:
        raise ConfigError(
            f"--dataloader-type cyclic: the number of consumed samples, {consumed_samples}, is not divisible by "
            f"{shape.block} (--micro-batch-size x number of data-parallel ranks); "
            f"resume with the earlier --micro-batch-size and number of data-parallel ranks"
        )
    epoch, done = divmod(consumed_samples, active)
    while True:
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if data_sharding:
            bucket = total_samples // shape.block * shape.micro_batch_size
            order = torch.randperm(bucket, generator=generator)[done // shape.dp_size :] + shape.dp_rank * bucket
        else:
            whole = total_samples // shape.micro_batch_size * shape.micro_batch_size
            order = torch.randperm(whole, generator=generator)[done:][shape.dp_rank :: shape.dp_size]
        ids = order.tolist()
        blocks = (active - done) // shape.block
        for start in range(0, blocks * shape.micro_batch_size, shape.micro_batch_size):
            yield ids[start : start + shape.micro_batch_size]
        epoch, done = epoch + 1, 0
