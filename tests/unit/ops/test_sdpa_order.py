"""The order of PyTorch's attention kernels, as far as it can be seen without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends  # type: ignore[attr-defined]

from megatron.ops import builtin, resolve, sdpa_order

HOPPER, BLACKWELL = (9, 0), (10, 0)


def order() -> list[SDPBackend]:
    found: list[SDPBackend] = _cur_sdpa_kernel_backends(with_priority=True)
    return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call it with a cuDNN version and a GPU's capability to be on such a machine."""

    def be(version: int | None, capability: tuple[int, int]) -> None:
        sdpa_order.trusts_cudnn.cache_clear()
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    yield be
    sdpa_order.trusts_cudnn.cache_clear()


def test_cudnn_comes_first_on_hopper_and_the_order_is_put_back(machine: Any) -> None:
    machine(92000, HOPPER)
    before = order()
    with sdpa_order.preferred("cuda"):
        assert order()[:2] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        assert set(order()) == set(sdpa_order.CUDNN_FIRST), "none is ruled out: what one cannot do, the next does"
    assert order() == before != list(sdpa_order.CUDNN_FIRST)


@pytest.mark.parametrize(
    ("version", "capability"), [(91002, HOPPER), (91500, HOPPER), (92000, BLACKWELL), (92000, (8, 0)), (None, HOPPER)]
)
def test_a_cudnn_that_is_known_to_be_wrong_is_left_out(
    machine: Any, version: int | None, capability: tuple[int, int]
) -> None:
    machine(version, capability)
    for flash_first in (False, True):
        with sdpa_order.preferred("cuda", flash_first=flash_first):
            assert order()[0] == SDPBackend.FLASH_ATTENTION and SDPBackend.CUDNN_ATTENTION not in order()
    reason = {choice.op: choice.reason for choice in resolve("auto", "cuda").choices}["attention"]
    assert "flash before efficient (this cuDNN is not trusted on this GPU)" in reason


def test_flash_that_was_asked_for_comes_first(machine: Any) -> None:
    """And with `fused`, cuDNN: it is what NVIDIA's fused attention is."""
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


def first_of_a_call(attention: Any) -> SDPBackend:
    """What is tried first in the call of a CUDA tensor, made on a CPU."""
    seen: list[SDPBackend] = []
    call, preferred = F.scaled_dot_product_attention, sdpa_order.preferred

    def noted(*args: Any, **named: Any) -> torch.Tensor:
        seen.extend(order())
        return call(*args, **named)

    x = torch.randn(1, 2, 5, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin, "preferred", lambda device_type, **named: preferred("cuda", **named))
        patch.setattr(F, "scaled_dot_product_attention", noted)
        found = attention(x, x, x, mask=None, causal=True, scale=0.5)
    torch.testing.assert_close(found, call(x, x, x, is_causal=True, scale=0.5))
    return seen[0]


def test_elsewhere_nothing_is_touched() -> None:
    before = order()
    with sdpa_order.preferred("cpu"):
        assert order() == before
