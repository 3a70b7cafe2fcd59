"""Maps our parameters to Megatron-LM's names, of three generations.

Version 23.06 has `classic` names, its later models have `core` names. With Transformer Engine's layers, which keep a
norm with the linear layer after it, these become `te` names. Layer numbers restart on each pipeline stage, and expert
numbers on each expert-parallel rank.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from megatron.model.parameters import FINAL_NORM, HEAD_TABLE, POSITIONS, WORD_TABLE

Generation = Literal["classic", "core", "te"]
GENERATIONS: tuple[Generation, ...] = ("classic", "core", "te")

_FC1, _FC2 = "linear_fc1", "linear_fc2"
_IN_LAYER: Mapping[str, tuple[str | None, str, str]] = {
    # ours: (classic, core, te), with {k} for weight or bias and {e} for the number of an expert
    "input_layernorm": (
        "input_layernorm.{k}",
        "input_layernorm.{k}",
        "self_attention.linear_qkv.layer_norm_{k}",
    ),
    "self_attention.query_key_value": (
        "self_attention.query_key_value.{k}",
        *("self_attention.linear_qkv.{k}",) * 2,
    ),
    "self_attention.q_layernorm": ("self_attention.q_layernorm.{k}",) * 3,
    "self_attention.k_layernorm": ("self_attention.k_layernorm.{k}",) * 3,
    "self_attention.dense": ("self_attention.dense.{k}", *("self_attention.linear_proj.{k}",) * 2),
    "post_attention_layernorm": (
        "post_attention_layernorm.{k}",
        "pre_mlp_layernorm.{k}",
        "mlp.linear_fc1.layer_norm_{k}",
    ),
    "mlp.dense_h_to_4h": ("mlp.dense_h_to_4h.{k}", *("mlp.linear_fc1.{k}",) * 2),
    "mlp.dense_4h_to_h": ("mlp.dense_4h_to_h.{k}", *("mlp.linear_fc2.{k}",) * 2),
    "mlp.router": (None, "mlp.router.{k}", "mlp.router.{k}"),
    **{
        f"mlp.experts.{{e}}.{ours}": (
            None,
            f"mlp.experts.local_experts.{{e}}.{theirs}.{{k}}",
            f"mlp.experts.{theirs}.{{k}}{{e}}",
        )
        for ours, theirs in (("dense_h_to_4h", _FC1), ("dense_4h_to_h", _FC2))
    },
    "mlp.shared_expert.dense_h_to_4h": (None, *("mlp.shared_experts.linear_fc1.{k}",) * 2),
    "mlp.shared_expert.dense_4h_to_h": (None, *("mlp.shared_experts.linear_fc2.{k}",) * 2),
}
_WITH_EXPERTS = {"post_attention_layernorm": "pre_mlp_layernorm.{k}"}
"""Norm before a router. It is a separate module even with `te` names."""
_OUTSIDE = (WORD_TABLE, f"{POSITIONS}.weight", HEAD_TABLE)
_OF_LAYER = re.compile(r"layers\.\d+\.(.+)\.(\w+)")
_EXPERT = re.compile(r"mlp\.experts\.\d+\.")

HEAD_COPY = "word_embeddings_for_head.weight"
"""Name in version 23.06 of the last stage's copy of a tied token embedding."""
_PREFIXES = re.compile(r"^(module\.)*(language_model\.)?((encoder|transformer|decoder)\.)?")
_BUFFERS = re.compile(r".*(\._extra_state(/.*)?|rotary_pos_emb\.inv_freq|\.attention_mask|local_tokens_per_expert)$")


def flat_names(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of a nested `model` under flat names, without the modules around the layers."""
    for path, value in _leaves(tree, ""):
        name = _PREFIXES.sub("", path).replace(".attention.", ".self_attention.")
        if not _BUFFERS.fullmatch(name) and value is not None:
            yield name, value


def _leaves(tree: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and depth < 8:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key), depth + 1)
    else:
        yield path, tree


def candidates(name: str, layer: int | None, expert: int | None) -> tuple[str, ...]:
    """Returns the names, of all generations, that a stage may give to our parameter as its `layer` and `expert`."""
    found = (their_name(name, generation, layer, expert) for generation in GENERATIONS)
    names = [each for each in found if each is not None]
    if layer is not None and ".post_attention_layernorm." in name:
        names.append(f"layers.{layer}.pre_mlp_layernorm.{name.rpartition('.')[2]}")
    return tuple(dict.fromkeys(names))


def their_name(
    name: str, generation: Generation, layer: int | None, expert: int | None, *, with_experts: bool = False
) -> str | None:
    """Returns the name of one generation; None if it has no such parameter."""
    if name in _OUTSIDE or name.startswith(f"{FINAL_NORM}."):
        return name
    pattern = layer_pattern(name, generation, with_experts=with_experts)
    return None if pattern is None else f"layers.{layer}.{pattern.replace('{e}', str(expert))}"


def layer_pattern(name: str, generation: Generation, *, with_experts: bool = False) -> str | None:
    """Returns Megatron-LM's name within a layer, with {e} for the number of the expert."""
    match = _OF_LAYER.fullmatch(name)
    if match is None:
        return None
    module, kind = _EXPERT.sub("mlp.experts.{e}.", match[1]), match[2]
    if with_experts and generation == "te" and module in _WITH_EXPERTS:
        return _WITH_EXPERTS[module].replace("{k}", kind)
    theirs = _IN_LAYER.get(module, (None,) * 3)[GENERATIONS.index(generation)]
    return None if theirs is None else theirs.replace("{k}", kind)
