"""Small checkpoints in the formats of both generations of Megatron-LM, kept in tests/golden/megatron_lm. They show a
reader that changes together with these writers.

    python -m tests.helpers.golden_megatron     # writes them anew
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.model.parameters import parameters
from tests.helpers.megatron_lm import Layout, Model, with_moments
from tests.helpers.megatron_lm import write as write_classic
from tests.helpers.torch_dist import write as write_torch_dist
from tests.unit.interop.megatron_lm.test_step import LLAMA

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron_lm"
ROWS, SHAPE = 61, {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
CONFIG = ModelConfig(**SHAPE, **LLAMA)


def weight(number: int, shape: tuple[int, ...]) -> Tensor:
    """Fills a weight; every element of the model has its own value."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + 4096 * number).view(shape) / 65536


def weights() -> dict[str, Tensor]:
    return {n: weight(i, p.stored_shape) for i, (n, p) in enumerate(parameters(CONFIG, ROWS).items())}


def model() -> Model:
    args = {**SHAPE, "kv_channels": 4, "layernorm_epsilon": 1e-6, **LLAMA}
    args.pop("norm_epsilon")
    return Model(weights=weights(), gated=True, tied=False, args=args, layers=2, heads=4, groups=2, width=4)


def write_all(folder: Path) -> None:
    write_classic(folder / "23.06", with_moments(model()), Layout(tp=2, pp=2, optimizer="fp32", pad_to=8))
    write_classic(folder / "core", model(), Layout(tp=2, names="core", pad_to=8))
    write_torch_dist(folder / "torch_dist", model(), tp=2)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    write_all(GOLDEN)
