"""Reads what a `torch_dist` directory holds besides tensors: arguments, counters, the optimizer's groups."""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from megatron.checkpoint import paths
from megatron.errors import CheckpointError
from megatron.interop.megatron_lm.advice import NOT_A_GPT
from megatron.interop.megatron_lm.dcp import METADATA, DistDirectory
from megatron.torch_files.torch_file import TorchFile

STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg_sq|exp_avg|fp32_param|param)\.(.+)")
"""Keys of the optimizer's tensors: (kind, key of the parameter)."""
_COMMON = "common.pt"
_WANTED_BLOBS = ("args", "iteration", "checkpoint_version", "opt_param_scheduler", "optimizer", "common")


def common_content(found: DistDirectory) -> tuple[Mapping[str, Any], TorchFile]:
    """Returns everything but tensors: the content of a file, or in later versions entries of the metadata."""
    path = found.directory / _COMMON
    if path.exists():
        file = TorchFile.open(paths.member(found.directory, _COMMON), found.checks)
        if not isinstance(file.content, dict):
            raise CheckpointError(f"{path} holds no dictionary: it is not a checkpoint of Megatron-LM; {NOT_A_GPT}")
        return file.content, file
    content: dict[str, Any] = {}
    opened: TorchFile | None = None
    for key, place in found.blobs.items():
        names = key.partition("/")[0].removeprefix("common.").split(".")
        if names[0] not in _WANTED_BLOBS or len(names) > 8:
            continue
        opened = found.content(place, key)
        value = _with_numbers(opened, opened.content)
        if "/shard_" in key and isinstance(value, list) and len(value) == 1:
            value = value[0]
        if names == ["common"] and isinstance(value, dict):
            content |= value
            continue
        _put(content, names, value)
    if opened is None:
        raise CheckpointError(
            f"{found.directory} has no {_COMMON} and no args in its {METADATA}: it is not a GPT of Megatron-LM; "
            f"{NOT_A_GPT}"
        )
    for key, tensor in found.tensors.items():
        if key.startswith("optimizer.") and prod(tensor.shape) == 1 and not STATE.fullmatch(key):
            _put(content, key.split("."), found.read(key, [(0, 1)] * len(tensor.shape)).item())
    return content, opened


def _put(content: dict[str, Any], names: list[str], value: Any) -> None:
    for name in names[:-1]:
        inner = content.setdefault(name, {})
        content = inner if isinstance(inner, dict) else {}
    content[names[-1]] = value


def _with_numbers(file: TorchFile, value: Any) -> Any:
    """Replaces one-element tensors by numbers, because callers cannot tell which file an entry came from."""
    if isinstance(value, dict):
        return {key: _with_numbers(file, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(file, each) for each in value]
    return file.tensor(value).item() if file.is_tensor(value) and file.shape(value) in ((), (1,)) else value
