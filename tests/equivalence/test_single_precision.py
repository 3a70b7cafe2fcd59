"""Layouts in fp32, as users train, stay close to one process within derived bounds.

A sum in another order differs by about sqrt(n) units in the last place (6e-8), times the cancellation of its terms. A
loss, a mean of positive numbers, may be off by 1e-6, and a gradient, per tensor in the Frobenius norm, by 1e-5;
measured are 1e-7 and 1e-6. The fp64 suite finds bugs below these bounds (GELU's two forms are 3e-8 of the loss apart);
this file checks that nothing in between is computed in less than fp32. Only the first step is compared: training
amplifies differences. There are no biases, because a key bias has a zero gradient but for rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.block import Block
from megatron.prove.check_layout.outcome import train_outcome
from tests.equivalence.test_model_parallel import GPT2, LLAMA, SP, layout
from tests.helpers.distributed import run_ranks
from tests.helpers.layouts import whole_tensors
from tests.helpers.runs import flags, make_parts

LOSS, GRADIENT = 1e-6, 1e-5
BARE = {**GPT2, "disable_bias_linear": True}


def first_step(rank: int, ranks: int, argv: list[str], half: bool = False) -> Any:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=ranks)
    if half:  # a planted loss of precision between two layers
        first = next(module for module in parts.engine.model.modules() if isinstance(module, Block))
        first.register_forward_hook(lambda module, given, result: result.bfloat16().float())
    with parts:
        return train_outcome(parts, 1)


def distance(family: dict[str, Any], axes: dict[str, Any], half: bool = False) -> tuple[float, float]:
    """Relative distance of the loss and of the worst gradient."""
    alone = first_step(0, 1, flags(**family))
    split = run_ranks(4, first_step, 4, flags(**family, **axes), half)
    ours = whole_tensors([rank.gradients for rank in split], agree_to=1e-6)
    theirs = whole_tensors([alone.gradients])
    assert ours.keys() == theirs.keys() and theirs
    worst = max(((ours[name] - grad).norm() / grad.norm()).item() for name, grad in theirs.items())
    return max(abs(rank.numbers["loss"][0] / alone.numbers["loss"][0] - 1) for rank in split), worst


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        (BARE, layout(tp=2, pp=2, **SP)),
        (LLAMA, layout(tp=2, context_parallel_size=2)),
        (LLAMA, layout(tp=2, zero_stage=3)),
        (LLAMA, layout(pp=2, num_layers_per_virtual_pipeline_stage=1)),
    ],
    ids=["tp sp pp", "tp cp", "zero", "interleaved dp"],
)
def test_the_first_step(family: dict[str, Any], axes: dict[str, Any]) -> None:
    loss, gradient = distance(family, axes)
    assert loss < LOSS and gradient < GRADIENT


def test_half_precision_in_between_is_seen() -> None:
    assert distance(LLAMA, layout(tp=2, pp=2), half=True)[1] > GRADIENT
