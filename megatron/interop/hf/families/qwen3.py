"""Qwen3: Qwen2 with norms of queries and keys instead of biases."""

from typing import ClassVar

from megatron.interop.hf.families.qwen2 import Qwen2


class Qwen3(Qwen2):
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    normalizes_qk = True
    has_qkv_bias = False
    rebuilds_tokenizer = False
    bias_keys = ("attention_bias",)
    default_head_dim: ClassVar[int | None] = 128
