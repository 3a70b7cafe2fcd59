from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.sampler import BlockShape, cyclic_batches, single_batches
from megatron.errors import ConfigError, DataError


def shape(micro: int, rank: int, size: int) -> BlockShape:
    return BlockShape(micro_batch_size=micro, dp_rank=rank, dp_size=size)


def megatron_single(total: int, consumed: int, micro: int, rank: int, size: int) -> list[list[int]]:
    batches, block = [], []
    for index in range(consumed, total):
        block.append(index)
        if len(block) == micro * size:
            batches.append(block[rank * micro : (rank + 1) * micro])
            block = []
    return batches


@given(total=st.integers(0, 60), consumed=st.integers(0, 60), micro=st.integers(1, 4), size=st.sampled_from([1, 2, 4]))
def test_single_is_that_of_megatron(total: int, consumed: int, micro: int, size: int) -> None:
    if consumed > total:
        with pytest.raises(DataError, match=f"consumed {consumed} samples, but the data has {total}"):
            list(single_batches(total, consumed, shape(micro, 0, size)))
        return
    for rank in range(size):
        assert list(single_batches(total, consumed, shape(micro, rank, size))) == megatron_single(
            total, consumed, micro, rank, size
        )


def megatron_cyclic(
    total: int, consumed: int, micro: int, rank: int, size: int, sharding: bool, count: int
) -> list[list[int]]:
    """One epoch after another, like repeated use of Megatron's random sampler."""
    batches: list[list[int]] = []
    while len(batches) < count:
        active = total - total % (micro * size)
        epoch, current = divmod(consumed, active)
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if sharding:
            bucket = total // (micro * size) * micro
            ids = [rank * bucket + x for x in torch.randperm(bucket, generator=generator).tolist()[current // size :]]
        else:
            whole = total // micro * micro
            ids = torch.randperm(whole, generator=generator).tolist()[current:][rank::size]
        for start in range(0, len(ids) - micro + 1, micro):
            if consumed // active > epoch:
                break
            batches.append(ids[start : start + micro])
            consumed += micro * size
    return batches[:count]


@pytest.mark.parametrize("sharding", [True, False])
@given(total=st.integers(16, 50), blocks=st.integers(0, 20), micro=st.integers(1, 4), size=st.sampled_from([1, 2, 4]))
def test_cyclic_is_that_of_megatron(sharding: bool, total: int, blocks: int, micro: int, size: int) -> None:
    consumed = blocks * micro * size
    active = total - total % (micro * size)
    if consumed % active % (micro * size):
        return
    for rank in range(size):
        got = cyclic_batches(total, consumed, shape(micro, rank, size), data_sharding=sharding)
        assert list(islice(got, 12)) == megatron_cyclic(total, consumed, micro, rank, size, sharding, 12)


@pytest.mark.parametrize("kind", ["single", "cyclic", "cyclic without sharding"])
def test_a_pure_function_of_the_samples_consumed(kind: str) -> None:
    def batches(consumed: int, count: int) -> list[list[int]]:
        if kind == "single":
            return list(islice(single_batches(1000, consumed, shape(3, 1, 2)), count))
        sharding = kind == "cyclic"
        return list(islice(cyclic_batches(50, consumed, shape(3, 1, 2), data_sharding=sharding), count))

    whole = batches(0, 40)
    for steps in range(0, 30, 7):
        assert batches(steps * 6, 40 - steps) == whole[steps:]


@pytest.mark.parametrize("kind", ["single", "cyclic without sharding"])
def test_samples_of_a_step_do_not_depend_on_the_layout(kind: str) -> None:
    """A global batch of 16 has the same samples at every step under every layout."""

    def steps(micro: int, size: int) -> list[list[int]]:
        per_rank = []
        for rank in range(size):
            block = shape(micro, rank, size)
            made = (
                single_batches(96, 16, block)
                if kind == "single"
                else cyclic_batches(96, 16, block, data_sharding=False)
            )
            per_rank.append(list(islice(made, 4 * 16 // (micro * size))))
        micro_steps = 16 // (micro * size)
        return [
            sorted(
                i for batches in per_rank for batch in batches[k * micro_steps : (k + 1) * micro_steps] for i in batch
            )
            for k in range(4)
        ]

    reference = steps(1, 1)
    for micro in (1, 2, 4):
        for size in (1, 2, 4):
            assert steps(micro, size) == reference


def test_cyclic_refusals() -> None:
    with pytest.raises(DataError, match="7 samples do not fill one block of 8"):
        next(cyclic_batches(7, 0, shape(4, 0, 2)))
    with pytest.raises(ConfigError, match="the number of consumed samples, 6, is not divisible by 4"):
        next(cyclic_batches(100, 6, shape(2, 0, 2)))


@given(data=st.data(), dp=st.sampled_from([1, 2, 3, 4, 8]), micro=st.integers(1, 6), accumulation=st.integers(1, 5))
def test_any_cut_of_a_global_batch_has_its_samples(data: st.DataObject, dp: int, micro: int, accumulation: int) -> None:
    """Step k after `consumed` samples takes the same samples in the same order for every layout."""
    batch, steps = dp * micro * accumulation, 3
    consumed = data.draw(st.integers(0, 50)) * batch
    total = consumed + steps * batch + data.draw(st.integers(0, batch - 1))
    ranks = [list(single_batches(total, consumed, shape(micro, rank, dp))) for rank in range(dp)]
    for step in range(steps):
        taken = [
            index
            for block in range(step * accumulation, (step + 1) * accumulation)
            for rank in range(dp)
            for index in ranks[rank][block]
        ]
        assert taken == list(range(consumed + step * batch, consumed + (step + 1) * batch))
