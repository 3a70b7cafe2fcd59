"""The order of PyTorch's attention kernels, as far as it can be seen without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends  # type: ignore[attr-defined]

from megatron.ops import builtin, resolve, sdpa_order


def order() -> list[SDPBackend]:
    found: list[SDPBackend] = _cur_sdpa_kernel_backends(with_priority=True)
    return found


def test_cudnn_comes_first_on_cuda_and_the_order_is_put_back() -> None:
    before = order()
    with sdpa_order.preferred("cuda"):
        assert order()[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        assert set(order()) == set(sdpa_order.ORDER), "none is ruled out: what one cannot do, the next does"
    assert order() == before != list(sdpa_order.ORDER)


def test_flash_that_was_asked_for_comes_first() -> None:
    """And with `fused`, cuDNN: it is what NVIDIA's fused attention is."""
    chosen = {name: resolve("auto", "cuda", attention=name) for name in ("auto", "flash", "fused")}
    orders = {name: getattr(kernels.attention, "keywords", {}).get("order") for name, kernels in chosen.items()}
    assert orders == {"auto": None, "flash": sdpa_order.FLASH_FIRST, "fused": None}
    with sdpa_order.preferred("cuda", sdpa_order.FLASH_FIRST):
        assert order()[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        assert set(order()) == set(sdpa_order.ORDER)
    reasons = {name: {c.op: c.reason for c in kernels.choices}["attention"] for name, kernels in chosen.items()}
    assert "flash before cuDNN" in reasons["flash"] and "cuDNN before flash" in reasons["fused"]


def test_elsewhere_nothing_is_touched() -> None:
    before = order()
    with sdpa_order.preferred("cpu"):
        assert order() == before


def test_the_attention_runs_under_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of a CUDA tensor, made on a CPU."""
    seen: list[SDPBackend] = []
    call, preferred = F.scaled_dot_product_attention, sdpa_order.preferred

    def noted(*args: Any, **named: Any) -> torch.Tensor:
        seen.extend(order())
        return call(*args, **named)

    monkeypatch.setattr(builtin, "preferred", lambda device_type, order: preferred("cuda", order))
    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    x = torch.randn(1, 2, 5, 4)
    found = builtin.sdpa(x, x, x, mask=None, causal=True, scale=0.5)
    assert seen[0] == SDPBackend.CUDNN_ATTENTION
    torch.testing.assert_close(found, call(x, x, x, is_causal=True, scale=0.5))


def test_the_table_says_so() -> None:
    reason = {choice.op: choice.reason for choice in resolve("auto", "cuda").choices}["attention"]
    assert "cuDNN, then flash" in reason
