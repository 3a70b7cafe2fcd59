"""The feed-forward half of a layer."""

from torch import Tensor, nn

from megatron.model.factory import ModuleFactory
from megatron.model.parameters import DOWN, UP


class MLP(nn.Module):
    def __init__(self, make: ModuleFactory, name: str, width: int) -> None:
        """`name`: the module's name in the whole model. `width`: the width of the whole layer."""
        super().__init__()
        config = make.config
        inner = width * (2 if config.gated else 1)  # gated: the rows are [gate; up]
        self.dense_h_to_4h = make.linear(f"{name}.{UP}", config.hidden_size, inner, bias=config.linear_bias)
        self.dense_4h_to_h = make.linear(f"{name}.{DOWN}", width, config.hidden_size, bias=config.linear_bias)
        self.activation, self.kernels = config.activation, make.kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activate(self.dense_h_to_4h(x)))  # [batch, seq, hidden]

    def activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return self.kernels.swiglu(x)  # [batch, seq, 2 * ffn] -> [batch, seq, ffn]
        if self.activation == "squared_relu":
            return self.kernels.squared_relu(x)
        return self.kernels.gelu(x, self.activation == "gelu_tanh")
