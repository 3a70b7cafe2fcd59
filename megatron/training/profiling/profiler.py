"""Traces a window of iterations with PyTorch's profiler and prints how their time is divided (`--profile`)."""

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron.config import ProfileConfig
from megatron.training.hooks import Hook
from megatron.training.metric_writers import writing_file_of
from megatron.training.profiling.trace_summary import STEP, read_trace, summarise
from megatron.utils.device import end_memory_history, record_memory_history
from megatron.utils.device_kind import kind_of
from megatron.utils.log import RankLog, print_line, print_lines


def build_profiler(
    config: ProfileConfig, rank: int, device: torch.device, done: int, log: RankLog
) -> "list[StepProfiler]":
    """Builds at most one profiler. `done`: number of iterations completed by earlier runs."""
    past = config.profile and done >= config.profile_step_end
    if past:
        log.warn(
            f"--profile: nothing is traced, because {done} iterations are done already, past --profile-step-end "
            f"{config.profile_step_end}"
        )
    elif config.profile and config.memory_snapshot_path is not None and not kind_of(device.type).memory_history:
        log.warn(
            f"--memory-snapshot-path {config.memory_snapshot_path}: requires a GPU, but there is none here; the trace "
            "shows the allocations instead"
        )
    wanted = config.profile and not past and rank in config.profile_ranks
    return [StepProfiler(config, rank, device)] if wanted else []


class StepProfiler(Hook):
    """Traces a window of iterations. The trace is written when the window ends, or when the run ends within it."""

    def __init__(self, config: ProfileConfig, rank: int, device: torch.device) -> None:
        self.config, self.rank, self.device = config, rank, device
        self._profile: profile | None = None
        self._iteration = ExitStack()  # open while an iteration is traced
        self._first, self._last = 0, 0  # first and last traced iteration

    def before_iteration(self, iteration: int) -> None:
        if iteration not in self.config.iterations:
            return
        if self._profile is None:
            self._first = iteration
            self._profile = self._begin()
        self._last = iteration
        self._iteration.enter_context(record_function(f"{STEP}{iteration}"))

    def after_iteration(self, iteration: int) -> None:
        self._iteration.close()
        if self._profile is not None and iteration == self.config.profile_step_end:
            self._end()

    def on_end(self) -> None:
        """Writes a window that was cut short. If the window was never reached, one rank logs that."""
        self._iteration.close()
        if self._profile is not None:
            self._end()
        elif not self._last and self.rank == min(self.config.profile_ranks):
            start = self.config.profile_step_start
            print_line(
                f"warning: --profile-step-start {start}: nothing was traced, because the run ended earlier", sys.stdout
            )

    def _begin(self) -> profile:
        config = self.config
        if config.record_memory_history:
            record_memory_history(self.device)
        activities = [ProfilerActivity.CPU]
        if kind_of(self.device.type).cuda_libraries:
            activities.append(ProfilerActivity.CUDA)
        started = profile(
            activities=activities,
            record_shapes=config.pytorch_profiler_collect_shapes,
            with_stack=config.pytorch_profiler_collect_callstack,
            profile_memory=config.record_memory_history,
        )
        started.start()
        return started

    def _end(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        folder = Path(self.config.profile_dir)
        path = folder / f"rank{self.rank}-iterations{self._first}-{self._last}.pt.trace.json.gz"
        partial = path.with_name(f".partial-{path.name}")
        with writing_file_of("--profile-dir", folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(partial))
            partial.replace(path)
            if self.config.record_memory_history and kind_of(self.device.type).memory_history:
                end_memory_history(self.device, self._snapshot_path())
        self._profile = None
        print_lines([f"--profile: {path}", *summarise(read_trace(path)).table().split("\n")], sys.stdout)

    def _snapshot_path(self) -> Path:
        default = Path(self.config.profile_dir) / "memory.pickle"
        path = Path(self.config.memory_snapshot_path) if self.config.memory_snapshot_path else default
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
