"""Records what the ranks of a layout do, from the start of a run to its stop, and proves their order."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from megatron.config import RunConfig
from megatron.distributed.launch import LaunchInfo
from megatron.layout import Layout
from megatron.training.assemble import Parts, assemble
from megatron.training.initialize import build_run
from megatron.training.order.agreement import disagreements
from megatron.training.order.classes import difference, others, representative, representatives
from megatron.training.order.events import Recording
from megatron.training.order.peers import Script
from megatron.training.order.recorder import Tape, recorded
from megatron.training.order.waits import STRICTEST, Rules, play
from megatron.utils.log import RankLog

Work = Callable[[Tape, Parts], None]
"""What a rank does once its parts are assembled."""


@dataclass(frozen=True)
class ClusterRecording:
    """What one rank of each class did, and some others of them."""

    layout: Layout
    programs: Mapping[int, Recording]
    """By rank: the representatives."""
    copies: Mapping[int, Recording]

    def findings(self, rules: Iterable[Rules] = (STRICTEST,)) -> list[str]:
        """Every reason for which these ranks could wait for ever; none is a proof that they do not."""
        stands_for = partial(representative, self.layout)
        found = disagreements({**self.programs, **self.copies})
        for rank, copy in self.copies.items():
            line = difference(copy, self.programs[stands_for(rank)], stands_for)
            found += [] if line is None else [f"ranks of one class differ: {line}"]
        if not found:
            for each in rules:
                found += play(self.programs, each).stuck
        return found


def train(tape: Tape, parts: Parts) -> None:
    """Two steps, an evaluation after each where the settings have any, and the last ones."""
    trainer = parts.trainer
    for name in ("first step", "second step"):
        tape.mark(name)
        trainer.fit(1)
    tape.mark("last evaluations")
    parts.evaluator.valid(trainer.progress, "the end")
    parts.evaluator.test(trainer.progress, "the end")


def record_cluster(
    config: RunConfig,
    world_size: int,
    script: ModuleType,
    *,
    work: Work = train,
    progress: Callable[[int, int], None] = lambda done, all_of_them: None,
) -> ClusterRecording:
    """Every class of ranks in turn, in this process, on the CPU."""
    layout = config.parallel.layout(world_size)
    known = Script(partial(representative, layout))
    ranks, recordings = [*representatives(layout), *others(layout)], {}
    for rank in ranks:
        recordings[rank] = record_rank(config, rank, world_size, script, work, known)
        progress(len(recordings), len(ranks))
    return ClusterRecording(
        layout,
        {rank: recordings[rank] for rank in representatives(layout)},
        {rank: recordings[rank] for rank in others(layout)},
    )


def record_rank(
    config: RunConfig, rank: int, world_size: int, script: ModuleType, work: Work, known: Script
) -> Recording:
    with recorded(rank, world_size, peers=known) as tape:
        tape.mark("start")
        launch = LaunchInfo(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        log = RankLog(rank, io.StringIO())
        run = build_run(config, launch, device=torch.device("cpu"), log=log, needs_data=False)
        with assemble(run, script.datasets_provider, script.model_provider, script.forward_step) as parts:
            work(tape, parts)
        return tape.recording
