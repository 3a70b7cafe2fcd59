"""Tokens per second, and what part of the machine that is. The formula is that of megatron.model.flops."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    tokens_per_second: float
    samples_per_second: float
    tflops_per_device: float | None
    utilisation: float | None


@dataclass(frozen=True, kw_only=True)
class Throughput:
    seq_length: int
    world_size: int
    flops_per_token: float | None  # None for a model that is not ours: we do not guess
    peak_flops: float | None  # of one device; None where it is not known, and then there is no MFU

    def rates(self, samples: int, seconds: float) -> Rates:
        tokens_per_second = samples * self.seq_length / seconds
        per_device = None
        if self.flops_per_token is not None:
            per_device = tokens_per_second * self.flops_per_token / self.world_size
        utilisation = per_device / self.peak_flops if per_device is not None and self.peak_flops else None
        return Rates(
            tokens_per_second, samples / seconds, None if per_device is None else per_device / 1e12, utilisation
        )
