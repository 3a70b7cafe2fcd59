"""Writes checkpoints as Megatron-LM does, from whole tensors of our model. Names, row orders and the order of its
optimizers are spelled out here, not imported from the package."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CORE = {
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
    "mlp.shared_expert.dense_h_to_4h": "mlp.shared_experts.linear_fc1",
    "mlp.shared_expert.dense_4h_to_h": "mlp.shared_experts.linear_fc2",
}
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
ROW_SPLIT = ("self_attention.dense.weight", "dense_4h_to_h.weight")
COLUMN_SPLIT = ("query_key_value.weight", "query_key_value.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class Layout:
    """Layout, version and optimizer of the Megatron-LM run."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    names: str = "classic"
    """Either classic, core, or te: core with the norms in the linear layers after them."""
    version: float | None = 3.0
    optimizer: str = ""
    """Empty for none; `masters`, `fp32`, `distributed` (one vector, as in 23.06) or `aligned` (later versions). With
    expert parallelism the experts have their own optimizer, as in later versions."""
    pad_to: int = 128


@dataclass(frozen=True)
class Model:
    """Whole tensors by our names, in the model's order, and the moments of its optimizer."""

    weights: Mapping[str, Tensor]
    layers: int
    heads: int
    groups: int
    width: int
    gated: bool
    tied: bool
    experts: int = 0
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)


def write(
    directory: Path, model: Model, layout: Layout, step: int = 500, changes: Mapping[str, Any] | None = None
) -> None:
    """`changes` replace entries of every file."""
    for tp in range(layout.tp):
        for pp in range(layout.pp):
            for ep in range(layout.ep):
                name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else "")
                name += f"_{ep:03d}" if layout.ep > 1 else ""
                folder = directory / f"iter_{step:07d}" / name
                folder.mkdir(parents=True)
                content, vectors = rank_content(model, layout, tp, pp, ep, step)
                torch.save({**content, **(changes or {})}, folder / "model_optim_rng.pt")
                if vectors is not None:
                    torch.save(vectors, folder / "distrib_optim.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text(str(step))


def rank_content(
    model: Model, layout: Layout, tp: int, pp: int, ep: int, step: int
) -> tuple[dict[str, Any], dict[Any, Any] | None]:
    padded = -(-model.weights[VOCABULARY[0]].shape[0] // (layout.pad_to * layout.tp)) * layout.pad_to * layout.tp
    args = Namespace(
        **{
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "expert_model_parallel_size": layout.ep,
            "padded_vocab_size": padded,
            "params_dtype": torch.float32,
            "consumed_train_samples": step * 4,
            "consumed_valid_samples": 8,
            "iteration": step,
            **model.args,
        }
    )
    content: dict[str, Any] = {"args": args, "iteration": step}
    if layout.version is not None:
        content["checkpoint_version"] = layout.version
    chunks = [
        dict(_chunk(model, layout, tp, pp, ep, v, lambda name: model.weights[name], padded))
        for v in range(layout.vpp)
    ]  # fmt: skip
    for v, chunk in enumerate(chunks):
        content["model" if layout.vpp == 1 else f"model{v}"] = _nested(chunk, layout)
    if not layout.optimizer:
        return content, None
    kinds = {
        kind: [
            dict(_chunk(model, layout, tp, pp, ep, v, lambda name, kind=kind: model.moments[name][kind], padded))
            for v in range(layout.vpp)
        ]
        for kind in ("exp_avg", "exp_avg_sq", "master")
        if kind != "master" or layout.optimizer != "fp32"
    }
    content["opt_param_scheduler"] = {"max_lr": 1e-3, "num_steps": step * 4}
    parts = [_only(chunks, kinds, of_experts) for of_experts in ((False, True) if layout.ep > 1 else (None,))]
    if layout.optimizer in ("distributed", "aligned"):
        states = [{"optimizer": {"param_groups": [_group(step, 1.0, part.of_experts)]}} for part in parts]
        # only ranks of the first experts keep the dense parameters' vectors
        vectors = [None if ep > 0 and part.of_experts is False else _of_chunks(part, layout) for part in parts]
        return {**content, "optimizer": _chain(states)}, _chain(vectors)
    content["optimizer"] = _chain([_numbered(part.chunks, part.kinds, step, layout, part.of_experts) for part in parts])
    return content, None


@dataclass(frozen=True)
class _Part:
    """State of one optimizer of a chain. `of_experts` is None if one optimizer has all parameters."""

    chunks: list[dict[str, Tensor]]
    kinds: Mapping[str, list[dict[str, Tensor]]]
    of_experts: bool | None


def _only(chunks: list[dict[str, Tensor]], kinds: Mapping[str, list[dict[str, Tensor]]], experts: bool | None) -> _Part:
    def of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t for name, t in tensors.items() if experts is None or (".experts." in name) == experts}

    return _Part([of(each) for each in chunks], {kind: [of(c) for c in held] for kind, held in kinds.items()}, experts)


def _chain(each: list[Any]) -> Any:
    """Expert parallelism has two optimizers, which are saved as a list."""
    return each if len(each) > 1 else each[0]


def _group(step: int, decays: float, of_experts: bool | None) -> dict[str, Any]:
    return {"wd_mult": decays, "lr_mult": 1.0, "step": step - 1, "is_expert_parallel": bool(of_experts)}


def _of_chunks(part: _Part, layout: Layout) -> dict[Any, Any]:
    """Vectors of the chunks that have parameters of this optimizer, numbered consecutively."""
    held = [v for v in range(layout.vpp) if part.chunks[v]]
    if layout.optimizer == "distributed":
        return {number: {torch.float32: _vectors(part.kinds, v)} for number, v in enumerate(held)}
    dtypes = (torch.bfloat16, torch.float32)
    found = {number: {dtypes: _aligned_vectors(part.kinds, v)} for number, v in enumerate(held)}
    return {"buckets_coalesced": True, **found}


def _vectors(kinds: Mapping[str, list[dict[str, Tensor]]], chunk: int) -> dict[str, Tensor]:
    """Concatenates from the end of the buffer to its beginning, then pads."""
    names = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    return {
        theirs: torch.cat([*(t.flatten() for t in reversed(kinds[ours][chunk].values())), torch.full((7,), 9.0)])
        for theirs, ours in names.items()
    }


def _aligned_vectors(kinds: Mapping[str, list[dict[str, Tensor]]], chunk: int) -> dict[str, Any]:
    """Concatenates from the last parameter to the first, aligned to 64; adds the length without final padding."""
    names = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    vectors: dict[str, Any] = {}
    for theirs, ours in names.items():
        parts: list[Tensor] = []
        for tensor in reversed(kinds[ours][chunk].values()):
            parts += [torch.full((-sum(part.numel() for part in parts) % 64,), 8.0), tensor.flatten()]
        vectors[theirs] = torch.cat(parts)
    return {**vectors, "numel_unpadded": vectors["param"].numel()}


def _numbered(
    chunks: list[dict[str, Tensor]],
    kinds: Mapping[str, list[dict[str, Tensor]]],
    step: int,
    layout: Layout,
    of_experts: bool | None,
) -> dict[str, Any]:
    """torch's state dict: groups number all parameters in order, those with weight decay first."""
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    masters: list[list[Tensor]] = []
    for decays in (True, False):
        names = [
            (v, name)
            for v, chunk in enumerate(chunks)
            for name, tensor in chunk.items()
            if (not name.endswith(".bias") and tensor.dim() > 1) == decays
        ]
        numbers = list(range(len(state), len(state) + len(names)))
        if numbers:
            groups.append({"params": numbers, **_group(step, float(decays), of_experts)})
        for number, (v, name) in zip(numbers, names, strict=True):
            state[number] = {kind: kinds[kind][v][name] for kind in ("exp_avg", "exp_avg_sq")}
        if layout.optimizer == "masters":
            masters += [[kinds["master"][v][name] for v, name in names]] if names else []
    inner = {"state": state, "param_groups": groups}
    if layout.optimizer == "fp32":
        return inner
    scaler = {"scale": 1024.0, "growth_tracker": 3, "hysteresis_tracker": 2}
    return {"optimizer": inner, "grad_scaler": scaler, "fp32_from_fp16_params": masters}


def _nested(flat: Mapping[str, Tensor], layout: Layout) -> dict[str, Any]:
    if layout.names != "classic":
        inside = {n: n if n.startswith(("embedding.", "output_layer.")) else f"decoder.{n}" for n in flat}
        found: dict[str, Any] = {inside[name]: tensor for name, tensor in flat.items()}
        return {**found, "decoder.layers.0.self_attention.core_attention._extra_state": None}
    tree: dict[str, Any] = {}
    old = layout.version is None or layout.version < 2  # the names before 2.0
    encoder = {
        (name.replace(".self_attention.", ".attention.") if old else name): tensor
        for name, tensor in flat.items()
        if name.startswith(("layers.", "final_layernorm"))
    }
    language: dict[str, Any] = {"transformer" if old else "encoder": encoder}
    for name, tensor in flat.items():
        parts = name.split(".")
        if parts[0] == "embedding":
            language.setdefault("embedding", {}).setdefault(parts[1], {})["weight"] = tensor
        elif parts[0] == "output_layer":
            language["output_layer"] = {"weight": tensor}
        elif parts[0] == "word_embeddings_for_head":
            tree["word_embeddings_for_head"] = {"weight": tensor}
    embedding = {"embedding": language["embedding"]} if "embedding" in language else {}
    return {"language_model": {**embedding, **language}, **tree}


def _chunk(
    model: Model, layout: Layout, tp: int, pp: int, ep: int, v: int, read: Callable[[str], Tensor], padded: int
) -> Iterator[tuple[str, Tensor]]:
    """(Megatron's flat name, a rank's tensor) in the order of Megatron's modules."""
    each = model.layers // (layout.pp * layout.vpp)
    first = v * (model.layers // layout.vpp) + pp * each
    begins, ends = pp == 0 and v == 0, pp == layout.pp - 1 and v == layout.vpp - 1
    for name in model.weights:
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        here = first <= layer < first + each if layer is not None else (
            begins if name.startswith("embedding.") else ends
        )  # fmt: skip
        if not here:
            continue
        their = name if layer is None else _in_layer(model, layout, name, layer - first, ep)
        if their is not None:
            yield their, _part(model, layout, name, read(name), tp, padded)
    if ends and model.tied and layout.pp > 1:
        copy = "word_embeddings_for_head.weight" if layout.names == "classic" else "output_layer.weight"
        yield copy, _part(model, layout, VOCABULARY[0], read(VOCABULARY[0]), tp, padded)


def _in_layer(model: Model, layout: Layout, name: str, number: int, ep: int) -> str | None:
    inside = name.split(".", 2)[2]
    if ".experts." in inside:
        _, _, expert, linear, kind = inside.split(".")
        local = int(expert) - ep * (model.experts // layout.ep)
        if not 0 <= local < model.experts // layout.ep:
            return None
        linear = {"dense_h_to_4h": "linear_fc1", "dense_4h_to_h": "linear_fc2"}[linear]
        inside = f"mlp.experts.local_experts.{local}.{linear}.{kind}"
        if layout.names == "te":
            inside = f"mlp.experts.{linear}.{kind}{local}"
    elif layout.names != "classic":
        module, _, kind = inside.rpartition(".")
        inside = f"{CORE.get(module, module)}.{kind}"
        if layout.names == "te":
            for plain, fused in FUSED.items():
                if not (model.experts and plain.startswith("pre_mlp")):
                    inside = inside.replace(plain, fused)
    return f"layers.{number}.{inside}"


def _part(model: Model, layout: Layout, name: str, whole: Tensor, tp: int, padded: int) -> Tensor:
    if name in VOCABULARY:
        filler = torch.full((padded - whole.shape[0], whole.shape[1]), 0.123, dtype=whole.dtype)
        return torch.cat([whole, filler]).chunk(layout.tp)[tp].clone()
    if name.endswith(ROW_SPLIT):
        return whole.chunk(layout.tp, dim=1)[tp].contiguous().clone()
    if not name.endswith(COLUMN_SPLIT):
        return whole.clone()
    if "query_key_value" in name:
        part = whole.chunk(layout.tp)[tp]
        return _rows_of_version(part, model.width, layout.version).clone()
    if model.gated:
        return torch.cat([half.chunk(layout.tp)[tp] for half in whole.chunk(2)])
    return whole.chunk(layout.tp)[tp].clone()


def _rows_of_version(rows: Tensor, width: int, version: float | None) -> Tensor:
    """Reorders [heads, 3, width] to the row order of an older version."""
    heads, rest = rows.shape[0] // (3 * width), rows.shape[1:]
    if version is None or version < 1:
        return rows.view(heads, 3, width, *rest).transpose(0, 1).reshape(rows.shape)
    if version < 2:
        return rows.view(heads, 3, width, *rest).transpose(1, 2).reshape(rows.shape)
    return rows


def with_moments(model: Model, seed: int = 7) -> Model:
    """Random moments and masters of the weights' size."""
    draw = torch.Generator().manual_seed(seed)
    moments = {}
    for name, weight in model.weights.items():
        kinds = {kind: torch.randn(weight.shape, generator=draw) for kind in ("exp_avg", "exp_avg_sq")}
        moments[name] = {**kinds, "master": weight.float() + 1e-4}
    return replace(model, moments=moments)
