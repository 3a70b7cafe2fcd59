"""User optimizers that give other results on pieces of parameters are found before a run shards them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from megatron.compat.on_pieces import differs_on_pieces


class Own(torch.optim.Optimizer):
    """An optimizer whose update of a tensor is a method."""

    def __init__(self, params: Any, lr: Any = 1e-5, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(group["lr"] * self.update(one, one.grad, self.state[one], group))

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(weight))
        return mean.lerp_(grad, 0.1).sign()


class Lamb(Own):
    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        made = super().update(weight, grad, state, group) + 0.01 * weight
        return made * weight.norm() / made.norm().clamp(min=1e-6)


class Clipping(Own):
    """Clips only large gradients."""

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return super().update(weight, grad, state, group) * (10 / grad.norm().clamp(min=10))


class LateShampoo(Own):
    """Uses rows after 20 steps."""

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        late = state["step"] > 20 and grad.dim() == 2
        return grad / grad.norm(dim=1, keepdim=True) if late else grad


class MatricesOnly(Own):
    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        left, _, right = torch.linalg.svd(grad, full_matrices=False)
        return left @ right


class Together(Own):
    """Has one step size for all parameters."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        norm = sum(one.grad.norm() for group in self.param_groups for one in group["params"])
        with torch.no_grad():
            for group in self.param_groups:
                for one in group["params"]:
                    one.sub_(one.grad / (1 + norm))


class Slow(torch.optim.Optimizer):
    """The Lookahead optimizer, which lets another optimizer make the steps."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.number = base, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()
        self.number += 1
        for group in self.param_groups:
            for one in group["params"]:
                slow = self.state[one].setdefault("slow", one.clone())
                if self.number % 5 == 0:
                    one.copy_(slow.lerp_(one, 0.5))


class MadeAtOnce(Own):
    """Creates its state at construction, like torch's Adagrad."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for one in (one for group in self.param_groups for one in group["params"]):
            self.state[one] = {"mean": torch.full_like(one, 0.1), "step": 0}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["step"] += 1
        return state["mean"].mul_(0.9).add_(grad).sign()


class LambMadeAtOnce(MadeAtOnce, Lamb):
    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return super().update(weight, grad, state, group) * weight.norm()


class SingleOnly(Own):
    """Supports only fp32, and draws random numbers from Python and numpy."""

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if weight.dtype != torch.float32:
            raise RuntimeError("fp32 only")
        assert 0 <= random.random() + np.random.random() <= 2
        return super().update(weight, grad, state, group)


class Frees(Own):
    """Owns a resource that a copy would free."""

    def __del__(self) -> None:
        pass


class HoldsTheModel(Own):
    model: nn.Module


def holding(parameters: Any) -> torch.optim.Optimizer:
    made = HoldsTheModel(parameters)
    made.model = nn.Linear(1, 1)
    return made


SAME: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch's": lambda params: torch.optim.AdamW(params, lr=0.1),
    "elementwise": Own,
    "elementwise, from a rate of 0": lambda params: Own(params, lr=torch.tensor(0.0)),
    "state made at once": MadeAtOnce,
    "fp32 alone": SingleOnly,
    "lookahead over Adam": lambda params: Slow(torch.optim.Adam(params, lr=0.1)),
}
OTHER: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "LAMB": (Lamb, "updates a parameter differently"),
    "LAMB, from a rate of 0": (lambda params: Lamb(params, lr=0.0), "updates a parameter differently"),
    "clipping": (Clipping, "updates a parameter differently"),
    "late": (LateShampoo, "updates a parameter differently"),
    "together": (Together, "updates a parameter differently"),
    "lookahead over LAMB": (lambda params: Slow(Lamb(params)), "updates a parameter differently"),
    "Adafactor": (lambda params: Adafactor(params, lr=0.1, relative_step=False), "updates a parameter differently"),
    "matrices": (MatricesOnly, "cannot update pieces of parameters"),
    "LAMB, state made at once": (LambMadeAtOnce, "updates a parameter differently"),
    "frees": (Frees, "could not be tried on a small tensor"),
    "holds the model": (holding, "could not be tried on a small tensor"),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [one for one in model.parameters() if one.dim() == 2]
    return [{"params": matrices}, {"params": [one for one in model.parameters() if one.dim() < 2]}]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 1))


@pytest.mark.parametrize("name", SAME)
def test_elementwise_rules_may_update_pieces(name: str) -> None:
    optimizer = SAME[name](groups_of(network()))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # which replaces `step`, and starts at 0
    assert differs_on_pieces(optimizer) is None


@pytest.mark.parametrize("name", OTHER)
def test_other_rules_are_found(name: str) -> None:
    make, said = OTHER[name]
    if name == "matrices":
        optimizer = make([one for one in network().parameters() if one.dim() == 2])
    else:
        optimizer = make(groups_of(network()))
    assert (differs_on_pieces(optimizer) or "").startswith(said)


def test_nothing_is_disturbed() -> None:
    model = network()
    optimizer = Slow(Lamb(groups_of(model)))
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    weights = [one.detach().clone() for one in model.parameters()]
    state, number = copy.deepcopy(optimizer.base.state_dict()), optimizer.number
    generator = torch.get_rng_state()
    others = random.getstate(), np.random.get_state()
    assert differs_on_pieces(SingleOnly(groups_of(model))) is None
    assert differs_on_pieces(optimizer) is not None
    assert all(map(torch.equal, weights, model.parameters()))
    assert torch.equal(torch.get_rng_state(), generator)
    assert str(others) == str((random.getstate(), np.random.get_state()))
    assert optimizer.number == number
    for kept, now in zip(state["state"].values(), optimizer.base.state_dict()["state"].values(), strict=True):
        assert torch.equal(kept["mean"], now["mean"])
