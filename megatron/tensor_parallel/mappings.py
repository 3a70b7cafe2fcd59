"""Collectives between split and replicated parts of the model, with their gradients.

| function          | forward                       | backward                      |
|-------------------|-------------------------------|-------------------------------|
| `copied`          | nothing                       | sum over the ranks            |
| `summed`          | sum over the ranks            | nothing                       |
| `gathered`        | all-gather                    | reduce-scatter                |
| `scattered`       | reduce-scatter                | all-gather                    |

Activations are [batch, seq, ...]. The all-gather and reduce-scatter act on the sequence, dimension 1.
"""

from collections.abc import Callable

from torch import Tensor

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis

SEQUENCE = 1


def copied(x: Tensor, axis: Axis) -> Tensor:
    """Returns `x`, a replicated activation, as the input of a split layer."""
    return _mapped(x, axis, _same, _sum)


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Sums the ranks' partial results to the replicated result."""
    return _mapped(x, axis, _sum, _same)


def gathered(x: Tensor, axis: Axis) -> Tensor:
    """Gathers this rank's piece [batch, seq / ranks, ...] to [batch, seq, ...], the input of a split layer."""
    return _mapped(x, axis, _join, _sum_pieces)


def scattered(x: Tensor, axis: Axis) -> Tensor:
    """Reduces partial results [batch, seq, ...] to this rank's piece of their sum [batch, seq / ranks, ...]."""
    return _mapped(x, axis, _sum_pieces, _join)


Step = Callable[[Tensor, Axis], Tensor]


def _mapped(x: Tensor, axis: Axis, forward: Step, backward: Step) -> Tensor:
    if axis.size == 1:
        return x
    return collectives.differentiable(x, lambda t: forward(t, axis), lambda grad: backward(grad, axis))


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return collectives.all_reduce(x.contiguous().clone(), axis)


def _join(x: Tensor, axis: Axis) -> Tensor:
    return collectives.gather_along(x, axis, SEQUENCE)


def _sum_pieces(x: Tensor, axis: Axis) -> Tensor:
    return collectives.scatter_sum(x, axis, SEQUENCE)
