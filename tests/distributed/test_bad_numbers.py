"""A number goes bad on one rank, in its shard of a layer or on its stage. Either all ranks stop in that step with the
same message, or all skip the step and lower the loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.errors import NonFiniteError
from megatron.training.assemble import Parts
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts

RANKS = 4
LAYOUT = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 4}
WEIGHT, GRADIENT = "layers.1.mlp.dense_4h_to_h.weight", "layers.3.input_layernorm.weight"


def spoil(parts: Parts, kind: str, name: str) -> None:
    parameter = dict(parts.engine.model.named_parameters())[name]
    if kind == "weight":
        with torch.no_grad():
            parameter.view(-1)[-1] = float("nan")
    else:
        parameter.register_hook(lambda grad: grad * float(kind))


NOT_FINITE = r"a gradient is not finite \(in samples 8 to 15\)"


def bad_from_step_2(rank: int, argv: list[str], where: int, kind: str, name: str) -> tuple[list[Any], str]:
    """(skipped, loss scale) of every step, and the message of the error that ended the run."""
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=RANKS)
    steps: list[Any] = []
    with parts:
        for number in range(4):
            if number == 1 and rank == where:
                spoil(parts, kind, name)
            try:
                result = parts.trainer.iterate()
            except NonFiniteError as error:
                return steps, str(error)
            assert result is not None
            steps.append((result.skipped, result.loss_scale))
    return steps, ""


@pytest.mark.parametrize(
    ("where", "kind", "name", "said"),
    [
        (1, "weight", WEIGHT, f"the loss is nan .*first non-finite parameters of rank 1: {WEIGHT}. The update"),
        (
            2,
            "nan",
            GRADIENT,
            rf"{NOT_FINITE}; .*first non-finite gradients of rank 2: {GRADIENT}",
        ),
        (
            3,
            "inf",
            GRADIENT,
            rf"{NOT_FINITE}; .*first non-finite gradients of rank 3: {GRADIENT}",
        ),
    ],
)
def test_all_ranks_stop_and_name_the_one(where: int, kind: str, name: str, said: str) -> None:
    ended = run_ranks(RANKS, bad_from_step_2, flags(**LAYOUT), where, kind, name)
    assert all(steps == [(False, 1.0)] for steps, _ in ended), "in the step in which it happened"
    assert len({text for _, text in ended}) == 1
    with pytest.raises(NonFiniteError, match=f"iteration 2: {said}"):
        raise NonFiniteError(ended[0][1])


def test_an_overflow_on_one_stage_is_skipped_by_all() -> None:
    """Two overflows lower the scale (--hysteresis 2) on all ranks."""
    fp16 = {"fp16": True, "initial_loss_scale": 2.0**10}
    ended = run_ranks(RANKS, bad_from_step_2, flags(**LAYOUT, **fp16), 3, "inf", GRADIENT)
    expected = [(False, 1024.0), (True, 1024.0), (True, 1024.0), (True, 512.0)]
    assert ended == [(expected, "")] * RANKS


@pytest.mark.parametrize("where", [1, 3])
def test_divided_gradients_are_looked_at_by_those_that_hold_them(where: int) -> None:
    """ZeRO-1 keeps the sum on one of the two data-parallel ranks, whichever rank the bad number came from."""
    layout = {"tensor_model_parallel_size": 2, "num_layers": 4, "zero_stage": 1}
    ended = run_ranks(RANKS, bad_from_step_2, flags(**layout), where, "nan", GRADIENT)
    assert all(steps == [(False, 1.0)] for steps, _ in ended)
    (text,) = {text for _, text in ended}
    with pytest.raises(NonFiniteError, match=rf"iteration 2: {NOT_FINITE}; .* of rank [13]: {GRADIENT}\. The update"):
        raise NonFiniteError(text)


def test_an_overflow_on_one_rank_is_skipped_by_all_with_divided_gradients() -> None:
    fp16 = {"fp16": True, "initial_loss_scale": 2.0**10, "zero_stage": 1, "tensor_model_parallel_size": 2}
    ended = run_ranks(RANKS, bad_from_step_2, flags(**fp16, num_layers=4), 3, "inf", GRADIENT)
    expected = [(False, 1024.0), (True, 1024.0), (True, 1024.0), (True, 512.0)]
    assert ended == [(expected, "")] * RANKS
