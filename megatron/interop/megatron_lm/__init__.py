"""Checkpoints of Megatron-LM: reads them as this project's steps, and writes them for its loaders."""

from pathlib import Path

from megatron.interop.megatron_lm.step import MegatronStep, is_classic, open_classic
from megatron.interop.megatron_lm.torch_dist import is_torch_dist, open_torch_dist
from megatron.torch_files.member_checks import MemberChecks, Say


def open_foreign(directory: Path, say: Say = lambda text: None, *, check_hashes: bool = True) -> MegatronStep | None:
    """Opens the step in this directory. Returns None if it is a native step or no step. With `check_hashes`, all reads
    are compared with the checksums in the files; `say` reports files without checksums."""
    checks = MemberChecks(say) if check_hashes else None
    if is_torch_dist(directory):
        return open_torch_dist(directory, checks)
    if is_classic(directory):
        return open_classic(directory, checks)
    return None
