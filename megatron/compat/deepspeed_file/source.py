"""Reads `--deepspeed --deepspeed_config FILE` as a source of settings beside flags and --config."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.compat.deepspeed_file.read import read_deepspeed
from megatron.config.refusals import Refusals
from megatron.config.run import settings_by_name
from megatron.config.sources import Assignments, value_of
from megatron.config.values import show
from megatron.errors import ConfigError


def deepspeed_assignments(others: Sequence[Assignments], refusals: Refusals) -> Assignments | None:
    """Returns the settings of the DeepSpeed file that the command line or a --config file names."""
    path = value_of(others, "deepspeed_config")
    if path is None or not value_of(others, "deepspeed"):
        return None
    stronger = {name: value for source in others for name, value in source.values.items()}
    assignments = read_deepspeed(path, refusals=refusals, stronger=stronger)
    _complete_schedule(assignments, stronger)
    for other in others:
        _compare(assignments, other, refusals)
    return assignments


def _complete_schedule(assignments: Assignments, stronger: Mapping[str, Any]) -> None:
    """Sets the length of a decaying schedule to --train-iters if the file lacks it; DeepSpeed requires it."""
    kind, train_iters = assignments.values.get("lr_schedule"), stronger.get("train_iters")
    if kind not in ("WarmupDecayLR", "WarmupCosineLR") or stronger.get("lr_schedule", kind) != kind:
        return
    if "total_num_steps" in assignments.values or "total_num_steps" in stronger:
        return
    if train_iters is not None:
        assignments.set(
            settings_by_name()["total_num_steps"], train_iters, f"scheduler.type {kind} without total_num_steps"
        )
        assignments.notices.append(
            f"{assignments.origin}: scheduler.type {kind}: total_num_steps is missing (DeepSpeed requires it); "
            f"--train-iters {train_iters} is used"
        )


def _compare(assignments: Assignments, other: Assignments, refusals: Refusals) -> None:
    """Lets flags replace values of the file, with a notice; rejects another file that disagrees."""
    for name in assignments.values.keys() & other.values.keys():
        mine, theirs = assignments.values[name], other.values[name]
        if mine == theirs:
            continue
        here = f"{assignments.spelled[name]} of {assignments.origin}"
        if other.origin == "flag":
            assignments.notices.append(f"{other.spelled[name]}: replaces {here}")
        else:
            given = f"{settings_by_name()[name].spelling} {show(theirs)} of {other.origin.removeprefix('file ')}"
            refusals.refuse(ConfigError(f"{here} and {given} disagree; keep one of them"))
