"""Profiling: which steps and ranks are traced, and where the traces go."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    profile: bool = flag(False, "Trace a window of steps with PyTorch's profiler and print where the time went.")
    profile_step_start: int = flag(10, "The trace begins after this iteration.", at_least=0)
    profile_step_end: int = flag(12, "The last iteration that is traced.", at_least=1)
    profile_ranks: tuple[int, ...] = flag((0,), "The ranks that are traced.", nargs="+")
    profile_dir: str = flag("profile", "Folder of the traces; tools/profile_summary.py reads them.")
    use_pytorch_profiler: bool = flag(
        False, "Trace with PyTorch's profiler.", status="no-op", note="--profile always does"
    )
    pytorch_profiler_collect_shapes: bool = flag(False, "Record the input shapes of every operation.")
    pytorch_profiler_collect_callstack: bool = flag(False, "Record the Python call stack of every operation.")
    record_memory_history: bool = flag(
        False, "Record every allocation of the window: in the trace, and on CUDA as a memory snapshot too."
    )
    memory_snapshot_path: str | None = flag(
        None, "The memory snapshot of the window (CUDA); .rankN is put before its ending."
    )

    @property
    def iterations(self) -> range:
        return range(self.profile_step_start + 1, self.profile_step_end + 1)
