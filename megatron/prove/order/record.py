"""Records ranks one after the other, or several at a time in separate processes, with the same result."""

import io
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from megatron.config import RunConfig
from megatron.distributed.launch import LaunchInfo, shutdown
from megatron.errors import MegatronError
from megatron.layout import Layout
from megatron.prove.order.classes import representative
from megatron.prove.order.events import Recording
from megatron.prove.order.large import as_large_on_accelerators
from megatron.prove.order.peers import Script, pack_broadcasts, unpack_broadcasts
from megatron.prove.order.recorder import Tape, recorded
from megatron.training.assemble import assemble
from megatron.training.checkpointing import held_save_directory
from megatron.training.exit import as_megatron_error, in_one_line
from megatron.training.hooks import Hook
from megatron.training.initialize import build_run
from megatron.training.program import train_and_evaluate
from megatron.utils.log import RankLog
from megatron.utils.pool import WorkerDiedError, WorkerPool

FIRST_STEP, LATER = "first step", "later"

Report = Callable[[], None]
"""Called after a rank was recorded."""
Recordings = dict[str, dict[int, Recording]]
"""Recordings by name of the run and by rank."""


class RecordError(MegatronError):
    """Error of a process that could not record its ranks."""

    def __init__(self, lines: tuple[str, ...], exit_code: int = 2, calls: str = "") -> None:
        super().__init__("; ".join(lines))
        self._lines, self.exit_code, self.calls = lines, exit_code, calls

    def __reduce__(self) -> "tuple[type[RecordError], tuple[Any, ...]]":  # sent between processes
        return RecordError, (self._lines, self.exit_code, self.calls)

    @property
    def lines(self) -> tuple[str, ...]:
        return self._lines


@dataclass(frozen=True)
class _Task:
    run: str
    ranks: tuple[int, ...]
    known: bytes
    """Packed broadcasts that the group recorded before (`waves`) sent or received."""


@dataclass(frozen=True)
class _Answer:
    task: _Task
    recordings: Mapping[int, Recording]
    broadcasts: bytes
    """Packed broadcasts: those of `known`, and those that the ranks of this task sent."""


def record_ranks(
    runs: Mapping[str, RunConfig],
    ranks: Iterable[int],
    layout: Layout,
    script: ModuleType,
    *,
    workers: int = 1,
    report: Report = lambda: None,
) -> Recordings:
    """Records each of `ranks` in each of `runs`, on the CPU, with made-up peers, in `workers` processes at a time. The
    recordings do not depend on `workers`."""
    recordings: Recordings = {run: {} for run in runs}
    broadcasts: dict[tuple[str, int | None], bytes] = {(run, None): pack_broadcasts({}) for run in runs}
    with _answering(_Recorder(runs, layout, script), workers, report) as answers_to:
        for wave in waves(layout, ranks):
            tasks = [_Task(run, group, broadcasts[run, before]) for run in runs for group, before in wave.items()]
            for answer in answers_to(tasks):
                run, first = answer.task.run, answer.task.ranks[0]
                recordings[run] |= answer.recordings
                broadcasts[run, first] = answer.broadcasts
    return recordings


def waves(layout: Layout, ranks: Iterable[int]) -> list[dict[tuple[int, ...], int | None]]:
    """Groups `ranks` by tensor-parallel group, in the order of recording: the first group, the first of every other
    stage, and the rest. Each group is paired with the first rank of an earlier group, whose broadcasts, sent and
    received, are then known."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        groups.setdefault(rank // layout.tp, []).append(rank)
    first: dict[int, int] = {}
    found: list[dict[tuple[int, ...], int | None]] = [{}, {}, {}]
    for group in groups.values():
        stage = layout.coordinates(group[0]).pp
        if stage in first:
            found[2][tuple(group)] = first[stage]
        else:
            found[1 if first else 0][tuple(group)] = next(iter(first.values()), None)
            first[stage] = group[0]
    return found


@contextmanager
def _answering(
    recorder: "_Recorder", workers: int, report: Report
) -> Iterator[Callable[[Sequence[_Task]], Iterator[_Answer]]]:
    if workers == 1:
        yield lambda tasks: (recorder(task, lambda note: report()) for task in tasks)
        return
    with WorkerPool[_Task, _Answer | RecordError](partial(_or_failure, recorder), workers) as pool:

        def answers_to(tasks: Sequence[_Task]) -> Iterator[_Answer]:
            try:
                for answer in pool.map(iter(tasks), described=lambda task: task.ranks, noted=lambda note: report()):
                    if isinstance(answer, RecordError):
                        raise answer
                    yield answer
            except WorkerDiedError as death:
                line = (
                    f"the process that recorded ranks {death.task} died (exit code {death.exit_code}); if memory "
                    f"ran out, lower --workers (now {workers})"
                )
                raise RecordError((line,)) from None

        yield answers_to


def _or_failure(recorder: "_Recorder", task: _Task, note: Callable[[None], None]) -> _Answer | RecordError:
    torch.set_num_threads(1)  # a forked process must not enter its parent's OpenMP team: it would hang
    try:
        return recorder(task, note)
    except Exception as error:
        told, calls = as_megatron_error(error), traceback.format_exc()
        if isinstance(told, MegatronError):
            return RecordError(told.lines, told.exit_code, calls)
        return RecordError((f"{in_one_line(told)}; --traceback shows the calls",), 2, calls)


@dataclass(frozen=True)
class _Recorder:
    runs: Mapping[str, RunConfig]
    layout: Layout
    script: ModuleType

    def __call__(self, task: _Task, note: Callable[[None], None]) -> _Answer:
        peers = Script(partial(representative, self.layout), unpack_broadcasts(task.known))
        config, recordings = _in_own_directories(self.runs[task.run], task.ranks[0]), {}
        with as_large_on_accelerators():
            for rank in task.ranks:
                recordings[rank] = _record_rank(config, rank, self.layout.world_size, self.script, peers)
                note(None)
        return _Answer(task, recordings, pack_broadcasts(peers.broadcasts))


def _in_own_directories(config: RunConfig, group: int) -> RunConfig:
    """Gives this group its own directories for saves, because several groups save at the same time."""
    asked = config.checkpoint
    save, local = asked.save, asked.non_persistent_local_ckpt_dir
    own = replace(
        asked,
        save=save and f"{save}/of-{group}",
        non_persistent_local_ckpt_dir=local and f"{local}/of-{group}",
    )
    return replace(config, checkpoint=own)


def _record_rank(config: RunConfig, rank: int, world_size: int, script: ModuleType, peers: Script) -> Recording:
    with recorded(rank, world_size, peers=peers) as tape:
        tape.mark("start")
        launch = LaunchInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        log = RankLog(rank, io.StringIO())
        run = build_run(config, launch, device=torch.device("cpu"), log=log, needs_data=False)
        providers = script.datasets_provider, script.model_provider, script.forward_step
        with held_save_directory(run) as (history, exit_record):
            with assemble(run, *providers, history, [_Marks(tape)]) as parts:
                reason = train_and_evaluate(run, parts)
            exit_record.ended(reason, parts.progress.iteration)
        shutdown()
        return tape.recording


class _Marks(Hook):
    def __init__(self, tape: Tape) -> None:
        self._tape, self._names = tape, iter((FIRST_STEP, LATER))

    def before_iteration(self, iteration: int) -> None:
        if (name := next(self._names, None)) is not None:
            self._tape.mark(name)
