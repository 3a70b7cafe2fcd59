"""NVIDIA's apex, which needs a GPU, as stand-ins with its interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.config.sections.optimizer import OptimizerConfig
from megatron.config.sections.precision import PrecisionConfig
from megatron.data_parallel import BucketStore
from megatron.distributed.parallel_state import Axis
from megatron.ops import resolve
from megatron.ops.library import Library
from megatron.optimizer import Optimizer
from megatron.optimizer.rules.adam import Adam, AsWeights, by_apex
from tests.helpers.update_rule import update

BUILT, NOT_BUILT = Library(), Library("not built")
ADAM = "adamw"
NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Installs an apex that records its calls."""
    called: list[str] = []

    def layer(x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        assert weight.dtype == bias.dtype == x.dtype and shape == tuple(weight.shape)
        called.append("layer")
        return F.layer_norm(x, shape, weight, bias, eps)

    def rms(x: Tensor, weight: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        called.append("rms")
        return F.rms_norm(x, shape, weight, eps)

    for name in ("amp_C", "fused_layer_norm_cuda", "apex", "apex.normalization", "apex.normalization.fused_layer_norm"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    fused = sys.modules["apex.normalization.fused_layer_norm"]
    monkeypatch.setattr(fused, "fused_layer_norm_affine", layer, raising=False)
    monkeypatch.setattr(fused, "fused_rms_norm_affine", rms, raising=False)
    yield called


def backends(native: Library, device: str = "cuda") -> set[str]:
    kernels = resolve("auto", device, native=native, warn=lambda text: None)
    return {choice.backend for choice in kernels.choices if choice.op in NORMS}


def test_it_runs_where_our_kernels_do_not_and_the_table_says_so(calls: list[str]) -> None:
    kernels = resolve("auto", "cuda", native=NOT_BUILT)
    assert backends(NOT_BUILT) == {"apex"} and "NVIDIA's apex is installed" in kernels.table()
    assert backends(NOT_BUILT, "cpu") == {"torch"}
    assert backends(BUILT, "cpu") == {"native"}
    assert resolve("ref", "cuda").choices[0].backend == "ref"


def test_its_norms_are_called_with_what_they_can_take(calls: list[str]) -> None:
    kernels, plain = resolve("auto", "cuda", native=NOT_BUILT), resolve("auto", "cpu", native=NOT_BUILT)
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    for given in (bias, None):  # it has none without a bias
        assert torch.equal(kernels.layer_norm(x, weight, given, 1e-5), plain.layer_norm(x, weight, given, 1e-5))
        for ours, theirs in zip(
            kernels.add_layer_norm(x, 2 * x, weight, given, 1e-5),
            plain.add_layer_norm(x, 2 * x, weight, given, 1e-5),
            strict=True,
        ):
            assert torch.equal(ours, theirs)
    half = x.bfloat16()
    for given in (x, half):  # nor inputs whose dtype differs from the parameters'
        assert torch.equal(kernels.rms_norm(given, weight, 1e-5), plain.rms_norm(given, weight, 1e-5))
    assert calls == ["layer", "layer", "rms"]


@pytest.mark.parametrize("missing", ["amp_C", "fused_layer_norm_cuda"])
def test_another_package_of_that_name_is_not_taken_for_it(
    calls: list[str], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, missing)
    assert backends(NOT_BUILT) == {"torch"}


def capturable_adam(
    chunk: int,
    left_out: Tensor,
    lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    corrected: int,
    decay: float,
    inverse_scale: Tensor,
) -> None:
    """Implements apex's function of that name with torch's Adam."""
    assert left_out.dtype == step.dtype == torch.int32 and corrected == 1 and chunk > 0
    if left_out.item():
        return
    function = adamw if mode == 1 else adam
    grads, weights, *moments = lists
    assert all(grad.numel() for grad in grads), "apex starts a kernel at a tensor's last chunk: an empty one has none"
    steps = [(step[0] - 1).float() for _ in weights]
    scaled = [grad * inverse_scale for grad in grads]
    rates = {"beta1": beta1, "beta2": beta2, "lr": lr.item(), "weight_decay": decay, "eps": eps}
    function(weights, scaled, *moments, [], steps, amsgrad=False, maximize=False, foreach=False, **rates)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("settings", [{}, {"decoupled_weight_decay": False}])
def test_its_adam_is_the_update_where_ours_is_not_built(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, asynchronous: bool, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys.modules["amp_C"], "multi_tensor_adam_capturable", capturable_adam, raising=False)
    kernels = resolve("auto", "cuda", native=NOT_BUILT)
    assert kernels.backend(ADAM) == "apex" and resolve("ref", "cuda").backend(ADAM) == "ref"
    plain, with_apex = (torch.nn.Linear(5, 7) for _ in range(2))
    with_apex.load_state_dict(plain.state_dict())
    config = OptimizerConfig(weight_decay=0.1, **settings)
    for model, which in ((plain, None), (with_apex, kernels)):
        grads = BucketStore(model.named_parameters(), Axis.single("dp"))
        optimizer = Optimizer(grads, config, PrecisionConfig(), kernels=which, asynchronous=asynchronous)
        for step in range(4):
            grads.zero()
            x = torch.linspace(-1, 1, 15).view(3, 5) * (torch.inf if step == 1 else step + 1)
            model(x).square().sum().backward()
            grads.reduce()
            optimizer.step(1e-2, 0.1)
        assert (optimizer._update._rules["weight"].engine is by_apex) is (which is not None)
        assert optimizer.extra_state()["step"] == 3, "one step had a gradient that is not finite"
    for a, b in zip(plain.parameters(), with_apex.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_pieces_without_elements_are_not_handed_to_apex(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO may give a rank no element of a parameter. apex would skip the parameters after such an empty one."""
    monkeypatch.setattr(sys.modules["amp_C"], "multi_tensor_adam_capturable", capturable_adam, raising=False)
    rule = Adam(0.9, 0.999, 1e-8, AsWeights(), by_apex)
    weights = [torch.ones(3), torch.ones(0)]
    slots = [rule.slot(str(place), weight) for place, weight in enumerate(weights)]
    update(rule, slots, [torch.ones(3), torch.ones(0)], 1e-2, 0.0)
    update(rule, slots[1:], [torch.ones(0)], 1e-2, 0.0)
    torch.testing.assert_close(weights[0], torch.full((3,), 0.99))
    assert [slot.step.item() for slot in slots] == [1.0, 2.0]
