"""Maps Megatron-LM's optimizer tensors, which are numbered or joined to one vector, to names of parameters.

Numbers follow the order of parameters in a rank's file. Parameters with weight decay come first, then biases and
one-dimensional ones. Experts may have groups of their own. Version 23.06 keeps one vector in `distrib_optim.pt`, filled
from its end: the first parameter of the model comes last. Later versions leave gaps between parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint import paths
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm.classic_tree import ClassicTree, ModelChunk, ModelRank
from megatron.torch_files.torch_file import TorchFile, plain_values

KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_VECTORS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
DISTRIBUTED = "distrib_optim.pt"
_UNPADDED = "numel_unpadded"
_ALIGNMENT = 64
_HALF = (torch.float16, torch.bfloat16)
_DIVIDED = "its groups divide the parameters in an unknown way"
_SCALER = {"scale", "growth_tracker", "hysteresis_tracker"}


@dataclass(frozen=True)
class StoredTensor:
    """Optimizer tensor in a file: a whole stored tensor, or the part from `start` of a stored vector."""

    file: TorchFile
    stored: Any
    shape: tuple[int, ...]
    start: int | None = None

    def tensor(self) -> Tensor:
        found = self.file.tensor(self.stored)
        return found if self.start is None else found[self.start : self.start + prod(self.shape)].view(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.file.dtype(self.stored)


Entries = Mapping[tuple[str, str], Mapping[str, StoredTensor]]
"""Entries by (chunk, flat name), then by kind."""


class UnknownOptimizerError(CheckpointError):
    """Raised if the weights can be read, but the optimizer's state cannot."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; give --no-load-optim to resume without it, or --finetune to load only the weights")


@dataclass(frozen=True)
class _Link:
    """One optimizer of a rank's chain, with its parameters. A single optimizer has all parameters."""

    tree: ClassicTree
    at: ModelRank
    state: Any
    of_experts: bool | None
    """True for experts, False for the other parameters, None for both."""

    def names(self, chunk: ModelChunk) -> list[str]:
        return [
            name
            for name in chunk.tensors
            if _trained(name) and (self.of_experts is None or (".experts." in name) == self.of_experts)
        ]


def of_rank(tree: ClassicTree, at: ModelRank) -> Entries:
    """Returns the optimizer's tensors in one rank's file; empty if the file has none."""
    file = tree.files[at]
    state = file.content.get("optimizer")
    if state is None:
        return {}
    chain = state if isinstance(state, list) else [state]
    apart = any(map(_has_experts, chain))  # True: experts have an optimizer of their own
    links = [_Link(tree, at, one, _has_experts(one) if apart and len(chain) > 1 else None) for one in chain]
    if len({link.of_experts for link in links}) != len(links):
        raise _refused(tree, _DIVIDED)
    distributed = (file.path.parent / DISTRIBUTED).exists()
    found: dict[tuple[str, str], dict[str, StoredTensor]] = {}
    for where, kind, entry in _in_vectors(links, file.path.parent) if distributed else _in_numbers(links, apart):
        found.setdefault(where, {})[kind] = entry
    return found


def _has_experts(state: Any) -> bool:
    """Returns True if a group is marked as experts. Megatron-LM marks it only with expert parallelism."""
    return any(isinstance(group, dict) and bool(group.get("is_expert_parallel")) for group in _groups(state))


def _groups(state: Any) -> list[Any]:
    inner = state.get("optimizer", state) if isinstance(state, dict) else None
    return _values(inner.get("param_groups")) if isinstance(inner, dict) else []


def _in_numbers(links: list[_Link], apart: bool) -> Iterator[tuple[tuple[str, str], str, StoredTensor]]:
    for link in links:
        file = link.tree.files[link.at]
        for where, kind, stored in _numbered(link.tree, link.at, link.state, apart):
            shape = _shape(link.tree, link.at, where)
            if not file.is_tensor(stored) or file.shape(stored) != shape:
                raise _refused(link.tree, f"its entry for {where[1]} does not have the shape {shape}")
            yield where, kind, StoredTensor(file, stored, shape)


def _numbered(tree: ClassicTree, at: ModelRank, state: Any, apart: bool) -> Iterator[tuple[tuple[str, str], str, Any]]:
    """Yields (parameter, kind, tensor) from the state of one torch optimizer, with its masters if it has some."""
    inner = state.get("optimizer", state) if isinstance(state, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("param_groups"), list):
        raise _refused(tree, "it has no param_groups")
    if not isinstance(inner.get("state"), dict):
        raise _refused(tree, "it has no state")
    groups = inner["param_groups"]
    in_groups = _names_of_groups(tree, at, groups, apart)
    for group, names in zip(groups, in_groups, strict=True):
        for number, where in zip(group["params"], names, strict=True):
            held = inner["state"].get(number)
            if not isinstance(held, dict):
                raise _refused(tree, f"it has no entry for {where[1]}")
            for theirs, ours in KINDS.items():
                if theirs not in held:
                    raise _refused(tree, f"it has no {theirs} of {where[1]}, so it is not the state of Adam")
                yield where, ours, held[theirs]
    masters = state.get("fp32_from_fp16_params")
    if masters is None:
        return
    file = tree.files[at]
    halves = [[w for w in names if file.dtype(_stored(tree, at, w)) in _HALF] for names in in_groups]
    halves = [names for names in halves if names]
    if not isinstance(masters, list) or [len(m) for m in masters if m] != [len(names) for names in halves]:
        raise _refused(tree, "its full-precision copies do not match its parameters")
    for copies, names in zip([m for m in masters if m], halves, strict=True):
        yield from ((where, "master", copy) for copy, where in zip(copies, names, strict=True))


def _names_of_groups(tree: ClassicTree, at: ModelRank, groups: list[Any], apart: bool) -> list[list[tuple[str, str]]]:
    """Returns the parameters that each group numbers. `apart`: experts have groups of their own."""
    found = []
    for group in groups:
        of_experts, decays = bool(group.get("is_expert_parallel")), bool(group.get("wd_mult", 1.0))
        names = [
            (chunk.key, name)
            for chunk in tree.chunks[at]
            for name in chunk.tensors
            if _trained(name) and _decays(tree, at, (chunk.key, name)) == decays
            if not apart or (".experts." in name) == of_experts
        ]
        if not isinstance(group.get("params"), list) or len(group["params"]) != len(names):
            raise _refused(tree, f"a parameter group does not have the expected {len(names)} parameters")
        found.append(names)
    if len({name for names in found for name in names}) != sum(map(len, found)):
        raise _refused(tree, _DIVIDED)
    return found


def _in_vectors(links: list[_Link], folder: Path) -> Iterator[tuple[tuple[str, str], str, StoredTensor]]:
    """Yields the tensors in the vectors of a chain of optimizers; a vector is None for experts of another rank."""
    tree = links[0].tree
    file = TorchFile.open(paths.member(folder, DISTRIBUTED), tree.checks)
    held = file.content if isinstance(file.content, list) else [file.content]
    if len(held) != len(links):
        raise _refused(tree, f"{DISTRIBUTED} holds {len(held)} optimizers, but {paths.MODEL_FILE} {len(links)}")
    for link, by_chunk in zip(links, held, strict=True):
        if by_chunk is not None:
            yield from _of_link(link, by_chunk, file)


def _of_link(link: _Link, by_chunk: Any, file: TorchFile) -> Iterator[tuple[tuple[str, str], str, StoredTensor]]:
    tree, at = link.tree, link.at
    chunks = [(chunk, names) for chunk in tree.chunks[at] if (names := link.names(chunk))]
    for number, (chunk, names) in enumerate(chunks):
        by_dtype = by_chunk.get(number) if isinstance(by_chunk, dict) else None
        vectors = list(by_dtype.values()) if isinstance(by_dtype, dict) else []
        known = len(vectors) == 1 and isinstance(vectors[0], dict) and all(
            file.is_tensor(vectors[0].get(kind)) and len(file.shape(vectors[0][kind])) == 1 for kind in _VECTORS
        )  # fmt: skip
        if not known:
            raise _refused(tree, f"{DISTRIBUTED} was written by a version whose order is unknown")
        sizes = [prod(_shape(tree, at, (chunk.key, name))) for name in names]
        starts = _starts(sizes, vectors[0].get(_UNPADDED))
        if starts is None:
            raise _refused(tree, f"{DISTRIBUTED} has several buckets, whose order is unknown")
        end = max(map(sum, zip(starts, sizes, strict=True)), default=0)
        if any(file.shape(vectors[0][kind])[0] < end for kind in _VECTORS):
            raise _refused(tree, f"{DISTRIBUTED} is shorter than the parameters")
        for name, position in zip(names, starts, strict=True):
            shape = _shape(tree, at, (chunk.key, name))
            in_half = tree.files[at].dtype(chunk.tensors[name]) in _HALF
            for theirs, ours in _VECTORS.items():
                if ours != "master" or in_half:  # a full-precision parameter is its own master
                    yield (chunk.key, name), ours, StoredTensor(file, vectors[0][theirs], shape, position)


def _starts(sizes: list[int], held: Any) -> list[int] | None:
    """Returns the start of each parameter in a vector that begins with the last parameter. Later versions align each
    start to 64 elements and store the number of elements. Returns None if that number fits no known
    order."""
    for alignment in (1,) if held is None else (_ALIGNMENT, 1):
        starts, end = [], 0
        for size in reversed(sizes):
            starts.append(-(-end // alignment) * alignment)
            end = starts[-1] + size
        if held in (None, end):
            return starts[::-1]
    return None


def extra_state(state: Any, iteration: int, file: TorchFile) -> dict[str, Any]:
    """Returns the optimizer's counters in the native checkpoint format: number of updates, loss scale. All optimizers
    in a chain are updated together, so the first count that is found holds for all."""
    chain = _in_chain(state)
    scalers = (plain_values(one.get("grad_scaler")) or {} for one in chain)
    scaler = next((each for each in scalers if isinstance(each, dict) and each.keys() >= _SCALER), {})
    return {
        "step": _steps(chain, iteration, file),
        "skipped_in_a_row": 0,
        "loss_scaler": {name: scaler[name] for name in scaler if name in _SCALER},
    }


def _in_chain(state: Any) -> list[Mapping[str, Any]]:
    """Returns the optimizers of a chain: a list, or in the distributed format a dictionary by numbers."""
    numbered = isinstance(state, dict) and state and all(str(key).isdecimal() for key in state)
    return [one for one in (_values(state) if numbered else state if isinstance(state, list) else [state])
            if isinstance(one, dict)]  # fmt: skip


def _steps(chain: list[Mapping[str, Any]], iteration: int, file: TorchFile) -> int:
    """Returns the number of updates. apex counts per group, torch per parameter, the distributed format once. Without a
    count, the number of iterations is returned."""
    for one in chain:
        inner = one.get("optimizer", one)
        if not isinstance(inner, dict):
            continue
        groups, state = inner.get("param_groups"), inner.get("state")
        counts = [each.get("step") for each in (*_values(groups), *_values(state)) if isinstance(each, dict)]
        for steps in (*counts, state.get("common_step") if isinstance(state, dict) else None):
            if steps is not None and file.is_tensor(steps) and file.shape(steps) in ((), (1,)):
                steps = file.tensor(steps).item()
            if isinstance(steps, (int, float)) and 0 <= steps < 2**53:
                return int(steps)
    return iteration


def _values(items: Any) -> list[Any]:
    """Returns the items of a list, which the distributed format may keep as a dictionary."""
    return list(items.values()) if isinstance(items, dict) else items if isinstance(items, list) else []


def _stored(tree: ClassicTree, at: ModelRank, where: tuple[str, str]) -> Any:
    return next(chunk.tensors[where[1]] for chunk in tree.chunks[at] if chunk.key == where[0])


def _shape(tree: ClassicTree, at: ModelRank, where: tuple[str, str]) -> tuple[int, ...]:
    return tree.files[at].shape(_stored(tree, at, where))


def _decays(tree: ClassicTree, at: ModelRank, where: tuple[str, str]) -> bool:
    return not where[1].endswith(".bias") and len(_shape(tree, at, where)) > 1


def _trained(name: str) -> bool:
    return not name.endswith(".expert_bias")


def _refused(tree: ClassicTree, why: str) -> UnknownOptimizerError:
    return UnknownOptimizerError(f"{tree.directory}: the optimizer's state cannot be read ({why})")
