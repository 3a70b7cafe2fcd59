"""Records what the ranks of a layout do, from the start of a run to its stop, and proves that they do not deadlock."""

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
    """Recordings of one run: one rank of each class, and some further ranks."""

    layout: Layout
    programs: Mapping[int, Recording]
    """Recordings of the representatives, by rank."""
    copies: Mapping[int, Recording]
    divided: bool = False
    """True if replicas divide the parameters that they update."""
    alike: bool = True
    """True if replicas issue the same operations. With Muon the replica that computes a matrix first sends it to its
    own ranks. Ranks of one class are then not compared; only their groups are shown to agree."""

    def findings(self, weaker: Iterable[Rules] = ()) -> list[str]:
        """Returns every reason why these ranks could hang; an empty list proves that they do not. A hang under the
        strictest rules is also tried under `weaker` ones. A run that ends under the strictest ends under all."""
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
    """Records a new run and a resumed run, even if the settings ask for only one of them. The new run has its steps,
    evaluations, a save and its stop; the resumed run starts from a checkpoint. Files go to `folder`. `before` is the
    directory of that checkpoint from `save_by_one_process`; if it is None, the checkpoint is saved here."""
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
    """Changes the settings of saves so that every requested kind happens within two steps, in directories of this
    machine. Non-persistent steps are not copied to other ranks, which needs a directory on each machine."""
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
    """Returns ranks that are compared with the representative of their class."""
    whole_groups = config.parallel.zero > 0 or config.optimizer.uses_muon
    return others(config.parallel.layout(world_size), divided=whole_groups)


def by_one_process(config: RunConfig) -> RunConfig:
    """Returns all settings that decide what `save_by_one_process` saves."""
    return replace(alone(config), checkpoint=CheckpointConfig())


def save_by_one_process(config: RunConfig, folder: Path, script: ModuleType) -> None:
    """Saves the checkpoint from which the resumed run continues; every layout can load it."""
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
    """Records the representative of each class of ranks, and `copies`: ranks to compare with it, by default those of
    `compared_ranks`."""
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
