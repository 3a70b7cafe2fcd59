"""Checkpoints of Megatron-LM: read as steps of ours, and written for its loaders."""

from pathlib import Path

from megatron.interop.megatron_lm.step import MegatronStep, is_classic, open_classic
from megatron.interop.megatron_lm.torch_dist import is_torch_dist, open_torch_dist
from megatron.torch_files.member_checks import MemberChecks, Say


def open_foreign(directory: Path, say: Say = lambda text: None, *, check_hashes: bool = True) -> MegatronStep | None:
    """The step in this directory if Megatron-LM wrote it; None: ours, or no step. What is read of it is compared with
    the checksums of its files; `say` is told if they have none."""
    checks = MemberChecks(say) if check_hashes else None
    if is_torch_dist(directory):
        return open_torch_dist(directory, checks)
    if is_classic(directory):
        return open_classic(directory, checks)
    return None
