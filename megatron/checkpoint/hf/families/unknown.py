"""Models that no family is: which is nearest, and what it would lose."""

from __future__ import annotations

from difflib import get_close_matches

_NEAREST: dict[str, tuple[str, str]] = {
    "bloom": ("gpt2", "ALiBi positions and the norm of the embedding"),
    "cohere": ("llama", "one norm for attention and MLP, and scaled logits"),
    "deepseek_v2": ("mixtral", "multi-latent attention and the shared experts"),
    "deepseek_v3": ("mixtral", "multi-latent attention and the shared experts"),
    "falcon": ("gpt_neox", "multi-query attention beside the MLP, or ALiBi"),
    "gemma": ("llama", "scaled embeddings, gains stored less one and the GELU gate"),
    "gemma2": ("llama", "soft caps, norms before and after, and windows in some layers"),
    "gemma3": ("llama", "norms before and after, and windows in some layers"),
    "gemma3_text": ("llama", "norms before and after, and windows in some layers"),
    "gpt_bigcode": ("gpt2", "multi-query attention"),
    "gpt_oss": ("qwen3_moe", "attention sinks, clamped gates and biases of experts"),
    "gptj": ("gpt_neox", "interleaved rotation, and one norm for attention and MLP"),
    "granite": ("llama", "multipliers of embeddings, residuals, attention and logits"),
    "llava": ("llama", "images"),
    "mpt": ("gpt2", "ALiBi positions"),
    "olmo": ("llama", "norms without weights, and clipped queries, keys and values"),
    "olmo3": ("olmo2", "windows in some layers"),
    "olmoe": ("qwen3_moe", "norms over all heads with experts"),
    "opt": ("gpt2", "ReLU, and positions that begin at 2"),
    "phi": ("gpt_neox", "one norm for attention and MLP, and the bias of the head"),
    "phi3": ("llama", "fused queries, keys, values and gates, and its scaling of positions"),
    "qwen2_5_vl": ("qwen2", "images"),
    "qwen2_moe": ("qwen3_moe", "the gate of the shared expert"),
    "qwen2_vl": ("qwen2", "images"),
    "qwen3_vl": ("qwen3", "images"),
    "stablelm": ("llama", "LayerNorm and partial rotation with a gated MLP"),
    "starcoder2": ("llama", "LayerNorm, GELU and biases"),
}


def nearest_family(model_type: str, known: list[str]) -> str:
    """What to add to a refusal of this type; empty if nothing is near."""
    if model_type in _NEAREST:
        family, lost = _NEAREST[model_type]
        return f"; nearest is {family}, which would lose {lost}"
    near = get_close_matches(model_type, known, n=1)
    return f"; did its author mean {near[0]}?" if near else ""
