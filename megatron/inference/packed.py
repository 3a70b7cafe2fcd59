"""Packs weights for generation on a CPU into the layout that is fastest for products of a few rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.model import GPT
from megatron.model.linear import Linear
from megatron.model.loss import HeadAndLoss
from megatron.ops.few_rows import FewRows
from megatron.ops.operation import DTYPES
from megatron.ops.packed import PackedWeight, packs
from megatron.tensor_parallel import VocabParallelHead
from megatron.utils.cpu import available_memory, fp32_products_unmarked

_LARGE = 1 << 16
"""Elements of the smallest weight whose products gain more than the calls cost."""


class _Packs(Protocol):
    packed: PackedWeight | None


@contextmanager
def packed_weights(model: GPT, log: Callable[[str], object] = lambda text: None) -> Iterator[None]:
    """Makes passes without gradients read packed copies of the weights, which must not change within the context."""
    weights, few_rows, copied = list(_weights(model)), _few_rows(model), _can_be_packed(model)
    size, free = sum(weight.nbytes for _, weight in weights), available_memory()
    if copied and free is not None and 2 * size > free:
        log(f"generation: {free >> 20} MiB are free, not enough for packed copies of the weights ({size >> 20} MiB)")
        copied = False
    try:
        for module, weight in weights if copied or few_rows is not None else ():
            module.packed = PackedWeight(weight, few_rows, copied=copied)
        with fp32_products_unmarked() if copied else nullcontext():
            yield
    finally:
        for module, _ in weights:
            module.packed = None


def _few_rows(model: GPT) -> FewRows | None:
    """Returns the kernel for products of a few rows, or None if it does not support this model's device or dtype."""
    some, kernels = next(model.parameters()), model.make.kernels
    takes = some.device.type == "cpu" and some.dtype in DTYPES and kernels.backend("few_rows") == "native"
    return kernels.few_rows if takes else None


def _can_be_packed(model: GPT) -> bool:
    some = next(model.parameters())
    return some.device.type == "cpu" and some.dtype in (torch.float32, torch.bfloat16) and packs(some.dtype)


def _weights(model: GPT) -> Iterator[tuple[_Packs, Tensor]]:
    """Yields the weights of dense layers and of the head. Grouped products of experts take no packed weights."""
    experts = {id(inner) for layer in model.layers.values() for inner in _experts(layer)}
    for module in model.modules():
        if isinstance(module, Linear) and id(module) not in experts and module.weight.numel() >= _LARGE:
            yield module, module.weight
    head = model.head_and_loss
    if isinstance(head, VocabParallelHead):
        yield head, model.head_weight
    elif isinstance(head, HeadAndLoss):
        yield head, model.head_weight[: head.vocab_size]


def _experts(layer: nn.Module) -> Iterator[nn.Module]:
    for name, module in layer.named_modules():
        if name.endswith("experts"):
            yield from module.modules()
