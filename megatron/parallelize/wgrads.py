"""Which layers send their weight gradients as products to whoever adds them up."""

from __future__ import annotations

from collections import Counter

from torch import nn

from megatron.model.linear import Linear
from megatron.ops.wgrad import Wgrads
from megatron.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def send_weight_gradients(model: nn.Module, wgrads: Wgrads) -> None:
    """Every linear layer of ours whose weight is nobody else's: of a weight that is used twice, one gradient would come
    as a product and the other through backward, and neither alone is all of it."""
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for module in model.modules():
        if isinstance(module, Linear | ColumnParallelLinear | RowParallelLinear) and uses[id(module.weight)] == 1:
            module.wgrads = wgrads
