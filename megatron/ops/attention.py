"""Attention of queries to keys.

On a CPU, the kernel of csrc/ keeps the scores of only one block of queries and keys at a time, and recomputes them in
backward. The fallback uses torch's products over blocks (blocked_attention.py). On CUDA, PyTorch's own attention runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.ops.blocked_attention import blocked_attention
from megatron.ops.fused_qkv import Triple, whole
from megatron.ops.operation import (
    Implementation,
    Native,
    Operation,
    Target,
    broadcasts,
    described,
    register_shapes,
    unsupported_devices,
    unsupported_floats,
    without_derivative,
)
from megatron.ops.sdpa import explanation, order, sdpa
from megatron.ops.softmax import readable, softmax

_FEW = 16  # with fewer queries, rearranging the keys takes longer than it saves


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    layer_scaling: int = 1,
    softmax_op: Callable[[Tensor, Tensor | None, float, bool], Tensor] = softmax,
) -> Tensor:
    """query [batch, heads, queries, d], key and value [batch, groups, keys, d] -> [batch, heads, queries, d].

    A `mask` (true = visible) broadcasts to [batch, heads, queries, keys]. The scores are divided by `layer_scaling`
    before their rounding to the working dtype, and multiplied back in fp32, which widens the range of fp16.
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scores = (query * (scale / layer_scaling)) @ key.transpose(-1, -2)  # [batch, heads, queries, keys]
    probabilities = softmax_op(scores, mask, float(layer_scaling), causal)
    return torch.dropout(probabilities, dropout_p, dropout_p > 0.0) @ value


# ---------------------------------------------------------------- the kernels of csrc/


def register(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)
    if not hasattr(ops, "attention_forward"):  # CPU only
        return

    def forward_shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        batch, queries, heads = query.shape[:3]
        return query.new_empty(query.shape), query.new_empty(batch, heads, queries, dtype=torch.float32)

    register_shapes(
        namespace,
        attention_forward=forward_shapes,
        attention_backward=lambda grad, query, key, *_: query.new_empty(query.numel() + 2 * key.numel()),
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, mask, first_keys, ctx.diagonal, ctx.scale, ctx.dropout, seed = inputs
        ctx.save_for_backward(*tensors, *output, mask, first_keys, seed)

    def backward(ctx: Any, grad: Tensor, of_log_sum_exp: Tensor) -> tuple[Tensor | None, ...]:
        """Ignores the gradient of the log-sum-exp, because that output is only saved for this backward pass."""
        query, key, value, out, log_sum_exp, mask, first_keys, seed = ctx.saved_tensors
        thirds = whole((query, key, value)) is not None
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        options = (mask, first_keys, ctx.diagonal, ctx.scale, ctx.dropout, seed)
        grads = ops.attention_backward(grad, query, key, value, out, log_sum_exp, *options, thirds)
        return *_apart(grads, query, key, thirds), *(None,) * 6

    torch.library.register_autograd(f"{namespace}::attention_forward", backward, setup_context=save)
    without_derivative(namespace, "attention_backward")


def _apart(grads: Tensor, query: Tensor, key: Tensor, thirds: bool) -> Triple:
    """Returns the gradients of query, key and value as views of the kernel's result `grads`. There they are interleaved
    per head if `thirds`, else concatenated."""
    if thirds:
        of_query, of_key, of_value = grads.view(*query.shape[:3], 3, query.shape[3]).unbind(3)
        return of_query, of_key, of_value
    parts = grads.split((query.numel(), key.numel(), key.numel()))
    return parts[0].view(query.shape), parts[1].view(key.shape), parts[2].view(key.shape)


def native_attention(
    ops: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    layer_scaling: int = 1,  # not used: the scores stay in fp32
    first_keys: Tensor | None = None,  # int64 [batch or 1, queries]: first key that each query sees
) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    tensors = [t.transpose(1, 2) if t.stride(3) == 1 else t.transpose(1, 2).contiguous() for t in (query, key, value)]
    if mask is not None:
        mask = readable(mask, keys)
    # Drawn from torch's default generator, so that restoring the generator's state also restores this seed.
    seed = torch.randint(2**62, (1,)) if dropout_p > 0.0 else None
    diagonal = keys - queries if causal else keys
    out, _ = ops.attention_forward(*tensors, mask, first_keys, diagonal, scale, dropout_p, seed)
    return out.transpose(1, 2)  # [batch, heads, queries, d], in the layout that the next projection reads


def unsupported(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, **named: Any) -> str | None:
    if query.dim() != 4 or key.dim() != 4:
        return f"queries {described(query)}, keys {described(key)}: the kernel needs [batch, heads, positions, width]"
    if value.shape != key.shape or not query.dtype == key.dtype == value.dtype:
        given = f"queries {described(query)}, keys {described(key)}, values {described(value)}"
        return f"{given}: the kernel needs values in the shape of the keys, and one dtype"
    batch, heads, queries, width = query.shape
    if key.shape[::3] != (batch, width) or key.shape[1] == 0 or heads % key.shape[1]:
        given = f"keys {described(key)} for queries {described(query)}"
        return f"{given}: the kernel needs keys [batch, a divisor of heads, keys, width]"
    if 0 in key.shape[2:]:
        return f"keys {described(key)}: the kernel needs at least one key, of at least one channel"
    whole = (batch, heads, queries, key.shape[2])
    if mask is not None and (mask.dtype != torch.bool or not broadcasts(mask.shape, whole)):
        return f"a mask {described(mask)} for scores {whole}: the kernel needs a bool mask that broadcasts to them"
    return unsupported_floats(query, key, value) or unsupported_devices(query, mask)


def _few_queries(query: Tensor, key: Tensor, *args: Any, **named: Any) -> bool:
    return query.shape[2] < min(_FEW, key.shape[2])


# ---------------------------------------------------------------- the row


def _portable(target: Target) -> Implementation:
    if target.device_type == "cpu":
        reason = "products over blocks of queries; PyTorch's attention for long sequences and generation"
        return Implementation("cpu", blocked_attention, reason)
    if target.kind.cuda_libraries:
        function = partial(sdpa, backends=order())
        return Implementation("torch", function, f"PyTorch's scaled_dot_product_attention: {explanation()}")
    return Implementation("torch", sdpa, "PyTorch's own fused function")


def _required(target: Target) -> Implementation | None:
    reason = f"--attention-backend {target.attention}"
    if target.attention in ("unfused", "local"):
        return Implementation("ref", attention, reason)
    if target.attention not in ("flash", "fused"):
        return None
    reason = f"{reason}: PyTorch's scaled_dot_product_attention"
    if not target.kind.cuda_libraries:
        return Implementation("torch", sdpa, reason)
    flash_first = target.attention == "flash"
    function = partial(sdpa, backends=order(flash_first=flash_first))
    return Implementation("torch", function, f"{reason}: {explanation(flash_first=flash_first)}")


_NATIVE = Native(
    "attention",
    native_attention,
    unsupported,
    cpu_only=True,
    left_to_compiler=False,
    slower=_few_queries,
    note=lambda target: ", scores of one block at a time; PyTorch's attention for generation",
)
OPERATIONS = (Operation("attention", attention, _portable, _NATIVE, _required),)
