"""The queue of weight gradients keeps the order of passes, adds gradients up and computes nothing early."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.model.wgrads import WgradQueue


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, 2))


def filled(queue: WgradQueue, parameter: nn.Parameter) -> None:
    """Queues two passes with two gradients each: 1 and 2, then 10 and 20."""
    for values in ((1.0, 2.0), (10.0, 20.0)):
        for value in values:
            queue.put(parameter, torch.full((1, 1), value), torch.ones(1, 2))
        queue.end_of_pass()


class Notes:
    """Receives the products instead of the parameter."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    def put(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        self.taken.append((grad.t() @ x)[0, 0].item())


def test_the_oldest_pass_comes_first_and_gradients_add_up() -> None:
    queue, parameter = WgradQueue(), weight()
    filled(queue, parameter)
    assert parameter.grad is None
    queue.run()
    assert parameter.grad is not None and parameter.grad.tolist() == [[3.0, 3.0]]
    assert not queue.empty
    queue.run()
    assert parameter.grad.tolist() == [[33.0, 33.0]]
    assert queue.empty


def test_whoever_takes_them_gets_them_one_by_one() -> None:
    queue, parameter, notes = WgradQueue(), weight(), Notes()
    queue.connect(notes, nn.Module())
    filled(queue, parameter)
    assert not notes.taken
    queue.run()
    assert notes.taken == [1.0, 2.0] and parameter.grad is None
