"""Checkpoints of Megatron-LM: read as steps of ours, and written for its loaders."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.megatron_lm.step import ForeignStep, is_classic, open_classic
from megatron.checkpoint.megatron_lm.torch_dist import is_torch_dist, open_torch_dist

__all__ = ["ForeignStep", "open_foreign"]


def open_foreign(directory: Path) -> ForeignStep | None:
    """The step in this directory if Megatron-LM wrote it; None: ours, or no step."""
    if is_torch_dist(directory):
        return open_torch_dist(directory)
    if is_classic(directory):
        return open_classic(directory)
    return None
