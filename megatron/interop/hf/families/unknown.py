"""Model types that are not supported: the nearest family of each, and the features that it lacks."""

from difflib import get_close_matches

_NEAREST: dict[str, tuple[str, str]] = {
    "bloom": ("gpt2", "ALiBi positions and the norm of the embedding"),
    "cohere": ("llama", "one norm for attention and MLP, and scaled logits"),
    "deepseek_v2": ("mixtral", "multi-latent attention and the shared experts"),
    "deepseek_v3": ("mixtral", "multi-latent attention and the shared experts"),
    "deepseek_v32": ("mixtral", "multi-latent and sparse attention and the shared experts"),
    "ernie4_5": ("llama", "interleaved rotation"),
    "exaone4": ("qwen3", "norms after attention and MLP, and windows in some layers"),
    "falcon": ("gpt_neox", "multi-query attention beside the MLP, or ALiBi"),
    "falcon_h1": ("llama", "state-space layers"),
    "gemma": ("llama", "scaled embeddings, norm weights stored as gamma - 1 and the GELU gate"),
    "gemma2": ("llama", "soft caps, norms before and after, and windows in some layers"),
    "gemma3": ("llama", "norms before and after, and windows in some layers"),
    "gemma3_text": ("llama", "norms before and after, and windows in some layers"),
    "gemma3n": ("llama", "embeddings of each layer, norms before and after, and windows in some layers"),
    "glm": ("llama", "interleaved and partial rotation"),
    "glm4": ("llama", "interleaved and partial rotation, and norms before and after"),
    "glm4_moe": ("qwen3_moe", "partial rotation and the shared experts"),
    "gpt_bigcode": ("gpt2", "multi-query attention"),
    "gpt_oss": ("qwen3_moe", "attention sinks, clamped gates and biases of experts"),
    "gptj": ("gpt_neox", "interleaved rotation, and one norm for attention and MLP"),
    "granite": ("llama", "multipliers of embeddings, residuals, attention and logits"),
    "granitemoe": ("mixtral", "multipliers of embeddings, residuals, attention and logits"),
    "llama4": ("llama", "experts beside a shared one, layers without rotation, and images"),
    "llama4_text": ("llama", "experts beside a shared one, and layers without rotation"),
    "llava": ("llama", "images"),
    "ministral": ("mistral", "windows in some layers"),
    "mistral3": ("mistral", "images"),
    "mllama": ("llama", "images"),
    "mpt": ("gpt2", "ALiBi positions"),
    "nemotron": ("llama", "norm weights stored as gamma - 1, squared ReLU without a gate, and partial rotation"),
    "olmo": ("llama", "norms without weights, and clipped queries, keys and values"),
    "olmo3": ("olmo2", "windows in some layers"),
    "olmoe": ("qwen3_moe", "norms over all heads with experts"),
    "opt": ("gpt2", "ReLU, and positions that begin at 2"),
    "phi": ("gpt_neox", "one norm for attention and MLP, and the bias of the head"),
    "phi3": ("llama", "fused queries, keys, values and gates, and its scaling of positions"),
    "phimoe": ("mixtral", "LayerNorm and its own way to choose experts"),
    "qwen2_5_vl": ("qwen2", "images"),
    "qwen2_moe": ("qwen3_moe", "the gate of the shared expert"),
    "qwen2_vl": ("qwen2", "images"),
    "qwen3_next": ("qwen3_moe", "linear attention in most layers and the shared expert"),
    "qwen3_vl": ("qwen3", "images"),
    "qwen3_vl_moe": ("qwen3_moe", "images"),
    "seed_oss": ("llama", "biases of only queries, keys and values"),
    "smollm3": ("llama", "layers without rotation"),
    "stablelm": ("llama", "LayerNorm and partial rotation with a gated MLP"),
    "starcoder2": ("llama", "LayerNorm, GELU and biases"),
}


def nearest_family(model_type: str, known: list[str]) -> str:
    """Returns an addition to the error message about this type; empty if no family is near."""
    if model_type in _NEAREST:
        family, lost = _NEAREST[model_type]
        return f"; the nearest is {family}, which lacks {lost}"
    near = get_close_matches(model_type, known, n=1, cutoff=0.75)
    return f"; did its author mean {near[0]}?" if near else ""
