"""Dtypes: torch's default within a block, casts, and checks of values."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor, nn

from megatron.errors import ConfigError

HALF = (torch.bfloat16, torch.float16)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes in which weights are saved and exported."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets torch's default dtype in the block, which is the dtype of parameters that are made there."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def widened(x: Tensor) -> Tensor:
    """Converts half precision to fp32; returns other dtypes unchanged."""
    return x.float() if x.dtype in HALF else x


def resolved(x: Tensor) -> Tensor:
    """Returns the tensor with its true values in memory: torch only marks some tensors as conjugate or negative
    (`x.conj()`, `x.conj().imag`)."""
    return x.resolve_conj().resolve_neg()


def is_finite(x: Tensor) -> bool:
    """True if all values are finite. One pass, four times as fast as `isfinite(x).all()`: if there is a NaN, both the
    least and the greatest value are NaN."""
    if x.is_complex():
        x = torch.view_as_real(resolved(x))
    if not x.is_floating_point() or x.numel() == 0:
        return True
    comparable = x.float() if x.element_size() == 1 else x  # float8 has no order in torch
    return all(isfinite(bound.item()) for bound in torch.aminmax(comparable.flatten()))


def cast_floats(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts the real floating-point tensors of a module in place, as `module.half()` does. (`module.to(dtype)` drops
    the imaginary part of complex ones.)"""
    return module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def refuse_complex(model: nn.Module, where: str) -> None:
    """Raises a ConfigError that names the first complex parameter that is trained."""
    complexes = [name for name, one in model.named_parameters() if one.is_complex() and one.requires_grad]
    if complexes:
        raise ConfigError(
            f"{where}: {complexes[0]} is complex, but only real gradients are supported; make it a real "
            "parameter with a last dimension of 2, and torch.view_as_complex in the forward pass"
        )
