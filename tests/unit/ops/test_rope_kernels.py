"""Property of the rotary embedding that the table of proofs lacks: views are read in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, ones
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.errors import ConfigError
from megatron.ops.rope import rope as formula
from tests.helpers.declared import Refused
from tests.helpers.kernels import backend, kernel, strict

REFUSED: Refused = {
    "rope": [
        ((ones(2, 5, 3, 8), ones(1, 4, 1, 4), ones(1, 4, 1, 4)), "x float32 (2, 5, 3, 8) with angles float32 (1, 4,"),
        ((ones(2, 5, 3, 8), ones(1, 5, 1, 5), ones(1, 5, 1, 5)), "with [batch or 1, seq, 1, at most head_dim / 2]"),
        ((ones(5, 3, 8), ones(5, 1, 4), ones(5, 1, 4)), "[batch, seq, heads, head_dim] with"),
    ],
}


def angles(seq: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 7, seq * half).view(1, seq, 1, half)
    return angle.cos(), angle.sin()


class Names(TorchDispatchMode):
    """Names of all operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["cpu", "emulated"])
def test_positions_further_apart_than_32_bits_reach(name: str) -> None:
    far = torch.empty(2**31 + 64, dtype=torch.bfloat16).as_strided((2, 1, 2, 8), (2**31 + 16, 16, 8, 1))
    near = torch.randn(2, 1, 2, 8).bfloat16()
    far.copy_(near)  # of 4 GB a few pages are ever there
    rope = kernel("rope", backend(name).ops)
    assert torch.equal(rope(far, *angles(1, 4)), rope(near, *angles(1, 4)))


def test_a_view_of_a_fused_projection_is_not_copied() -> None:
    fused = torch.randn(2, 5, 4, 6, 16)  # [batch, seq, groups, per_group + 2, head_dim]
    key, rope, (cos, sin) = fused[:, :, :, 4], kernel("rope", backend("cpu").ops), angles(5, 8)
    with Names() as names:
        turned = rope(key, cos, sin)
    assert names.seen == ["megatron_native::rope"]
    torch.testing.assert_close(turned, formula(key, cos, sin))


def test_turning_back_is_the_inverse() -> None:
    x, (cos, sin) = torch.randn(2, 5, 3, 16), angles(5, 8)
    ops = backend("cpu").ops
    torch.testing.assert_close(ops.rope(ops.rope(x, cos, sin, False), cos, sin, True), x)


def test_angles_with_a_gradient_are_refused_by_name() -> None:
    call = strict("rope", backend("cpu").ops)
    cos, sin = angles(5, 8)
    with pytest.raises(ConfigError, match=r"rope does not support angles .* that require a gradient"):
        call(torch.ones(2, 5, 3, 16), cos.requires_grad_(), sin)


@pytest.mark.parametrize(("seq", "half"), [(4, 8), (5, 9)])
def test_the_binding_checks_the_angles(seq: int, half: int) -> None:
    with pytest.raises(RuntimeError, match="cos does not fit x"):
        backend("cpu").ops.rope(torch.ones(2, 5, 3, 16), *angles(seq, half), False)
