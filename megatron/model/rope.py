"""Rotary position embedding in Hugging Face's half-split convention, with its frequency scalings.

Frequencies and angles are fp32 in every model dtype, computed with the operations of transformers in the same order. An
exported model therefore rotates its heads by exactly the angles of training.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Returns frequencies [rotated channels / 2], fp32 on the CPU."""
    width = rotated_channels(config)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    frequencies = 1.0 / (config.rotary_base**exponents)
    scale = {"none": lambda f, _: f, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[config.rope_scaling]
    return scale(frequencies, config)


def rotated_channels(config: ModelConfig) -> int:
    return int(config.head_dim * config.rotary_percent) // 2 * 2


def attention_factor(config: ModelConfig) -> float:
    """Factor that cos and sin are multiplied by; not 1 only under YaRN."""
    if config.rope_scaling != "yarn":
        return 1.0
    if config.yarn_attention_factor is not None:
        return config.yarn_attention_factor
    return 1.0 if config.yarn_factor <= 1 else 0.1 * math.log(config.yarn_factor) + 1.0


def _linear(frequencies: Tensor, config: ModelConfig) -> Tensor:
    assert config.rotary_seq_len_interpolation_factor is not None
    return frequencies / config.rotary_seq_len_interpolation_factor


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Scales frequencies as Llama 3.x: divides low ones by the factor, keeps high ones, interpolates between."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    context = config.rope_original_max_position
    wavelength = 2 * math.pi / frequencies
    stretched = torch.where(wavelength > context / low, frequencies / config.rope_scaling_factor, frequencies)
    mix = (context / wavelength - low) / (high - low)
    mixed = (1 - mix) * stretched / config.rope_scaling_factor + mix * stretched
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return torch.where(between, mixed, stretched)


def _yarn(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Scales frequencies as YaRN: keeps high ones, divides low ones by the factor, and ramps linearly between."""
    width, base = rotated_channels(config), config.rotary_base
    context = config.yarn_original_max_position_embeddings

    def channel_with(rotations: float) -> float:
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(channel_with(config.yarn_beta_fast)), 0)
    high: float = min(math.ceil(channel_with(config.yarn_beta_slow)), width - 1)
    if low == high:
        high += 0.001  # avoids division by zero
    ramp = torch.clamp((torch.arange(width // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    kept = 1 - ramp
    periods = base ** (torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
    interpolated = 1.0 / (config.yarn_factor * periods)
    return interpolated * (1 - kept) + frequencies * kept


class RotaryEmbedding(nn.Module):
    """Maps positions to (cos, sin), once per forward pass for all layers."""

    inverse_frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.factor = attention_factor(config)
        device = torch.empty(0).device  # the device of a surrounding `with torch.device(...)`
        self.register_buffer("inverse_frequencies", inverse_frequencies(config).to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Recomputes the frequencies on the new device, because a cast or the meta device would corrupt them."""
        module = super()._apply(fn, recurse)
        self.inverse_frequencies = inverse_frequencies(self.config).to(self.inverse_frequencies.device)
        return module

    @torch.no_grad()
    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = position_ids.unsqueeze(-1).float() * self.inverse_frequencies  # [batch or 1, seq, rotated / 2]
        angles = angles.unsqueeze(2)  # [batch or 1, seq, 1, rotated / 2]: the same for all heads
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)

    def __repr__(self) -> str:
        kind: Any = self.config.rope_scaling
        return f"RotaryEmbedding(base={self.config.rotary_base}, scaling={kind})"
