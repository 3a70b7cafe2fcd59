"""Writes `torch_dist` directories as Megatron-LM's main branch does: with torch's own writer, and with keys and chunks
spelled out from the format's description."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tests.helpers.megatron_lm import CORE, VOCABULARY, Model

FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class Cut(Tensor):
    """A tensor written as a grid of `parts`, by torch's protocol for tensors that write themselves."""

    whole: Tensor
    parts: tuple[int, ...]

    @staticmethod
    def __new__(cls, whole: Tensor, parts: tuple[int, ...]) -> Cut:
        made: Cut = torch.empty(0).as_subclass(cls)
        made.whole, made.parts = whole, parts
        return made

    def __init__(self, whole: Tensor, parts: tuple[int, ...]) -> None:
        """Does nothing: `__new__` makes a tensor subclass."""

    def __deepcopy__(self, memo: Any) -> Cut:
        return self

    def chunks(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        sizes = tuple(n // p for n, p in zip(self.whole.shape, self.parts, strict=True))
        for at in product(*map(range, self.parts)):
            yield tuple(i * n for i, n in zip(at, sizes, strict=True)), sizes

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties.create_from_tensor(self.whole),
                    size=self.whole.shape,
                ),
            )
            for offsets, sizes in self.chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in self.chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        sizes = next(iter(self.chunks()))[1]
        return self.whole[tuple(slice(o, o + n) for o, n in zip(index.offset, sizes, strict=True))].clone()


def write(
    directory: Path,
    model: Model,
    *,
    tp: int = 1,
    stacked: bool = True,
    optimizer: str = "",
    common: bool = True,
    step: int = 500,
    state: Mapping[Any, Any] | None = None,
) -> Path:
    """`optimizer`: empty, `model_space` (shaped like the weights), `reshardable` (the same with other names for
    masters), `flat` (each part of the grid flattened) or `buckets`. `common`: in a separate file. `state`: what the
    optimizer has besides tensors."""
    folder = directory / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    padded = -(-model.weights[VOCABULARY[0]].shape[0] // (64 * tp)) * 64 * tp
    content: dict[str, Any] = dict(_tensors(model, model.weights, tp, stacked, padded))
    if optimizer == "buckets":
        content["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"] = torch.zeros(9)
    elif optimizer:
        master = "param" if optimizer == "reshardable" else "fp32_param"
        for theirs, ours in (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), (master, "master")):
            moments = {name: kinds[ours] for name, kinds in model.moments.items()}
            for key, cut in _tensors(model, moments, tp, stacked, padded):
                content[f"optimizer.state.{theirs}.{key}"] = _flattened(cut) if optimizer == "flat" else cut
    args = Namespace(
        **{
            "padded_vocab_size": padded,
            "params_dtype": torch.bfloat16,
            "consumed_train_samples": step * 4,
            "consumed_valid_samples": 8,
            **model.args,
        }
    )
    rest = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": step,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": step * 4},
        "optimizer": state or {"optimizer": {"state": {}, "param_groups": [{"step": step - 1, "params": []}]}},
    }
    if common:
        torch.save(rest, folder / "common.pt")
    else:
        content |= rest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (directory / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def _flattened(cut: Cut) -> Cut:
    parts = [cut.whole[tuple(slice(a, a + n) for a, n in zip(o, s, strict=True))].flatten() for o, s in cut.chunks()]
    whole = torch.stack(parts).view(*cut.parts, -1)
    divided = 2 if whole.shape[-1] % 2 == 0 else 1  # over data-parallel ranks
    return Cut(whole, (*cut.parts, divided))


def _tensors(
    model: Model, tensors: Mapping[str, Tensor], tp: int, stacked: bool, padded: int
) -> Iterator[tuple[str, Cut]]:
    layers: dict[str, list[Tensor]] = {}
    experts: dict[tuple[str, int], list[Tensor]] = {}
    for name, whole in tensors.items():
        if name in VOCABULARY:
            rows = torch.full((padded - whole.shape[0], whole.shape[1]), 0.123, dtype=whole.dtype)
            yield name, Cut(torch.cat([whole, rows]), (tp, 1))
        elif not name.startswith("layers."):
            yield name if name.startswith("embedding.") else f"decoder.{name}", Cut(whole, (1,) * whole.dim())
        else:
            _, number, inside = name.split(".", 2)
            inside, expert = _inside(inside, bool(model.experts))
            if expert is None:
                layers.setdefault(inside, []).append(whole)
            else:
                experts.setdefault((inside, int(number)), []).append(whole)
    for (inside, _), held in experts.items():
        layers.setdefault(inside, []).append(torch.stack(held))
    for inside, held in layers.items():
        grid = _grid(inside, held[0].dim(), tp, model.gated)
        if stacked:
            yield f"decoder.layers.{inside}", Cut(torch.stack(held), (len(held), *grid))
        else:
            yield from ((f"decoder.layers.{n}.{inside}", Cut(tensor, grid)) for n, tensor in enumerate(held))


def _inside(inside: str, with_experts: bool) -> tuple[str, int | None]:
    if ".experts." in inside:
        _, _, expert, linear, kind = inside.split(".")
        linear = {"dense_h_to_4h": "linear_fc1", "dense_4h_to_h": "linear_fc2"}[linear]
        return f"mlp.experts.experts.{linear}.{kind}", int(expert)
    module, _, kind = inside.rpartition(".")
    inside = f"{CORE.get(module, module)}.{kind}"
    for plain, fused in FUSED.items():
        if not (with_experts and plain.startswith("pre_mlp")):
            inside = inside.replace(plain, fused)
    return inside, None


def _grid(inside: str, dims: int, tp: int, gated: bool) -> tuple[int, ...]:
    if inside.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return (*(1,) * (dims - 1), tp)
    if "linear_fc1" in inside and "layer_norm" not in inside:
        rows = 2 * tp if gated else tp
        return (rows, 1) if dims == 2 else (rows,) if dims == 1 else (2, rows, 1)
    if inside.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        return (tp, *(1,) * (dims - 1))
    return (1,) * dims
