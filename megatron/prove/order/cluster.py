"""Records what the ranks of a layout do, from the start of a run to its stop, and proves their order."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from megatron.config import CheckpointConfig, EvaluationConfig, RunConfig
from megatron.distributed.launch import LaunchInfo
from megatron.layout import Layout
from megatron.prove.check_layout.reproducible import alone
from megatron.prove.order.agreement import disagreements
from megatron.prove.order.classes import difference, others, representative, representatives
from megatron.prove.order.events import Recording
from megatron.prove.order.record import Report, record_ranks
from megatron.prove.order.waits import STRICTEST, Rules, play
from megatron.training.assemble import assemble
from megatron.training.checkpointing import held_save_directory
from megatron.training.initialize import build_run
from megatron.training.resume import Progress
from megatron.utils.log import RankLog


@dataclass(frozen=True)
class ClusterRecording:
    """What one rank of each class did in one run, and some others of them."""

    layout: Layout
    programs: Mapping[int, Recording]
    """By rank: the representatives."""
    copies: Mapping[int, Recording]
    divided: bool = False
    """Whether replicas divide what they update."""
    alike: bool = True
    """Whether replicas ask for the same. With Muon the replica that computes a matrix sends it to its own ranks first:
    then ranks of one class are not compared, and their groups' agreement is what is shown."""

    def findings(self, weaker: Iterable[Rules] = ()) -> list[str]:
        """Every reason for which these ranks could wait for ever; none is a proof that they do not. What does not end
        under the strictest rules is tried under `weaker` ones, too; what ends under the strictest ends under all."""
        stands_for = partial(representative, self.layout)
        found = disagreements({**self.programs, **self.copies})
        for rank, copy in self.copies.items() if self.alike else ():
            line = difference(copy, self.programs[stands_for(rank)], stands_for, divided=self.divided)
            found += [] if line is None else [f"ranks of one class differ: {line}"]
        if not found and (found := play(self.programs, STRICTEST).stuck):
            for each in weaker:
                found += play(self.programs, each).stuck
        return found


def record_runs(
    config: RunConfig,
    world_size: int,
    script: ModuleType,
    folder: Path,
    *,
    before: Path | None = None,
    copies: Sequence[int] | None = None,
    workers: int = 1,
    report: Report = lambda: None,
) -> dict[str, ClusterRecording]:
    """The two runs that a training is made of, whether or not the settings ask for both: one from its start over its
    steps, evaluations and a save to its stop, and one that goes on from a checkpoint. `folder` is for the files.
    `before`: where `save_by_one_process` saved that checkpoint; unset, it is saved here."""
    if before is None:
        before = folder / "before"
        save_by_one_process(config, before, script)
    asked = _as_often_as_can_be(config.checkpoint, folder / "local")
    new = replace(asked, save=str(folder / "new"), load=None, finetune=False, load_optim=True, load_rng=True)
    resumed = replace(asked, save=None, load=str(before), save_optim=True, save_rng=True, async_save=False)
    resumed = replace(resumed, save_retain_interval=None, save_retain_last=None)
    runs = {
        "a new run": replace(config, checkpoint=new),
        "a resumed run": replace(config, checkpoint=resumed, evaluation=EvaluationConfig(eval_iters=0)),
    }
    return record_clusters(runs, world_size, script, copies, workers=workers, report=report)


def _as_often_as_can_be(asked: CheckpointConfig, local: Path) -> CheckpointConfig:
    """The settings of saves, changed so that every kind that is asked for happens within two steps, in directories of
    this machine. Non-persistent steps are not copied to other ranks: that needs a directory of each machine's own."""
    between = asked.non_persistent_ckpt_type is not None
    return replace(
        asked,
        save_interval=None if between else asked.save_interval and 1,
        non_persistent_save_interval=1 if between else None,
        non_persistent_global_ckpt_dir=None,
        non_persistent_local_ckpt_dir=str(local) if asked.non_persistent_ckpt_type == "local" else None,
        replication=False,
        replication_jump=None,
        ckpt_step=None,
        exit_on_missing_checkpoint=False,
    )


def compared_ranks(config: RunConfig, world_size: int) -> list[int]:
    """Ranks that are compared with the representative of their class."""
    whole_groups = config.parallel.zero > 0 or config.optimizer.uses_muon
    return others(config.parallel.layout(world_size), divided=whole_groups)


def by_one_process(config: RunConfig) -> RunConfig:
    """All that decides what `save_by_one_process` saves."""
    return replace(alone(config), checkpoint=CheckpointConfig())


def save_by_one_process(config: RunConfig, folder: Path, script: ModuleType) -> None:
    """The checkpoint that the resumed run goes on from: every layout loads it."""
    config = replace(by_one_process(config), checkpoint=CheckpointConfig(save=str(folder)))
    assert config.training.global_batch_size is not None
    run = build_run(config, LaunchInfo(), device=torch.device("cpu"), log=RankLog(0, io.StringIO()), needs_data=False)
    providers = script.datasets_provider, script.model_provider, script.forward_step
    with held_save_directory(run) as (history, _), assemble(run, *providers, history) as parts:
        parts.checkpoints.save(Progress(iteration=1, consumed_train_samples=config.training.global_batch_size))


def record_clusters(
    runs: Mapping[str, RunConfig],
    world_size: int,
    script: ModuleType,
    copies: Sequence[int] | None = None,
    *,
    workers: int = 1,
    report: Report = lambda: None,
) -> dict[str, ClusterRecording]:
    """`copies` unset: those of `compared_ranks`."""
    config = next(iter(runs.values()))
    layout = config.parallel.layout(world_size)
    chosen, compared = representatives(layout), compared_ranks(config, world_size) if copies is None else copies
    found = record_ranks(runs, [*chosen, *compared], layout, script, workers=workers, report=report)
    return {
        run: ClusterRecording(
            layout,
            {rank: recordings[rank] for rank in chosen},
            {rank: recordings[rank] for rank in compared},
            divided=config.parallel.zero > 0,
            alike=not config.optimizer.uses_muon,
        )
        for run, recordings in found.items()
    }
