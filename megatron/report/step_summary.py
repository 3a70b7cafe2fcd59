"""Summarizes a checkpoint in a few lines, and explains the other folders beside its steps."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from megatron.checkpoint import paths
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.manifest import Manifest
from megatron.errors import MegatronError
from megatron.model.parameters import WORD_TABLE


def lines(record: Manifest) -> Iterator[str]:
    count = sum(prod(each.logical_shape) for each in record.model.values())
    dtypes = sorted({each.dtype.removeprefix("torch.") for each in record.model.values()})
    yield f"model: {_shape(record)}{count} parameters in {', '.join(dtypes)}"
    kinds = sorted({kind for each in record.optimizer.values() for kind in each})
    held = [f"optimizer ({', '.join(kinds)})"] if kinds else []
    held += [{"rng": "random states"}.get(part, part) for part in record.holds if part != "optimizer"]
    yield f"state: step {record.step}, {record.consumed_train_samples} samples; {', '.join(held) or 'only weights'}"
    size = sum(file.size for file in record.files.values())
    layout = ", ".join(f"{name} {n}" for name, n in record.layout.items() if n > 1) or "one rank"
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    if record.files:
        yield f"files: {len(record.files)}, {size / 1e6:.1f} MB, {record.hash}; saved by {layout}; {versions}"


def _shape(record: Manifest) -> str:
    if "model" not in record.config or WORD_TABLE not in record.model:
        return f"{len(record.model)} tensors, "
    try:
        config, moe = model_config(record.config["model"]), moe_config(record.config)
    except MegatronError:
        return ""
    experts = f", {moe.num_experts} experts" if moe.is_on else ""
    rows = record.model[WORD_TABLE].logical_shape[0]
    return (
        f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads{experts}, "
        f"vocabulary {rows}: "
    )


def set_aside(directory: Path) -> Iterator[str]:
    """Yields the folders of a save directory that are never read, and the reason for each."""
    for entry in sorted(directory.iterdir()):
        if why := meaning(entry.name):
            yield f"{entry.name}: {why}"


def meaning(name: str) -> str | None:
    """Explains a folder's name; None if it is a step, or not one of this project's folders."""
    if name.startswith(paths.TEMPORARY):
        return (
            "an incomplete save: its run was killed or the disk was full; it is never read, other steps are "
            "untouched, and the next save here removes it"
        )
    if name.startswith(paths.TRASH):
        return "a step that retention was deleting; it is never read, and the next save removes it"
    if name.startswith((paths.BAD, ".bad-")):
        return "a step that was found damaged; it is kept and never read"
    if name.startswith((paths.ABANDONED, ".abandoned-")):
        return "a step of a rewound or replaced run; it is never read (rename it to use it again)"
    return None
