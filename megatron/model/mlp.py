"""The feed-forward half of a layer."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.linear import Linear
from megatron.ops import Kernels


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, kernels: Kernels, width: int | None = None) -> None:
        """`width`: that of --ffn-hidden-size if unset."""
        super().__init__()
        width = config.ffn_size if width is None else width
        inner = width * (2 if config.gated else 1)  # gated: the rows are [gate; up]
        self.dense_h_to_4h = Linear(config.hidden_size, inner, bias=config.linear_bias)
        self.dense_4h_to_h = Linear(width, config.hidden_size, bias=config.linear_bias)
        self.activation = config.activation
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activate(self.dense_h_to_4h(x)))  # [batch, seq, hidden]

    def activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return self.kernels.swiglu(x)  # [batch, seq, 2 * ffn] -> [batch, seq, ffn]
        if self.activation == "squared_relu":
            return self.kernels.squared_relu(x)
        return self.kernels.gelu(x, self.activation == "gelu_tanh")
