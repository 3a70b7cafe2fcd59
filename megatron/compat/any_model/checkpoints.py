"""Checkpoints of the engine: DIR/TAG has this project's format, and DIR/latest names the tag that was saved last."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.all_ranks import do_on_first, run_on_first
from megatron.checkpoint.besides_tensors import saved_values
from megatron.checkpoint.found_step import FoundStep, find_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.paths import TRACKER
from megatron.checkpoint.run_state import LoadedState, RunHistory, TrainState, writes
from megatron.checkpoint.save import save_checkpoint
from megatron.compat.any_model.facts import EngineFacts
from megatron.compat.any_model.plain import mark_types, restore_types
from megatron.data_parallel import FullySharded
from megatron.distributed.messages import all_gather_json, broadcast_json
from megatron.distributed.rng import get_rng_state, set_rng_state
from megatron.errors import CheckpointError, ConfigError, StorageError
from megatron.interop.source import OTHER_PROGRAMS
from megatron.optimizer import Optimizer, state_shards
from megatron.parallelize import persistent_buffers
from megatron.state.division import Range
from megatron.state.shard import Shard
from megatron.utils import durable

LATEST = "latest"
_IN_A_RUN_OF_FLAGS = {
    "--no-load-optim": "load_optimizer_states=False",
    "--no-load-rng": "load_module_only=True",
    "--finetune": "load_module_only=True",
    "--load ": "load_checkpoint: ",
    "--save ": "save_checkpoint: ",
}
"""Flags in checkpoint messages, and their names in calls of the engine."""


@dataclass
class EngineCheckpoints:
    engine: EngineFacts
    core: Optimizer
    divided: FullySharded | None
    """The sharded weights; None if every rank has whole ones."""
    history: RunHistory = field(init=False)

    def __post_init__(self) -> None:
        world = self.engine.place.parallel.world
        self.history = RunHistory(broadcast_json(uuid.uuid4().hex[:12], world, str))

    def save(
        self, save_dir: Path, tag: str | None, client_state: Mapping[str, Any], *, save_latest: bool = True
    ) -> None:
        engine, parallel = self.engine, self.engine.place.parallel
        self._check_boundary()
        name = _checked_tag(f"global_step{engine.global_steps}" if tag is None else str(tag), parallel.world)
        directory = save_dir / name
        state = self._state(client_state)
        if engine.global_steps in self.history.committed_steps(directory):  # saved again, with another client_state
            self.history.committed_steps(directory).discard(engine.global_steps)
        self.history.loaded.pop(directory.resolve(), None)
        with _in_words_of_the_engine():
            try:
                info = save_checkpoint(
                    directory, state, parallel=parallel, save_tokenizer=None, history=self.history, retain_last=1
                )
            finally:
                self.history.close()
            if save_latest:
                do_on_first(lambda: _write_latest(save_dir, name), parallel.world)
        for message in info.messages:
            engine.log.info(message)

    def load(self, load_dir: Path, tag: str | None, *, optimizer: bool, scheduler: bool, weights_only: bool) -> Any:
        engine, parallel = self.engine, self.engine.place.parallel
        self._check_boundary()
        with _in_words_of_the_engine():
            directory = Path(run_on_first(lambda: str(_chosen(load_dir, tag)), parallel.world, str))
            found = find_checkpoint(
                directory, parallel=parallel, history=self.history, log=engine.log.info, source=OTHER_PROGRAMS
            )
            assert found is not None, "only a save directory may be empty"
            loaded = self._read(found, optimizer=optimizer, weights_only=weights_only)
            extra = restore_types(loaded.extra)
            if not weights_only:
                self._restore(loaded, extra.get("engine", {}))
                if scheduler:
                    self._restore_scheduler(extra.get("scheduler"))
            else:
                self.core.refresh_masters()
        engine.log.info(f"loaded {found.directory}: continuing after step {engine.global_steps}")
        return str(found.directory), extra.get("client_state", {})

    def _read(self, found: FoundStep, *, optimizer: bool, weights_only: bool) -> LoadedState:
        return load_checkpoint(
            found,
            parallel=self.engine.place.parallel,
            params=self._params(),
            take=None if self.divided is None else self.divided.take,
            held=self._held,
            finetune=weights_only,
            load_optim=optimizer,
            load_rng=not weights_only,
            history=self.history,
            log=self.engine.log.info,
        )

    def _held(self, name: str) -> Range | None:
        return self.core.held(name) if name in self.core.store.names else None

    def _restore(self, loaded: LoadedState, counters: Mapping[str, Any]) -> None:
        engine = self.engine
        if loaded.optimizer is not None:
            with saved_values("optimizer state", loaded.path, "give --no-load-optim to start it anew"):
                held = {name: loaded.optimizer[name] for name in self.core.state()}
                self.core.load_state(held, restore_types(loaded.optimizer_extra or {}))
        else:
            self.core.refresh_masters()
        engine.restore_counters(loaded.iteration, counters.get("skipped_steps", 0), loaded.consumed_train_samples)
        if loaded.rng is not None:
            with saved_values("random states", loaded.path, "give load_module_only=True to load only the weights"):
                set_rng_state(loaded.rng, engine.place.device)

    def _restore_scheduler(self, state: Mapping[str, Any] | None) -> None:
        scheduler = self.engine.lr_scheduler
        if scheduler is None or not hasattr(scheduler, "load_state_dict"):
            return
        if state is None:
            raise CheckpointError(
                "the checkpoint was saved without a scheduler, but the engine has one; give "
                "load_lr_scheduler_states=False to start it anew"
            )
        scheduler.load_state_dict(state)

    def _check_boundary(self) -> None:
        done, of = self.engine.accumulated, self.engine.gradient_accumulation_steps()
        if done:
            raise ConfigError(
                f"checkpoint: {done} of {of} micro-batches of an update are done, and a checkpoint does not hold their "
                "gradients; save or load after the update (when engine.global_steps has increased)"
            )

    def _state(self, client_state: Mapping[str, Any]) -> TrainState:
        engine, scheduler = self.engine, self.engine.lr_scheduler
        own, params = self.core.state(), self._params()
        shards = state_shards(self.core.store, {name: spec for name, (spec, _) in params.items()})
        trained = [name for name, one in engine.module.named_parameters() if one.requires_grad]
        kept = {
            "client_state": dict(client_state),
            "scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "engine": {"skipped_steps": engine.skipped_steps},
        }
        return TrainState(
            params=self._whole_params(params),
            config={"engine": {"zero_stage": engine.settings.zero_stage, "model": type(engine.module).__name__}},
            iteration=engine.global_steps,
            consumed_train_samples=engine.global_samples,
            optimizer={
                name: {kind: (shards[name], tensor) for kind, tensor in own.get(name, {}).items()}
                for name in {**dict.fromkeys(trained), **own}
            },
            replicas=self.core.store.axes,
            optimizer_extra=mark_types(self.core.extra_state(), "optimizer"),
            rng=get_rng_state(engine.place.device),
            extra={name: mark_types(value, name) for name, value in kept.items()},
        )

    def _whole_params(self, params: Mapping[str, tuple[Shard, Tensor]]) -> dict[str, tuple[Shard, Tensor]]:
        """Gathers sharded tensors of `params` on the ranks that write them. A collective."""
        whole = dict(params)
        if self.divided is None:
            return whole
        for name in self.divided.all_names:
            weight = self.divided.whole_weight(name)
            if writes(self.engine.place.parallel):
                whole[name] = (whole[name][0], weight.cpu())
        return whole

    def _params(self) -> dict[str, tuple[Shard, Tensor]]:
        """Returns the parameters and the persistent buffers, each with its full shape. Looks them up again in every
        call, because a forward pass may replace buffers."""
        module = self.engine.module
        parameters = dict(module.named_parameters())
        if self.divided is not None:
            parameters = {name: self.divided.parameter(name) for name in self.divided.all_names}
        tensors = {**parameters, **persistent_buffers(module)}
        return {name: (Shard(name, tuple(tensor.shape)), tensor) for name, tensor in tensors.items()}


def _checked_tag(tag: str, world: Any) -> str:
    if not tag or tag in (".", "..", LATEST) or Path(tag).name != tag:
        raise ConfigError(f"save_checkpoint: tag {tag!r} is not a directory name; give a name such as global_step100")
    others = [other for other in all_gather_json(tag, world, str) if other != tag]
    if others:
        raise ConfigError(
            f"save_checkpoint: tag is {tag!r} on this rank and {others[0]!r} on another; give all ranks one tag"
        )
    return tag


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Writes a file for torch.load."""
    temporary = durable.temporary_of(path)
    with durable.writing(path):
        durable.make_directory(path.parent)
        try:
            torch.save(dict(state), temporary)
            durable.fsync_file(temporary)
            temporary.replace(path)
            durable.fsync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _write_latest(save_dir: Path, tag: str) -> None:
    with durable.writing(save_dir / LATEST):
        durable.write_atomically(save_dir / LATEST, [tag.encode()])


def _chosen(load_dir: Path, tag: str | None) -> Path:
    if not load_dir.is_dir():
        raise ConfigError(f"load_checkpoint: {load_dir} does not exist; give the directory of save_checkpoint")
    if tag is None:
        named = load_dir / LATEST
        if not named.is_file():
            if (load_dir / TRACKER).is_file():
                return load_dir  # the directory of one tag, or the --save of a run of pretrain_gpt.py
            raise ConfigError(
                f"load_checkpoint: {load_dir} has no file {LATEST}, so nothing was saved there; give the directory of "
                "save_checkpoint, or a tag"
            )
        tag = named.read_text(encoding="utf-8").strip()
    if not tag or Path(tag).name != tag or not (load_dir / tag).is_dir():
        there = sorted(path.parent.name for path in load_dir.glob(f"*/{TRACKER}"))
        raise ConfigError(f"load_checkpoint: {load_dir} has no tag {tag!r}; it has {', '.join(there[:8]) or 'none'}")
    return load_dir / tag


@contextmanager
def _in_words_of_the_engine() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, ConfigError, StorageError) as error:
        text = str(error)
        for flag, here in _IN_A_RUN_OF_FLAGS.items():
            text = text.replace(flag, here)
        raise type(error)(text) from error


def directory_of(what: str, value: Any) -> Path:
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    raise ConfigError(f"{what} is {value!r}, which is not a path; give a directory")
