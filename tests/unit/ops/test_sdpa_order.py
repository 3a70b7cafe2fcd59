"""Order of PyTorch's attention kernels, as far as it shows without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends  # type: ignore[attr-defined]

from megatron.ops import resolve, wgrad
from megatron.ops import sdpa as module
from tests.cluster.fake_device import fake_cuda

HOPPER, BLACKWELL = (9, 0), (10, 0)


def order() -> list[SDPBackend]:
    found: list[SDPBackend] = _cur_sdpa_kernel_backends(with_priority=True)
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Simulates a machine with the given version of cuDNN, capability of the GPU, and CUDA that torch was built for."""

    def be(version: int | None, capability: tuple[int, int], cuda: str | None = "12.9") -> None:
        module.trusts_cudnn.cache_clear()
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(wgrad, "widens", lambda device_type: False)  # would try it out there

    yield be
    module.trusts_cudnn.cache_clear()


def test_cudnn_comes_first_on_hopper_and_the_order_is_put_back(machine: Any) -> None:
    machine(92000, HOPPER)
    before = order()
    with module.preferred(module.order()):
        assert order()[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        assert set(order()) == set(module.CUDNN_FIRST), "none is ruled out: what one cannot do, the next does"
    assert order() == before != list(module.CUDNN_FIRST)


@pytest.mark.parametrize(
    "found",
    [
        (91002, HOPPER),
        (91500, HOPPER),
        (92000, BLACKWELL),
        (92000, (8, 0)),
        (None, HOPPER),
        (92000, HOPPER, "12.8"),
        (92000, HOPPER, None),
    ],
)
def test_a_cudnn_that_is_known_to_be_wrong_is_left_out(machine: Any, found: tuple[Any, ...]) -> None:
    machine(*found)
    for flash_first in (False, True):
        with module.preferred(module.order(flash_first=flash_first)):
            assert order()[0] == SDPBackend.FLASH_ATTENTION and SDPBackend.CUDNN_ATTENTION not in order()
    reason = {choice.op: choice.reason for choice in resolve("auto", "cuda").choices}["attention"]
    assert "flash before efficient (this cuDNN's attention is not known to be correct on this GPU)" in reason


def test_flash_that_was_asked_for_comes_first(machine: Any) -> None:
    """cuDNN comes first with `fused`, because it is NVIDIA's fused attention."""
    machine(91501, HOPPER)
    seen, reasons = {}, {}
    for name in ("auto", "flash", "fused"):
        kernels = resolve("auto", "cuda", attention=name)
        seen[name] = first_of_a_call(kernels.attention)
        reasons[name] = {choice.op: choice.reason for choice in kernels.choices}["attention"]
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    assert seen == {"auto": cudnn, "flash": flash, "fused": cudnn}
    assert "flash before cudnn" in reasons["flash"]
    assert all("cudnn before flash" in reasons[name] for name in ("auto", "fused"))


def test_cudnn_gets_no_call_with_a_mask(machine: Any) -> None:
    """cuDNN's gradients are NaN with some masks (pytorch #196678)."""
    machine(92000, HOPPER, "13.0")
    attention = resolve("auto", "cuda").attention
    assert first_of_a_call(attention) == SDPBackend.CUDNN_ATTENTION
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    assert first_of_a_call(attention, mask) == SDPBackend.FLASH_ATTENTION


def first_of_a_call(attention: Any, mask: Tensor | None = None) -> SDPBackend:
    """First kernel in the order of a CUDA tensor's call, made on a CPU. `mask`: causal, or None for a call without."""
    seen: list[SDPBackend] = []
    call = F.scaled_dot_product_attention

    def noted(*args: Any, **named: Any) -> torch.Tensor:
        seen.extend(order())
        return call(*args, **named)

    x = torch.randn(1, 2, 5, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", noted)
        found = attention(x, x, x, mask=mask, causal=mask is None, scale=0.5)
    torch.testing.assert_close(found, call(x, x, x, is_causal=True, scale=0.5))
    return seen[0]


def test_a_compiled_layer_takes_the_same_kernel() -> None:
    """The compiler reads the order while tracing, without a graph break; on a Hopper it would otherwise use cuDNN."""
    priorities: list[tuple[list[str], bool]] = []

    def look(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if node.target is torch.nn.attention._sdpa_kernel:  # type: ignore[attr-defined]
                backends, first_is_first = node.args
                priorities.append(([backend.args[0] for backend in backends], first_is_first))
        return graph.forward

    attention = partial(module.sdpa, mask=None, causal=True, scale=0.5, backends=module.FLASH_FIRST)
    x = torch.randn(1, 2, 5, 4)
    compiled = torch.compile(lambda q: attention(q, q, q) * 2, backend=look, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(x), attention(x, x, x) * 2)
    (inside, by_priority), (after, _) = priorities
    assert by_priority and inside == [backend.name for backend in module.FLASH_FIRST] != after


def test_elsewhere_nothing_is_touched() -> None:
    before = order()
    with module.preferred(()):
        assert order() == before
    named = resolve("auto", "cpu", attention="flash").attention
    assert named is module.sdpa, "on a CPU PyTorch has an order of its own"


KEYS_OF = {
    "halves without a mask": (torch.bfloat16, False, 2),
    "a mask": (torch.bfloat16, True, 8),
    "fp32": (torch.float32, False, 8),
}


@pytest.mark.parametrize(("dtype", "masked", "heads"), KEYS_OF.values(), ids=KEYS_OF)
def test_shared_keys_go_only_to_kernels_that_take_them(dtype: torch.dtype, masked: bool, heads: int) -> None:
    """Flash takes them. Where it cannot run, the fallback would be the plain formula, with all scores in memory."""
    with fake_cuda() as device, pytest.MonkeyPatch.context() as patch:
        query = torch.empty(2, 8, 32, 16, dtype=dtype, device=device)
        key = torch.empty(2, 2, 32, 16, dtype=dtype, device=device)
        mask = torch.ones(32, 32, dtype=torch.bool, device=device) if masked else None
        asked: list[tuple[int, int, bool]] = []

        def noted(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
            asked.append((key.shape[1], value.shape[1], named["enable_gqa"]))
            return query

        patch.setattr(F, "scaled_dot_product_attention", noted)
        module.sdpa(query, key, key, mask=mask, causal=True, scale=0.25)
    assert asked == [(heads, heads, heads != 8)]
