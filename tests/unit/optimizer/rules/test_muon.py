"""Muon beside torch's, and the matrices that it gets: parts of fused ones, and their assignment to ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.optimizer import GroupRule, Matrix, Optimizer, matrices
from megatron.optimizer.rules import muon as module
from megatron.optimizer.rules.muon import COEFFICIENTS, orthogonalised, steps_of
from megatron.state.shard import Shard

STEPS = [(1e-2 / (1 + i), 0.1 + 0.02 * i) for i in range(8)]
AS_TORCH = {"optimizer": "muon", "muon_coefficient_type": "simple", "clip_grad": 0.0}
SINGLE = Axis.single("x")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8), nn.LayerNorm(8), nn.Linear(8, 11)
    )


MATRICES = ("1.weight", "3.weight")


def group(name: str, parameter: nn.Parameter) -> GroupRule:
    whole = Shard(name, tuple(parameter.shape))
    matrix = Matrix(whole, SINGLE, SINGLE, parameter.shape[-1]) if name in MATRICES else None
    return GroupRule(wd_mult=float(parameter.dim() > 1), matrix=matrix)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Random gradients, not a loss's: in bf16 one last bit of a weight would soon change all directions."""
    made = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=made) for name, p in model.named_parameters()}


def ours(**settings: object) -> nn.Module:
    model = make_model()
    grads = BucketStore(model.named_parameters(), Axis.single("dp"))
    config = OptimizerConfig(**{**AS_TORCH, **settings})  # type: ignore[arg-type]
    optimizer = Optimizer(grads, config, PrecisionConfig(), rule=group)
    for step, rates in enumerate(STEPS):
        grads.zero()
        for name, grad in gradients(model, step).items():
            grads.grad(name).copy_(grad)
        grads.reduce()
        optimizer.step(*rates)
    return model


def torchs(*, momentum: float, nesterov: bool, adjust: str) -> nn.Module:
    model = make_model()
    named = dict(model.named_parameters())
    others = [p for name, p in named.items() if name not in MATRICES]
    groups = [{"params": [p for p in others if (p.dim() > 1) == decays]} for decays in (True, False)]
    adam = torch.optim.AdamW(groups, fused=True)
    peer = torch.optim.Muon(
        [named[name] for name in MATRICES], momentum=momentum, nesterov=nesterov, adjust_lr_fn=adjust
    )
    for step, (lr, decay) in enumerate(STEPS):
        for name, grad in gradients(model, step).items():
            named[name].grad = grad
        for part, its_decay in zip([*peer.param_groups, *adam.param_groups], (decay, decay, 0.0), strict=True):
            part["lr"], part["weight_decay"] = lr, its_decay
        peer.step(), adam.step()
    return model


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_equals_torchs_muon(momentum: float, nesterov: bool, adjust: str) -> None:
    scale = {"original": ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2)}[adjust]
    names = ("muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor")
    mine = ours(**dict(zip(names, (momentum, nesterov, *scale), strict=True)))
    theirs = torchs(momentum=momentum, nesterov=nesterov, adjust=adjust)
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert (p - q).norm() <= 5e-7 * q.norm(), name
        assert not torch.equal(p, make_model().get_parameter(name))


def test_directions_are_torchs_bit_for_bit() -> None:
    """Compares only Newton-Schulz: the multiplication and addition to the weights differ by roundings."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in ((8, 24), (24, 8), (8, 8), (1, 5)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        theirs = _zeropower_via_newtonschulz(matrix, COEFFICIENTS["simple"][0], 5, 1e-7)
        assert torch.equal(orthogonalised(matrix, steps_of("simple", 5), torch.bfloat16), theirs)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_singular_values_become_about_one(kind: str) -> None:
    """All four sets of coefficients, and matrices with vectors that stay; numpy computes the singular values."""
    steps = {"simple": 10, "quintic": 5, "polar_express": 8, "aol": 4}[kind]
    matrix = torch.randn(12, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = orthogonalised(matrix, steps_of(kind, steps), torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    rotated = left.T @ found @ right.T
    assert (rotated.diagonal() - 1).abs().max() < 0.35
    assert (rotated - torch.diag(rotated.diagonal())).abs().max() < 1e-10


def test_polar_express_goes_on_with_its_last_step_and_others_begin_anew() -> None:
    assert steps_of("polar_express", 10)[7:] == [(1.875, -1.25, 0.375)] * 3
    assert steps_of("aol", 6) == [*COEFFICIENTS["aol"], *COEFFICIENTS["aol"][:2]]


def test_scale_modes() -> None:
    assert module.scale_factor("spectral", 4, 9) == module.scale_factor("spectral", 9, 4) == 3.0
    assert module.scale_factor("unit_rms_norm", 4, 9) == 2 / 3
    assert (module.scale_factor("shape_scaling", 4, 9), module.scale_factor("shape_scaling", 9, 4)) == (1.0, 1.5)


# matrices


def matrix(*shape: int, columns: int, fused: matrices.Fused | None = None, tp: int = 1, dp: int = 1) -> Matrix:
    axes = [Axis(name, 0, size, tuple(range(size))) for name, size in (("tp", tp), ("dp", dp))]
    return Matrix(Shard("w", shape), *axes, columns, fused)


def test_fused_maps_are_taken_apart_and_put_together() -> None:
    """Two groups of 3 queries, a key and a value, with 2 rows each, numbered in order."""
    numbers = torch.arange(2 * 5 * 2).view(2, 5, 2).float()
    stored = numbers.view(20, 1).repeat(1, 4)
    qkv = matrix(2, 5, 2, 4, columns=4, fused=(1, (3, 1, 1)))
    queries, keys, values = qkv.maps(stored)
    assert queries[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert keys[:, 0].tolist() == [6, 7, 16, 17] and values[:, 0].tolist() == [8, 9, 18, 19]
    assert torch.equal(qkv.joined(qkv.maps(stored)).view(20, 4), stored)
    gated = matrix(2, 3, 4, columns=4, fused=(0, (1, 1)))
    gate, up = gated.maps(stored[:6])
    assert gate[:, 0].tolist() == [0, 1, 2] and up[:, 0].tolist() == [3, 4, 5]
    assert torch.equal(gated.joined([gate, up]).view(6, 4), stored[:6])


def test_the_work_is_dealt_evenly() -> None:
    layers = {
        f"{n}.{name}": matrix(*shape, columns=shape[1], tp=2, dp=4) for n in range(8) for name, shape in SHAPES.items()
    }
    owners = matrices.deal(layers)
    loads: dict[tuple[int, int], int] = {}
    for name, owner in owners.items():
        loads[owner] = loads.get(owner, 0) + layers[name].work
    assert len(loads) == 8, "every rank has a share"
    total = sum(layer.work for layer in layers.values())
    assert max(loads.values()) <= 1.1 * total / 8
    assert matrices.deal(dict(reversed(layers.items()))) == owners, "whatever the order in which a rank holds them"


SHAPES = {"qkv": (192, 64), "dense": (64, 64), "up": (256, 64), "down": (64, 256)}


def test_work_grows_as_time_does() -> None:
    assert matrix(2, 3, 4, columns=4).work == 6 * 4 * 4 == matrix(4, 6, columns=6).work
    assert prod(SHAPES["up"]) * 64 == matrix(*SHAPES["up"], columns=64).work


# planted bugs


def plant_momentum_of_another_matrix(patch: pytest.MonkeyPatch) -> None:
    call = matrices.WholeMatrices.__call__

    def swapped(self: matrices.WholeMatrices, pieces: dict[str, Tensor]) -> dict[str, Tensor]:
        one, two = pieces
        return call(self, {one: pieces[two].T.contiguous(), two: pieces[one].T.contiguous()})

    patch.setattr(matrices.WholeMatrices, "__call__", swapped)


def plant_decay_after_the_step(patch: pytest.MonkeyPatch) -> None:
    step = module.Muon.step

    def late(self: module.Muon, store: module.Slots, shards: list[str], control: module.Control) -> None:
        step(self, store, shards, control._replace(weight_decay=0.0))
        for slot in store.of(shards)[0]:
            slot.tensor.mul_(1 - control.lr * control.weight_decay)

    patch.setattr(module.Muon, "step", late)


def plant_the_other_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "megatron.optimizer.rules.choose.scale_factor", lambda mode, rows, columns: math.sqrt(max(1, columns / rows))
    )


@pytest.mark.parametrize("plant", [plant_momentum_of_another_matrix, plant_decay_after_the_step, plant_the_other_scale])
def test_planted_bugs_are_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_equals_torchs_muon(0.9, True, "original")
