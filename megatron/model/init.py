"""Initial values, drawn by (seed, parameter name) over the logical shape: every layout starts as the same model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig

# Their output is added to the residual stream 2 x layers times.
_OUTPUT_PROJECTIONS = ("self_attention.dense.weight", "dense_4h_to_h.weight")


def generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def draw(name: str, logical_shape: Sequence[int], std: float, seed: int) -> Tensor:
    """Normal values with standard deviation `std`, fp32 on the CPU."""
    values = torch.empty(tuple(logical_shape), dtype=torch.float32, device="cpu")
    return values.normal_(0.0, 1.0, generator=generator(name, seed)).mul_(std)


def initial_std(name: str, config: ModelConfig) -> float:
    if name.endswith(_OUTPUT_PROJECTIONS):
        return config.init_method_std / math.sqrt(2.0 * config.num_layers)
    return config.init_method_std


def initial_value(name: str, logical_shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """The whole parameter `name`, in fp32 on the CPU."""
    shape = tuple(logical_shape)
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    if name.endswith("layernorm.weight"):
        return torch.full(shape, 0.0 if config.apply_layernorm_1p else 1.0, dtype=torch.float32, device="cpu")
    if config.init_method_xavier_uniform:
        return _xavier_uniform(name, shape, seed)
    return draw(name, shape, initial_std(name, config), seed)


def _xavier_uniform(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Bound sqrt(6 / (fan in + fan out)) of the stored matrix."""
    fan_out, fan_in = stored_shape(name, shape)
    bound = math.sqrt(6.0 / (fan_in + fan_out))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return values.uniform_(-bound, bound, generator=generator(name, seed))


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that this logical view is stored as."""
    if name.endswith("self_attention.dense.weight"):  # (hidden, heads, head_dim): the columns are split
        return shape[0], math.prod(shape[1:])
    return math.prod(shape[:-1]), shape[-1]


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int, vocab_size: int) -> None:
    """Set every parameter of an unsplit GPT. Padded vocabulary rows are zero: they have no meaning."""
    for name, parameter in model.named_parameters():
        parameter.zero_()
        rows = vocab_size if name in ("embedding.word_embeddings.weight", "output_layer.weight") else len(parameter)
        shape = (rows, *parameter.shape[1:])
        parameter[:rows].copy_(initial_value(name, shape, config, seed))
