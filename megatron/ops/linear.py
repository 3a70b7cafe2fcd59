"""Product x @ weight.T + bias without a derivative, for layers with their own backward.

On a CPU in bf16, torch's linear first writes the bias into every row of the result and then adds the product. oneDNN
can add the bias itself, with the same bits, through an operation of torch's compiler.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.utils.half_products import multiplied_in_fp32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x @ weight.T + bias: x [..., in_features], weight [out_features, in_features] -> [..., out_features]."""
    halves = x.dtype == weight.dtype == torch.bfloat16 and bias is not None and bias.dtype == torch.bfloat16
    onednn = halves and x.device.type == "cpu" and not multiplied_in_fp32(torch.bfloat16)
    if onednn and x.numel() > 0 and adds_bias():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


@cache
def adds_bias() -> bool:
    """True if the oneDNN operation exists for bf16 in this torch on this processor and gives the bits of F.linear."""
    x, weight, bias = (torch.arange(n, dtype=torch.float32).sin().bfloat16() for n in (5 * 32, 48 * 32, 48))
    x, weight = x.view(5, 32), weight.view(48, 32)
    try:
        got = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):  # not built, another signature, or no bf16 on this processor
        return False
    return torch.equal(got, F.linear(x, weight, bias))
