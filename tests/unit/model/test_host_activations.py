"""Activations in host memory: the same gradients, and none left on the device between forward and backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config import ModelConfig, RecomputeConfig
from megatron.model import gpt as gpt_module
from megatron.model.gpt import GPT
from megatron.model.host_activations import HostActivations
from megatron.ops import resolve
from megatron.utils.device import HostLink
from megatron.utils.dtype import default_dtype
from tests.cluster.fake_device import fake_cuda

LAYERS = 3


class FarLink:
    """A device with its own memory. A copy to the host happens at once, because the original may be overwritten after
    the layer. A copy back happens when the device waits for it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: list[int] = []
        self._fetches = 0

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        return (
            torch.full((length,), torch.nan, dtype=dtype)
            if dtype.is_floating_point
            else torch.zeros(length, dtype=dtype)
        )

    def to_host(self, source: Tensor, into: Tensor) -> Callable[[], None]:
        into.copy_(source)
        self.events.append("out")
        self.sent.append(source.numel())
        return lambda: None

    def to_device(self, source: Tensor, into: Tensor) -> Callable[[], None]:
        number, self._fetches = self._fetches, self._fetches + 1
        self.events.append(f"fetch {number}")
        if into.is_floating_point():
            into.fill_(torch.nan)

        def wait() -> None:
            self.events.append(f"use {number}")
            into.copy_(source)

        return wait


def mlp() -> nn.ModuleList:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh()) for _ in range(LAYERS)]
    return nn.ModuleList(layers).double()


def gradients(layers: nn.ModuleList, link: FarLink | None, offloaded: int = LAYERS) -> list[Tensor]:
    activations = None if link is None else HostActivations(link, least_bytes=64)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).requires_grad_()
    hidden = x
    for number, layer in enumerate(layers):
        with nullcontext() if activations is None or number >= offloaded else activations.layer(layer):
            hidden = layer(hidden)
    (hidden.square().sum()).backward()
    found = [parameter.grad.clone() for parameter in layers.parameters()]
    layers.zero_grad()
    return [*found, x.grad]


@pytest.mark.parametrize("offloaded", [0, 1, LAYERS])
def test_the_gradients_are_the_same(offloaded: int) -> None:
    layers, link = mlp(), FarLink()
    expected = gradients(layers, None)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(layers, link, offloaded), strict=True))
    assert bool(link.sent) is bool(offloaded)


def test_the_layer_before_is_fetched_while_backward_is_in_one() -> None:
    layers, link = mlp(), FarLink()
    gradients(layers, link)
    each = link.events.count("out") // LAYERS
    assert link.events.count("out") == each * LAYERS and each >= 3
    backward = link.events[each * LAYERS :]
    first_use = next(place for place, event in enumerate(backward) if event.startswith("use"))
    assert backward[:first_use] == [f"fetch {number}" for number in range(2 * each)]  # its own, and the one before
    fetched: set[str] = set()
    for event in backward:
        what, number = event.split()
        if what == "fetch":
            assert number not in fetched, "fetched twice"
            fetched.add(number)
        else:
            assert number in fetched
    assert len(fetched) == each * LAYERS


def test_a_tensor_that_is_saved_twice_is_sent_once_and_weights_stay() -> None:
    link = FarLink()
    layers = mlp()
    gradients(layers, link)
    sizes = {parameter.numel() for parameter in layers.parameters()}
    assert 8 * 16 in sizes and 8 * 16 not in link.sent
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    activations, module = HostActivations(link, least_bytes=64), nn.Identity()
    link.sent.clear()
    with activations.layer(module):
        y = x.sin()
        z = (y * y).sum() + y.exp().sum()  # y is saved twice by the product
    assert link.sent.count(64) == 3  # x, y and exp(y)
    z.backward()
    assert torch.allclose(x.grad, (2 * x.sin() + x.sin().exp()) * x.cos(), rtol=1e-14)


def test_a_tensor_that_was_changed_in_place_is_sent_again() -> None:
    link = FarLink()
    x = torch.ones(64, dtype=torch.float64, requires_grad=True)
    with HostActivations(link, least_bytes=64).layer(nn.Identity()):
        y = x * 1.0
        unused = y.sin()  # saves y, and no backward asks for it
        y.add_(1.0)
        loss = y.square().sum()
    loss.backward()
    assert unused.shape == y.shape and torch.equal(x.grad, torch.full_like(x, 4.0))


def test_weights_that_are_gathered_within_the_layer_stay() -> None:
    """Ranks with sharded weights gather the whole ones before the layer computes."""
    link, layer = FarLink(), nn.Linear(8, 8, bias=False)

    def gather(module: nn.Module, _: Any) -> None:
        module.weight = nn.Parameter(module.weight.detach().clone())

    layer.register_forward_pre_hook(gather)
    x = torch.randn(4, 8, requires_grad=True)
    with HostActivations(link, least_bytes=64).layer(layer):
        layer(x).sum().backward()
    assert link.sent == [32]  # the input alone


def test_memory_that_is_being_filled_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward may free a buffer that it does not need without waiting for its copy."""
    with fake_cuda() as device:
        recorded: list[Tensor] = []
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
        link, on_device = HostLink(device), torch.empty(4, device=device)
        link.to_device(torch.empty(4), on_device)
        assert any(tensor is on_device for tensor in recorded)


def test_nothing_stays_on_the_device() -> None:
    """Holds after forward and after backward."""
    made: list[Any] = []

    class Watched(FarLink):
        def to_host(self, source: Tensor, into: Tensor) -> Callable[[], None]:
            made.append(weakref.ref(source.untyped_storage()))
            return super().to_host(source, into)

        def to_device(self, source: Tensor, into: Tensor) -> Callable[[], None]:
            made.append(weakref.ref(into))
            return super().to_device(source, into)

    layer = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh())
    activations = HostActivations(Watched(), least_bytes=64)
    x = torch.randn(64, requires_grad=True)
    with activations.layer(layer):
        y = layer(x)
    assert len(made) == 3
    loss = y.sum()
    del y
    gc.collect()
    loss.backward()
    gc.collect()
    assert len(made) == 6 and all(reference() is None for reference in made[3:])


CONFIG = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 8}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("selective", [False, True])
def test_a_gpt(monkeypatch: pytest.MonkeyPatch, layers: int, selective: bool) -> None:
    link = FarLink()

    def losses_and_gradients(offloaded: int) -> list[Tensor]:
        recompute = RecomputeConfig(cpu_offloading_num_layers=offloaded, recompute_activations=selective)
        with default_dtype(torch.float64):
            model = GPT(ModelConfig(**CONFIG), kernels=resolve("ref", "cpu"), vocab_size=32, recompute=recompute)
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.2, generator=generator)
        if offloaded:
            far = HostActivations
            monkeypatch.setattr(gpt_module, "host_link", lambda device: link)
            monkeypatch.setattr(gpt_module, "HostActivations", lambda link: far(link, least_bytes=64))
            monkeypatch.setattr(gpt_module, "_is_host", lambda device: False)
        tokens = torch.randint(32, (2, 8), generator=generator)
        torch.manual_seed(3)  # of dropout
        loss = model(tokens, labels=tokens.roll(-1)).mean()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    expected, found = losses_and_gradients(0), losses_and_gradients(layers)
    assert link.sent
    # What comes back is contiguous, so a product that is computed again may add up in another order.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
