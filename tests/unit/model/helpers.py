"""Small models for the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig, RecomputeConfig
from megatron.model import GPT, initialise
from megatron.ops import resolve

VOCAB = 61

GPT2: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


def config(**options: Any) -> ModelConfig:
    values = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.2,
    }
    return ModelConfig(**values | options)


def build(
    model: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    kernels: str = "auto",
    recompute: RecomputeConfig | None = None,
    vocab_size: int = VOCAB,
    padded: int | None = None,
    **options: Any,
) -> GPT:
    gpt = GPT(
        model,
        vocab_size=vocab_size,
        padded_vocab_size=padded,
        kernels=resolve(kernels, "cpu"),
        recompute=recompute,
        **options,
    )
    initialise(gpt, 7)
    return gpt.to(dtype)


def tokens(batch: int = 2, seq: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))
