"""Saves a local step like any other step, but each rank commits its own share and sends it to the ranks that keep
copies."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint import paths, retention, storage
from megatron.checkpoint.all_ranks import run_on_all
from megatron.checkpoint.content import collect_notes
from megatron.checkpoint.local import share
from megatron.checkpoint.local.replica_folder import ReplicaFolder
from megatron.checkpoint.local.share import ShareRecord
from megatron.checkpoint.local.transfer import ReceivedFiles, blocks_of, swap
from megatron.checkpoint.run_state import Retention
from megatron.checkpoint.save import Committed, Save
from megatron.distributed.messages import all_gather_json
from megatron.distributed.streams import stream
from megatron.utils import durable


@dataclass(frozen=True, kw_only=True)
class LocalSave(Save):
    """Save of a local step; `directory` is for this rank's shares."""

    store: ReplicaFolder
    number: str
    """Id of this save: the same on all ranks, and in no other save."""

    @property
    def _given(self) -> str:
        return f"--non-persistent-local-ckpt-dir {self.store.root.parent}"

    def begin(self) -> None:
        """Prepares like any other save, but never returns an existing step: other ranks may have lost their shares."""
        sizes = all_gather_json(self._bytes_to_write(), self.parallel.world, int)
        need = sum(sizes[rank] for rank in self.store.kept_here)
        run_on_all(lambda: self._prepare(need), self.parallel.world)

    def _prepare(self, need: int) -> None:
        with storage.storage_errors("preparing a checkpoint", self.directory):
            for rank in self.store.duties:
                directory = share.rank_directory(self.store.root, rank)
                directory.mkdir(parents=True, exist_ok=True)
                retention.sweep(directory, self.history.run_id, exclusive=True)
            self._check_space(need)
            self._temporary.mkdir()

    def commit(self, _: Retention) -> Committed:
        try:
            with storage.storage_errors("completing a checkpoint", self._temporary):
                world = self.parallel.world
                (part,) = collect_notes(self._temporary, [world.rank])
                record = ShareRecord(self.number, world.rank, world.size, self._header(), part)
                _publish(self._temporary, self._target, share.encode(record))
        except Exception:
            self._discard()
            raise
        return Committed(sum(file.size for file in part.files.values()), ())

    def _committed(self, commit: Callable[[], Committed]) -> Committed:
        own = run_on_all(commit, self.parallel.world)
        mine = run_on_all(lambda: (self._target / paths.SHARE).read_bytes(), self.parallel.world)
        for to, source in self.store.copies.exchanges(self.parallel.world.rank):
            self._exchange(mine, to, source)
        messages = self.store.keep_only(self.state.iteration)
        return Committed(sum(all_gather_json(own.size, self.parallel.world, int)), tuple(messages))

    def _exchange(self, mine: bytes, to: int, source: int) -> None:
        """Sends this rank's share to one rank and receives another rank's share. All ranks call it."""
        world = self.parallel.world
        received = swap(world, mine, to, source)
        theirs = run_on_all(lambda: share.decode(received, self._target), world)
        assert theirs.rank == source, f"rank {source} sent the share of rank {theirs.rank}"
        directory = share.rank_directory(self.store.root, source)
        temporary = paths.unfinished(directory, self._name, self.history.run_id)
        arrivals = ReceivedFiles(temporary, theirs.part.files)
        sent = blocks_of(self._target, share.decode(mine, self._target).part.files)
        stream(world, send=sent, to=to, sizes=arrivals.sizes, source=source, take=arrivals.take)

        def finish() -> None:
            arrivals.finish()
            with storage.storage_errors("completing a copy", temporary):
                durable.fsync_tree(temporary)
                _publish(temporary, directory / self._name, share.encode(theirs))

        run_on_all(finish, world)


def _publish(temporary: Path, target: Path, record: bytes) -> None:
    storage.write_durable(temporary / paths.SHARE, lambda file: file.write(record))
    durable.fsync_directory(temporary)
    if target.exists():  # the share of another save
        trash = retention.free_name(target.parent, paths.TRASH + target.name)
        durable.rename(target, trash)
        shutil.rmtree(trash)
    durable.rename(temporary, target)
