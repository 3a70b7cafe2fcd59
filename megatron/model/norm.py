"""LayerNorm and RMSNorm, over the hidden width or over one head."""

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.ops import Kernels


class Norm(nn.Module):
    """Norm whose result has the weight's dtype, so that an fp32 residual stream feeds half-precision layers."""

    def __init__(self, width: int, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.eps = config.norm_epsilon
        self.one_plus = config.apply_layernorm_1p  # the weight is stored as gamma - 1
        self.weight = nn.Parameter(torch.empty(width))
        self.is_rms = config.normalization == "RMSNorm"
        self.bias = nn.Parameter(torch.empty(width)) if config.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if x.dtype != dtype:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if self.one_plus:
            weight = weight + 1
        if self.is_rms:
            return self.kernels.rms_norm(x, weight, self.eps).to(dtype)
        return self.kernels.layer_norm(x, weight, bias, self.eps).to(dtype)  # [..., width]

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (norm of the sum, x + residual), in one pass over memory if all dtypes are equal."""
        watched = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        if watched or not x.dtype == residual.dtype == self.weight.dtype:
            total = residual + x
            return self(total), total
        weight = self.weight + 1 if self.one_plus else self.weight
        if self.is_rms:
            return self.kernels.add_rms_norm(x, residual, weight, self.eps)
        return self.kernels.add_layer_norm(x, residual, weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{'RMSNorm' if self.is_rms else 'LayerNorm'}, {self.weight.shape[0]}, eps={self.eps}"
