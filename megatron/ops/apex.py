"""Optional use of NVIDIA's apex: if installed, its functions run where the kernels of csrc/ do not.

On PyPI `apex` is another package, so NVIDIA's is recognised by its compiled modules.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from megatron.ops.operation import Function, Implementation, Portable, Target, torch_function

_COMPILED = ("amp_C", "fused_layer_norm_cuda")


def has_apex(target: Target) -> bool:
    return target.kind.cuda_libraries and all(find_spec(name) is not None for name in _COMPILED)


def or_apex(fused: Function, apex: Function) -> Portable:
    """Selects apex's function if apex is installed, else PyTorch's own."""
    without = torch_function(fused)
    return lambda target: (
        Implementation("apex", apex, "NVIDIA's apex is installed") if has_apex(target) else without(target)
    )


def takes(x: Tensor, *parameters: Tensor | None) -> bool:
    """True if apex's norms accept these tensors: no parameter is missing, and all have the dtype of `x`."""
    return all(parameter is not None and parameter.dtype == x.dtype for parameter in parameters)


def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _normalization().fused_layer_norm_affine(x, weight, bias, tuple(weight.shape), eps)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalization().fused_rms_norm_affine(x, weight, tuple(weight.shape), eps)


def multi_tensor_adam(*arguments: Any) -> None:
    """Runs apex's Adam over lists of fp32 tensors. Learning rate, step and the skip flag are device tensors."""
    import_module("amp_C").multi_tensor_adam_capturable(*arguments)


def _normalization() -> Any:
    return import_module("apex.normalization.fused_layer_norm")
