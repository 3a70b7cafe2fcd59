"""LayerNorm and RMSNorm, also fused with a residual sum."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops import apex
from megatron.ops.operation import (
    Function,
    Native,
    Operation,
    Portable,
    described,
    register_shapes,
    unsupported_floats,
    without_derivative,
)
from megatron.utils.dtype import widened


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = widened(x)  # [..., hidden]
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    scaled = normed * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = widened(x)  # [..., hidden]
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).to(x.dtype)  # rounded before the gain, as transformers does


def of_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function (x, residual, *parameters) -> (norm(x + residual, *parameters), x + residual)."""

    def add_norm(x: Tensor, residual: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, *parameters), total

    return add_norm


# ---------------------------------------------------------------- PyTorch's own functions


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps).to(x.dtype)


def apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    norm = apex.fused_layer_norm if apex.takes(x, weight, bias) else torch_layer_norm
    return norm(x, weight, bias, eps)


def apex_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (apex.fused_rms_norm if apex.takes(x, weight) else torch_rms_norm)(x, weight, eps)


# ---------------------------------------------------------------- the kernels of csrc/
# Statistics and the gradients of weight and bias are summed in fp32, the gradients in a fixed order.


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)

    def statistics(x: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
        rows = x.numel() // x.shape[-1] if x.shape[-1] > 0 else 0
        wide = x.new_empty((rows,), dtype=torch.float32)
        return (torch.empty_like(wide) if centred else wide.new_empty((0,))), wide

    def gradient_shapes(
        grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, with_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weight), weight.new_empty((weight.shape[0] if with_bias else 0,))

    register_shapes(
        namespace,
        norm_forward=lambda x, weight, bias, eps, centred: (torch.empty_like(x), *statistics(x, centred)),
        add_norm_forward=lambda x, residual, weight, bias, eps, centred: (
            torch.empty_like(x),
            torch.empty_like(x),
            *statistics(x, centred),
        ),
        norm_backward=gradient_shapes,
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, weight, bias, _, _ = inputs  # tensors: x, and perhaps a residual
        *total, mean, rstd = output[1:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.save_for_backward(total[0] if total else tensors[0], weight, mean, rstd)
        ctx.with_bias = bias is not None

    def gradients(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Any, Any, Any]:
        x, weight, mean, rstd = ctx.saved_tensors
        if grad is None:  # only the sum was used
            return grad_sum, None, None
        beside = None if grad_sum is None else grad_sum.contiguous()
        grad_x, grad_weight, grad_bias = ops.norm_backward(
            grad.contiguous(), beside, x, weight, mean, rstd, ctx.with_bias
        )
        return grad_x, grad_weight, grad_bias if ctx.with_bias else None

    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
        return *gradients(ctx, grad, None), None, None

    def backward_sum(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: None) -> tuple[Any, ...]:
        grad_x, *others = gradients(ctx, grad, grad_sum)
        return grad_x, grad_x, *others, None, None

    torch.library.register_autograd(f"{namespace}::norm_forward", backward, setup_context=save)
    torch.library.register_autograd(f"{namespace}::add_norm_forward", backward_sum, setup_context=save)
    without_derivative(namespace, "norm_backward")


def _parameters(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Converts parameters to fp32 or the dtype of x, as the kernels require."""
    weight = (weight if weight.dtype in (x.dtype, torch.float32) else weight.float()).contiguous()
    return weight, None if bias is None else bias.to(weight.dtype).contiguous()


def _native_layer_norm(ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return ops.norm_forward(x.contiguous(), *_parameters(x, weight, bias), eps, True)[0]


def _native_rms_norm(ops: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.norm_forward(x.contiguous(), *_parameters(x, weight, None), eps, False)[0]


def _native_add_layer_norm(
    ops: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    parameters = _parameters(x, weight, bias)
    return ops.add_norm_forward(x.contiguous(), residual.contiguous(), *parameters, eps, True)[:2]


def _native_add_rms_norm(ops: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    parameters = _parameters(x, weight, None)
    return ops.add_norm_forward(x.contiguous(), residual.contiguous(), *parameters, eps, False)[:2]


def _unsupported_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> str | None:
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and (x.dim() == 0 or parameter.shape != x.shape[-1:]):
            return f"x {described(x)} and a {name} {described(parameter)}: the kernel needs one number per column of x"
    return unsupported_floats(x, weight, bias)


def _unsupported_rms_norm(x: Tensor, weight: Tensor, eps: float) -> str | None:
    return _unsupported_layer_norm(x, weight, None, eps)


def _unsupported_sum(x: Tensor, residual: Tensor, weight: Tensor, *bias_and_eps: Any) -> str | None:
    if x.dtype != residual.dtype or x.shape != residual.shape:
        return f"x {described(x)} and a residual {described(residual)}: the kernel needs the same dtype and shape"
    bias = bias_and_eps[0] if len(bias_and_eps) > 1 else None
    return unsupported_floats(residual, x) or _unsupported_layer_norm(x, weight, bias, bias_and_eps[-1])


def _operation(name: str, formula: Function, portable: Portable, native: Function, unsupported: Function) -> Operation:
    return Operation(name, formula, portable, Native("norm", native, unsupported))


_LAYER_NORM = apex.or_apex(torch_layer_norm, apex_layer_norm)
_RMS_NORM = apex.or_apex(torch_rms_norm, apex_rms_norm)
_ADD_LAYER_NORM = apex.or_apex(of_sum(torch_layer_norm), of_sum(apex_layer_norm))
_ADD_RMS_NORM = apex.or_apex(of_sum(torch_rms_norm), of_sum(apex_rms_norm))

OPERATIONS = (
    _operation("layer_norm", layer_norm, _LAYER_NORM, _native_layer_norm, _unsupported_layer_norm),
    _operation("rms_norm", rms_norm, _RMS_NORM, _native_rms_norm, _unsupported_rms_norm),
    _operation("add_layer_norm", of_sum(layer_norm), _ADD_LAYER_NORM, _native_add_layer_norm, _unsupported_sum),
    _operation("add_rms_norm", of_sum(rms_norm), _ADD_RMS_NORM, _native_add_rms_norm, _unsupported_sum),
)
