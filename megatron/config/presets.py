"""`--model NAME`: the shapes of well-known models. Precedence: default < preset < file < flag.

A preset sets only the model. The user gives batch size, sequence length, learning rate and tokenizer; the vocabulary
comes from the tokenizer.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from megatron.config.values import nearest

Values = dict[str, Any]


def _gpt(layers: int, hidden: int, heads: int, positions: int, **other: Any) -> Values:
    """GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases, tied head."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        **other,
    }


def _llama(layers: int, hidden: int, ffn: int, heads: int, groups: int, positions: int, **other: Any) -> Values:
    """Llama and its relatives: RoPE, RMSNorm, SwiGLU, no biases, no dropout, and by default a separate head."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "max_position_embeddings": positions,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **other,
    }


_TIED: Values = {"untie_embeddings_and_output_weights": False}
_LLAMA3: Values = {"rotary_base": 500000.0}
_LLAMA31: Values = {**_LLAMA3, "use_rope_scaling": True, "rope_scaling_factor": 8.0}
_LLAMA32: Values = {**_LLAMA31, **_TIED, "rope_scaling_factor": 32.0}
_QWEN25: Values = {"rotary_base": 1e6, "norm_epsilon": 1e-6, "add_qkv_bias": True}
_QWEN3: Values = {"rotary_base": 1e6, "norm_epsilon": 1e-6, "qk_layernorm": True, "kv_channels": 128}
_MIXTRAL: Values = {"rotary_base": 1e6, "moe_router_topk": 2, "num_experts": 8}


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, expert: int) -> Values:
    """Qwen3-MoE: 128 experts, 8 per token; the expert weights of a token add up to 1."""
    moe = {"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": expert}
    return _llama(layers, hidden, ffn, heads, 4, 40960, **_QWEN3, **moe)


PRESETS: Mapping[str, Values] = MappingProxyType(
    {
        "gpt2-124m": _gpt(12, 768, 12, 1024),
        "gpt2-345m": _gpt(24, 1024, 16, 1024),
        "gpt2-774m": _gpt(36, 1280, 20, 1024),
        "gpt2-1.5b": _gpt(48, 1600, 25, 1024),
        "gpt3-125m": _gpt(12, 768, 12, 2048),
        "gpt3-350m": _gpt(24, 1024, 16, 2048),
        "gpt3-760m": _gpt(24, 1536, 16, 2048),
        "gpt3-1.3b": _gpt(24, 2048, 16, 2048),
        "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
        "gpt3-3.7b": _gpt(32, 3072, 32, 2048),
        "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
        "gpt3-13b": _gpt(40, 5120, 40, 2048),
        "gpt3-175b": _gpt(96, 12288, 96, 2048, init_method_std=0.006),
        "llama2-7b": _llama(32, 4096, 11008, 32, 32, 4096),
        "llama2-13b": _llama(40, 5120, 13824, 40, 40, 4096),
        "llama2-70b": _llama(80, 8192, 28672, 64, 8, 4096),
        "llama3-8b": _llama(32, 4096, 14336, 32, 8, 8192, **_LLAMA3),
        "llama3-70b": _llama(80, 8192, 28672, 64, 8, 8192, **_LLAMA3),
        "llama3.1-8b": _llama(32, 4096, 14336, 32, 8, 131072, **_LLAMA31),
        "llama3.1-70b": _llama(80, 8192, 28672, 64, 8, 131072, **_LLAMA31),
        "llama3.2-1b": _llama(16, 2048, 8192, 32, 8, 131072, **_LLAMA32),
        "llama3.2-3b": _llama(28, 3072, 8192, 24, 8, 131072, **_LLAMA32),
        "qwen2.5-0.5b": _llama(24, 896, 4864, 14, 2, 32768, **_QWEN25, **_TIED),
        "qwen2.5-1.5b": _llama(28, 1536, 8960, 12, 2, 131072, **_QWEN25, **_TIED),
        "qwen2.5-7b": _llama(28, 3584, 18944, 28, 4, 131072, **_QWEN25),
        "qwen3-0.6b": _llama(28, 1024, 3072, 16, 8, 40960, **_QWEN3, **_TIED),
        "qwen3-1.7b": _llama(28, 2048, 6144, 16, 8, 40960, **_QWEN3, **_TIED),
        "qwen3-4b": _llama(36, 2560, 9728, 32, 8, 40960, **_QWEN3, **_TIED),
        "qwen3-8b": _llama(36, 4096, 12288, 32, 8, 40960, **_QWEN3),
        "qwen3-14b": _llama(40, 5120, 17408, 40, 8, 40960, **_QWEN3),
        "qwen3-32b": _llama(64, 5120, 25600, 64, 8, 40960, **_QWEN3),
        "mistral-7b": _llama(32, 4096, 14336, 32, 8, 32768, window_size=(4095, 0)),
        "mixtral-8x7b": _llama(32, 4096, 14336, 32, 8, 32768, **_MIXTRAL),
        "mixtral-8x22b": _llama(56, 6144, 16384, 48, 8, 65536, **_MIXTRAL),
        "qwen3-30b-a3b": _qwen3_moe(48, 2048, 6144, 32, 768),
        "qwen3-235b-a22b": _qwen3_moe(94, 4096, 12288, 64, 1536),
        "gpt2-tiny": _gpt(4, 192, 3, 256),
        "llama-tiny": _llama(4, 192, 512, 3, 3, 256, **_TIED),
        "moe-tiny": _llama(4, 128, 256, 4, 2, 256, **_TIED, num_experts=8, moe_router_topk=2),
    }
)

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gpt2", "gpt2-small", "gpt2-117m", "gpt2-125m"), "gpt2-124m"),
        **dict.fromkeys(("gpt2-medium", "gpt2-350m", "gpt2-355m"), "gpt2-345m"),
        **dict.fromkeys(("gpt2-large", "gpt2-762m", "gpt2-770m"), "gpt2-774m"),
        **dict.fromkeys(("gpt2-xl", "gpt2-1542m", "gpt2-1558m"), "gpt2-1.5b"),
    }
)
"""Other programs' names of GPT-2 models -> preset. Their parameters are counted in several ways."""


def preset_meant(name: str, known: Iterable[str] = PRESETS) -> str:
    """Returns " (did you mean X?)" if X has this name in other programs or a similar name, else ""."""
    last = name.rpartition("/")[2].lower().replace("_", "-")
    here = ELSEWHERE.get(last)
    return nearest(last, known) if here is None else f" (did you mean {here}?)"
