"""Every planted host sync is found and its line named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.block import Block
from megatron.training.assemble import Parts
from tests.cluster.host_waits import HostWait
from tests.cluster.test_host_waits import TENSORS, Case, settings, watched
from tests.equivalence.test_model_parallel import GPT2, layout
from tests.helpers.runs import flags


def in_every_layer(parts: Parts, mistake: Callable[[Tensor], object]) -> None:
    for module in parts.engine.model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda block, arguments: (mistake(arguments[0]), None)[1])


def reads_a_number(x: Tensor) -> float:
    return x.sum().item()


def asks_a_number(x: Tensor) -> bool:
    return bool(x.sum() > 0)


def goes_to_the_host(x: Tensor) -> Tensor:
    return x.detach().cpu()


def selects_by_value(x: Tensor) -> Tensor:
    return x[x > 0]


def comes_from_the_host(x: Tensor) -> Tensor:
    return torch.tensor([1.0, 2.0], device=x.device)


def waits_for_all(x: Tensor) -> None:
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "mistake",
    [reads_a_number, asks_a_number, goes_to_the_host, selects_by_value, comes_from_the_host, waits_for_all],
)
def test_a_planted_wait_is_found(mistake: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostWait, match=rf"test_planted_waits.py:\d+ in {mistake.__name__}: .* waits for the device"):
        watched(Case(2, 1, tuple(TENSORS)), lambda parts: in_every_layer(parts, mistake))


def takes_places_of_a_list(x: Tensor) -> Tensor:
    return x[[0]]


def takes_places_of_the_host(x: Tensor) -> Tensor:
    return x[:, torch.arange(2)]


def shows_numbers(x: Tensor) -> None:
    print(x.sum())


def writes_a_number(x: Tensor) -> str:
    return f"loss {x.sum():.3f}"


def meets_the_others(x: Tensor) -> None:
    dist.barrier()


def empties_the_cache(x: Tensor) -> None:
    torch.cuda.empty_cache()


def looks_for_errors(x: Tensor) -> Tensor:
    return torch.linalg.inv(x.detach().float()[0, :4, :4])


def draws_by_weight(x: Tensor) -> Tensor:
    return torch.multinomial(x.detach().float().abs()[0], 1)


QUIET = (
    *(takes_places_of_a_list, takes_places_of_the_host, shows_numbers, writes_a_number, meets_the_others),
    *(empties_the_cache, looks_for_errors, draws_by_weight),
)
"""Waits without a number read in Python. All are tried in one step."""


def test_waits_inside_torch_are_found() -> None:
    found: list[str] = []

    def each(x: Tensor) -> None:
        for mistake in QUIET if not found else ():
            with pytest.raises(HostWait) as caught:
                mistake(x)
            found.append(str(caught.value))

    watched(Case(2, 1, tuple(TENSORS)), lambda parts: in_every_layer(parts, each))
    for mistake, said in zip(QUIET, found, strict=True):
        assert f"in {mistake.__name__}: " in said and said.endswith("waits for the device"), said


def waits_in_an_evaluation(x: Tensor) -> object:
    return None if torch.is_grad_enabled() else x.sum().item()


def test_a_wait_planted_in_evaluations_alone_is_found() -> None:
    argv = tuple(flags(**{**settings(GPT2, layout(tp=2), 2), "eval_iters": 1}))
    with pytest.raises(HostWait, match=r"in waits_in_an_evaluation: .* waits for the device"):
        watched(Case(2, 1, argv), lambda parts: in_every_layer(parts, waits_in_an_evaluation))


def test_a_batch_that_is_not_pinned_is_found() -> None:
    def plant(parts: Parts) -> None:
        parts.trainer.train_batches = (
            {**batch, "labels": batch["labels"] + 0} for batch in parts.trainer.train_batches
        )

    with pytest.raises(HostWait, match=r"megatron/engine/to_device.py:\d+ in _moved: aten._to_copy .* on cpu"):
        watched(Case(2, 1, tuple(TENSORS)), plant)


def makes_a_square(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)


def test_a_planted_square_is_found() -> None:
    """One square in each of two layers, for each of two micro-batches."""
    argv = tuple(flags(**{**settings(GPT2, layout(tp=2), 2), "num_layers": 2}))
    result = watched(Case(2, 1, argv), lambda parts: in_every_layer(parts, makes_a_square))
    assert result.squares == {"tests/cluster/test_planted_waits.py:makes_a_square": 4}


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "cloned": lambda weight: weight.clone(),
    "copied into a buffer": lambda weight: torch.empty_like(weight).copy_(weight),
    "computed": lambda weight: weight * 1.0,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_planted_copy_of_the_weights_is_found(how: str) -> None:
    def plant(parts: Parts) -> None:
        model = parts.engine.model
        kept: list[Tensor] = []

        def copies_the_weights(x: Tensor) -> None:
            kept[:] = [COPIES[how](parameter.detach()) for parameter in model.parameters()]

        in_every_layer(parts, copies_the_weights)

    result = watched(Case(2, 1, tuple(TENSORS)), plant)
    assert result.copied.size > result.allowed_copies and "copies_the_weights" in str(result.copied)
