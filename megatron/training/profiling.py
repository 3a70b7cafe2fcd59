"""`--profile`: a window of iterations traced with PyTorch's profiler, and a table of where their time went."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron.config.sections import ProfileConfig
from megatron.training.hooks import writing
from megatron.training.trace_summary import STEP, read_trace, summarise
from megatron.utils.device import end_memory_history, record_memory_history
from megatron.utils.log import RankLog

Profiling = Callable[[int], AbstractContextManager[None]]


def no_profiling(iteration: int) -> AbstractContextManager[None]:
    return nullcontext()


def build_profiling(config: ProfileConfig, rank: int, device: torch.device, done: int, log: RankLog) -> Profiling:
    """What goes around every iteration. `done` iterations lie behind, in an earlier run."""
    if not config.profile:
        return no_profiling
    if done >= config.profile_step_end:
        log.warn(f"--profile: iterations up to {config.profile_step_end} are past ({done} are done); nothing is traced")
    if rank not in config.profile_ranks:
        return no_profiling
    return StepProfiler(config, rank, device)


class StepProfiler:
    """Goes around each iteration. The trace is written when the window ends, or when a step in it fails."""

    def __init__(self, config: ProfileConfig, rank: int, device: torch.device) -> None:
        self.config, self.rank, self.device = config, rank, device
        self._profile: profile | None = None
        self._first = 0

    @contextmanager
    def __call__(self, iteration: int) -> Iterator[None]:
        if iteration not in self.config.iterations:
            yield
            return
        if self._profile is None:
            self._first = iteration
            self._profile = self._begin()
        try:
            with record_function(f"{STEP}{iteration}"):
                yield
        except BaseException:
            self._end(iteration)
            raise
        if iteration == self.config.profile_step_end:
            self._end(iteration)

    def _begin(self) -> profile:
        config = self.config
        if config.record_memory_history:
            record_memory_history(self.device)
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        started = profile(
            activities=activities,
            record_shapes=config.pytorch_profiler_collect_shapes,
            with_stack=config.pytorch_profiler_collect_callstack,
            profile_memory=config.record_memory_history,
        )
        started.start()
        return started

    def _end(self, iteration: int) -> None:
        assert self._profile is not None
        self._profile.stop()
        folder = Path(self.config.profile_dir)
        path = folder / f"rank{self.rank}-iterations{self._first}-{iteration}.pt.trace.json.gz"
        partial = path.with_name(f".partial-{path.name}")
        with writing("--profile-dir", folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(partial))
            partial.replace(path)
            if self.config.record_memory_history and self.device.type == "cuda":
                end_memory_history(self.device, self._snapshot_path())
        self._profile = None
        print(f"--profile: {path}\n{summarise(read_trace(path)).table()}", flush=True)

    def _snapshot_path(self) -> Path:
        default = Path(self.config.profile_dir) / "memory.pickle"
        path = Path(self.config.memory_snapshot_path) if self.config.memory_snapshot_path else default
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")
