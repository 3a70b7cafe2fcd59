"""The queue of weight gradients: passes in their order, gradients added up, nothing computed before its time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.distributed.wgrad_queue import WgradQueue


def filled(queue: WgradQueue, parameter: nn.Parameter, computed: list[float]) -> None:
    """Two passes with two gradients each: 1 and 2, then 10 and 20."""

    def gradient(value: float) -> Tensor:
        computed.append(value)
        return torch.full((2,), value)

    for values in ((1.0, 2.0), (10.0, 20.0)):
        for value in values:
            queue.put(parameter, lambda value=value: gradient(value))  # type: ignore[misc]
        queue.end_of_pass()


def test_the_oldest_pass_comes_first_and_gradients_add_up() -> None:
    queue, parameter, computed = WgradQueue(), nn.Parameter(torch.zeros(2)), list[float]()
    filled(queue, parameter, computed)
    assert not computed and parameter.grad is None
    queue.run()
    assert computed == [1.0, 2.0] and parameter.grad is not None and parameter.grad.tolist() == [3.0, 3.0]
    assert not queue.empty
    queue.run()
    assert computed == [1.0, 2.0, 10.0, 20.0] and parameter.grad.tolist() == [33.0, 33.0]
    assert queue.empty


def test_whoever_is_ready_for_them_gets_them_one_by_one() -> None:
    queue, parameter, got = WgradQueue(), nn.Parameter(torch.zeros(2)), list[float]()
    queue.ready = lambda to, gradient: got.append(gradient[0].item())
    filled(queue, parameter, [])
    queue.run()
    assert got == [1.0, 2.0] and parameter.grad is None
