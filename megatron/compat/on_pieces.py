"""Tests at the start of a run, on small tensors, whether a user's optimizer can update pieces of parameters.

A ZeRO rank's optimizer holds one-dimensional pieces. A rule that uses a parameter's norm (LAMB, LARS), its rows
(Adafactor) or all parameters together (clipping within `step`) gives another result on pieces.
"""

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.distributed.rng import get_rng_state, set_rng_state

_STEPS = 32
"""Number of updates to try. It covers optimizers that begin with another rule, such as Shampoo."""
_SHAPES = ((), (6,), (4, 6), (2, 3, 4), (2, 3, 2, 2), (2, 2, 2, 2, 2))
"""Shapes of the small tensors, by number of dimensions."""
_CUT = 0.4
"""Share of each parameter's elements that the first rank holds."""
_SAME = 1e-5
"""Largest difference, relative to the largest update, that counts as rounding."""


def differs_on_pieces(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns how updating pieces differs from updating whole parameters; None if it does not. Changes neither the
    optimizer nor any random state."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return None  # refuse_whole_matrices() checks these
    if hasattr(type(optimizer), "__del__"):
        return "could not be tried on a small tensor (it has a __del__, which a copy would call)"
    device = next(one.device for group in optimizer.param_groups for one in group["params"])
    with _random_states(device), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            whole = _trained(optimizer, [lambda one: one.clone()])
        except Exception as error:  # user code, on tensors that it was not written for
            return f"could not be tried on a small tensor ({type(error).__name__}: {error})"
        try:
            pieces = _trained(optimizer, [lambda one: _flat(one)[0], lambda one: _flat(one)[1]])
        except Exception as error:
            return f"cannot update pieces of parameters ({type(error).__name__}: {error})"
    for start, end, end_of_pieces in zip(whole[0], whole[1], pieces[1], strict=True):
        largest = (end - start.view(-1)).abs().max()
        if not torch.allclose(end_of_pieces, end, rtol=0.0, atol=float(largest) * _SAME, equal_nan=True):
            return "updates a parameter differently when it is given in pieces"
    return None


@contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    """Restores the random states at the end of the block."""
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


Part = Callable[[Tensor], Tensor]
"""Function from a whole tensor to one rank's part of it."""


def _trained(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> tuple[list[Tensor], list[Tensor]]:
    """Trains small parameters, once for each of `parts` (the parts of all ranks). Returns the whole parameters before
    training, and the joined parts after training, flat."""
    held = _one_of_each_kind(optimizer)
    draw = torch.Generator().manual_seed(0)
    first = next(iter(held.values()))
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    drawn = [torch.randn(shape, generator=draw, dtype=torch.float64) + 1 for shape in map(_shape_of, held.values())]
    grads = [[_drawn(one, step, draw).to(first.device, dtype) for one in drawn] for step in range(_STEPS)]
    whole = [one.to(first.device, dtype) for one in drawn]
    ends = []
    for part in parts:
        mine = [nn.Parameter(part(one)) for one in whole]
        copied = _copied(optimizer, dict(zip(held, mine, strict=True)))
        for of_step in grads:
            for one, grad in zip(mine, of_step, strict=True):
                one.grad = part(grad).clone()
            copied.step()
        ends.append(mine)
    joined = [torch.cat([piece.detach().reshape(-1) for piece in pieces]) for pieces in zip(*ends, strict=True)]
    return whole, joined


def _one_of_each_kind(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Returns id -> parameter: one that is trained for each group and each number of dimensions."""
    kinds: dict[tuple[int, int], Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for one in group["params"]:
            if one.requires_grad:
                kinds.setdefault((number, one.dim()), one)
    return {id(one): one for one in kinds.values()}


def _shape_of(parameter: Tensor) -> tuple[int, ...]:
    return _SHAPES[min(parameter.dim(), len(_SHAPES) - 1)]


def _drawn(like: Tensor, step: int, draw: torch.Generator) -> Tensor:
    """Returns a random gradient whose pieces have different norms, above and below the thresholds of clipping."""
    grown = torch.linspace(-2, 2, like.numel(), dtype=like.dtype).exp().view(like.shape)
    return torch.randn(like.shape, generator=draw, dtype=like.dtype) * grown * 10.0 ** (step % 3 - 1)


def _flat(whole: Tensor) -> tuple[Tensor, Tensor]:
    cut = int(whole.numel() * _CUT)
    return whole.reshape(-1)[:cut].clone(), whole.reshape(-1)[cut:].clone()


def _copied(optimizer: torch.optim.Optimizer, small: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class and settings, without hooks. Its groups hold only the stand-ins in
    `small`, which maps the id of a parameter to its stand-in."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    memo: dict[int, Any] = {id(one): small.get(id(one), _Dropped()) for one in parameters}
    own = dict(optimizer.__dict__)
    for name, value in optimizer.__dict__.items():
        replaced = callable(value) and hasattr(type(optimizer), name)  # such as `step`, by a scheduler
        if name == "state" or name.endswith("_hooks") or replaced:
            del own[name]
        elif isinstance(value, nn.Module):
            raise TypeError(f"it holds a model, {name}")
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update({name: OrderedDict() for name in optimizer.__dict__ if name.endswith("_hooks")})
    copied.__dict__.update(copy.deepcopy(own, memo), state=_small_state(optimizer, small))
    for group in copied.param_groups:
        group["params"][:] = [one for one in group["params"] if not isinstance(one, _Dropped)]
        if isinstance(group.get("lr"), Tensor):
            group["lr"].fill_(_LR)
        elif "lr" in group:
            group["lr"] = _LR
    return copied


def _small_state(optimizer: torch.optim.Optimizer, small: Mapping[int, nn.Parameter]) -> dict[Tensor, dict[str, Any]]:
    """Returns the state that a class has made in its `__init__`, each tensor filled with its first element."""
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    for one, values in optimizer.state.items():
        if id(one) in small:
            new = small[id(one)]
            state[new] = {
                name: torch.full_like(new, value.flatten()[0].item(), dtype=value.dtype)
                if isinstance(value, Tensor) and value.shape == one.shape and value.dim()
                else copy.deepcopy(value)
                for name, value in values.items()
            }
    return state


_LR = 0.01
"""Learning rate of the test. Schedules may begin with 0, at which nothing differs."""


class _Dropped:
    """Stand-in for a parameter that the test does not use."""
