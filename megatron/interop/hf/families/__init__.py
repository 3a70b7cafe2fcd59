"""Families that we export to and import from. A new one is a file here and an entry of FAMILIES."""

from collections.abc import Mapping
from typing import Any

from megatron.config import ModelConfig, MoEConfig
from megatron.errors import ConfigError
from megatron.interop.hf.families.gpt2 import GPT2
from megatron.interop.hf.families.llama import Llama
from megatron.interop.hf.families.mistral import Mistral
from megatron.interop.hf.families.mixtral import Mixtral
from megatron.interop.hf.families.neox import GPTNeoX
from megatron.interop.hf.families.olmo2 import Olmo2
from megatron.interop.hf.families.qwen2 import Qwen2
from megatron.interop.hf.families.qwen3 import Qwen3
from megatron.interop.hf.families.qwen3_moe import Qwen3MoE
from megatron.interop.hf.families.unknown import nearest_family
from megatron.interop.hf.family import Family

# An export takes the first that expresses the model: simpler ones come first (Llama expresses Qwen2 only with zeros).
FAMILIES: tuple[Family, ...] = (GPT2(), GPTNeoX(), Qwen2(), Llama(), Qwen3(), Olmo2(), Mistral(), Mixtral(), Qwen3MoE())


def choose(config: ModelConfig, moe: MoEConfig, *, came_as: str | None = None) -> Family:
    """Returns the family of model_type `came_as` if it can express the model, else the simplest family that can."""
    if came_as is not None and by_model_type(came_as).unsupported(config, moe) is None:
        return by_model_type(came_as)
    for family in FAMILIES:
        if family.unsupported(config, moe) is None:
            return family
    nearest = by_model_type(_nearest(config, moe))
    raise ConfigError(
        f"{nearest.unsupported(config, moe)}: none of the supported Hugging Face families ({_model_types()}) computes "
        f"this (nearest: {nearest.architecture}); the checkpoint works with tools/generate.py, but cannot be exported"
    )


def keeping_tokenizer(family: Family, tokenizer: Mapping[str, Any], config: ModelConfig, moe: MoEConfig) -> Family:
    """Returns `family`, or another family of this model if `transformers` would replace the tokenizer in a `family`
    folder."""
    if family.keeps_tokenizer(tokenizer):
        return family
    for other in FAMILIES:
        if other.keeps_tokenizer(tokenizer) and other.unsupported(config, moe) is None:
            return other
    llama = by_model_type("llama")
    raise ConfigError(
        f"{llama.unsupported(config, moe)}: only {family.architecture} computes this, but transformers 5.8 and later "
        f"read every tokenizer in a {family.model_type} folder as Qwen2's, so texts would get other ids. Train with "
        f"Qwen2's tokenizer, or without this setting, so that the model is a {llama.architecture} (tools/generate.py "
        "can use the checkpoint)"
    )


def _nearest(config: ModelConfig, moe: MoEConfig) -> str:
    if moe.is_on:
        return "qwen3_moe" if config.qk_layernorm else "mixtral"
    if config.positions == "learned":
        return "gpt2"
    if config.norm_placement == "after":
        return "olmo2"
    if config.use_parallel_residual or (config.normalization == "LayerNorm" and not config.swiglu):
        return "gpt_neox"
    if config.qk_layernorm:
        return "qwen3"
    return "llama" if config.window is None else "mistral"


def by_model_type(model_type: Any) -> Family:
    """Returns the family that a config.json names."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    near = nearest_family(str(model_type), [family.model_type for family in FAMILIES])
    raise ConfigError(
        f"config.json: model_type {model_type!r:.60} cannot be imported; supported: {_model_types()}{near}"
    )


def _model_types() -> str:
    return ", ".join(family.model_type for family in FAMILIES)
