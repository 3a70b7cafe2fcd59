"""Non-persistent checkpoints of the kind "local", as a run uses them."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron.checkpoint import paths
from megatron.checkpoint.all_ranks import run_on_all, run_on_first
from megatron.checkpoint.found_step import FoundStep, Log
from megatron.checkpoint.lineage import Line, name_of
from megatron.checkpoint.local import share
from megatron.checkpoint.local.find import Search
from megatron.checkpoint.local.replica_folder import Copies, ReplicaFolder, place_of
from megatron.checkpoint.local.save import LocalSave
from megatron.checkpoint.non_persistent import NonPersistent
from megatron.checkpoint.run_state import RunHistory, TrainState
from megatron.checkpoint.save import Save
from megatron.distributed.messages import all_gather_json


@dataclass(frozen=True)
class LocalNonPersistent(NonPersistent):
    """Non-persistent checkpoints of the kind "local"; `directory` is on this rank's machine."""

    copies: Copies = field(default_factory=Copies)

    @cached_property
    def _places(self) -> tuple[str, ...]:
        world = self.parallel.world
        places = tuple(all_gather_json(run_on_all(lambda: place_of(self.directory), world), world, str))
        self.copies.check_apart(places, self.directory)
        return places

    def _store(self, name: str) -> ReplicaFolder:
        return ReplicaFolder(self.directory / name, self.parallel.world.rank, self._places, self.copies)

    def _name(self) -> str:
        """Name of the run (`name_of`); empty if the save directory has no id, so that there are no steps."""
        return run_on_first(lambda: name_of(self.save_directory) or "", self.parallel.world, str)

    def hold(self, history: RunHistory) -> None:
        _ = self._places  # makes the directory, and checks that copies of shares are elsewhere

    def steps_here(self) -> list[int]:
        name = name_of(self.save_directory)
        directories = share.rank_directories(self.directory / name) if name else ()
        return [step for _, directory in directories for step in paths.list_steps(directory)]

    def save(self, state: TrainState, history: RunHistory, fingerprint: Mapping[str, Any]) -> Save:
        line, world = self.line(history, state.iteration), self.parallel.world
        store = self._store(line.save)
        return LocalSave(
            share.rank_directory(store.root, world.rank),
            state,
            self.parallel,
            history,
            None,
            fingerprint,
            line=line,
            store=store,
            number=run_on_first(lambda: secrets.token_hex(8), world, str),
        )

    def clear(self) -> list[str]:
        name = self._name()
        return self._store(name).keep_only(None) if name else []

    def newer(self, than: int | None, say: Log, *, check_hashes: bool = True) -> FoundStep | None:
        name = self._name()
        if not name:
            return None  # nothing was ever saved
        store = self._store(name)
        step, said = Search(store, self.parallel.world, Line(name, than), check_hashes).newest()
        for each in said:
            say(f"warning: {self.directory}: {each}")
        if step is None:
            say(f"{self.directory}: no local step continues from iteration {than or 0}, which is loaded instead")
            return None
        directory = store.root / paths.step_name(step.manifest.step)
        return FoundStep(directory, step.manifest, False, save=self.save_directory, at_hand=step.at_hand)
