"""A linear layer's product with its bias has the same bits as torch's, whichever operation adds the bias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.ops import linear as module
from megatron.ops.linear import adds_bias, linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 33, 5), (1, 1, 1), (64, 384, 1152), (0, 8, 4)])
def test_equals_torchs_own(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, inputs), (outputs, inputs), (outputs,)))
    for given in (bias, None):
        assert torch.equal(linear(x, weight, given), F.linear(x, weight, given))


def test_more_dimensions_and_other_strides() -> None:
    x, weight, bias = torch.randn(3, 6, 4).bfloat16(), torch.randn(5, 6).bfloat16(), torch.randn(5).bfloat16()
    x = x.transpose(1, 2)
    exact = F.linear(x.double(), weight.double(), bias.double())
    # Torch's own, which runs where the processor lacks the operation, rounds the product before it adds the bias.
    product = F.linear(x.double(), weight.double()).abs().max().item()
    rounding = 1e-6 if adds_bias() else product * 2.0**-8
    torch.testing.assert_close(linear(x, weight, bias).double(), exact, rtol=8e-3, atol=rounding)


def test_a_bias_in_another_type_is_torchs_business() -> None:
    x, weight = torch.randn(2, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    with pytest.raises(RuntimeError):
        linear(x, weight, torch.randn(3))


def test_without_the_operation_torchs_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(2, 4).bfloat16(), torch.randn(3, 4).bfloat16(), torch.randn(3).bfloat16()
    monkeypatch.setattr(module, "adds_bias", lambda: False)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


def test_an_operation_that_gives_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = type("ops", (), {"_linear_pointwise": staticmethod(lambda x, w, b, *_: F.linear(x, w) + 2 * b)})
    monkeypatch.setattr(torch.ops, "mkldnn", wrong)
    assert not adds_bias.__wrapped__()
    monkeypatch.setattr(torch.ops, "mkldnn", type("ops", (), {}))
    assert not adds_bias.__wrapped__()
