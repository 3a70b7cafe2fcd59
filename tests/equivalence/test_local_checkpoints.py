"""Local checkpoints on four ranks of two machines: whatever is lost, a restart resumes bit for bit from the newest
complete step."""

from __future__ import annotations

import io
import os
import shutil
import signal
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint.lineage import Line
from megatron.checkpoint.local import find, share
from megatron.checkpoint.local.replica_folder import ReplicaFolder
from megatron.checkpoint.local.save import LocalSave
from megatron.checkpoint.local.share import ShareRecord
from megatron.checkpoint.local.transfer import LocalStep
from megatron.checkpoint.run_state import Retention
from megatron.checkpoint.save import Committed
from megatron.errors import MegatronError
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.runs import Recorder, flags, make_parts

RANKS = 4
SETTINGS: dict[str, Any] = {
    "bf16": True,
    "optimizer": "adam",
    "global_batch_size": 4,
    "train_iters": 8,
    "hidden_dropout": 0.1,
    "tensor_model_parallel_size": 2,
    "zero_stage": 1,
}
LAST_WHOLE, DIES_AT = 6, 7
TREES = ("save", "machine0", "machine1")


def command(rank: int, folder: Path, ranks: int = RANKS, **changes: Any) -> list[str]:
    """Command of a rank. The first half of the ranks sees one directory, the other half another: two machines."""
    machine = folder / f"machine{rank * 2 // ranks}"
    return flags(
        **{
            **SETTINGS,
            "save": folder / "save",
            "load": folder / "save",
            "save_interval": 4,
            "non_persistent_save_interval": 1,
            "non_persistent_ckpt_type": "local",
            "non_persistent_local_ckpt_dir": machine,
            "replication": True,
            "replication_jump": ranks // 2,
            **changes,
        }
    )


def train(rank: int, ranks: int, argv: list[str], iterations: int | None = None) -> tuple[int, dict[int, str], str]:
    """The iteration at which it resumes, the losses, and the messages."""
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    with redirect_stdout(io.StringIO()) as said:
        _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
        with parts:
            start = parts.progress.iteration
            parts.trainer.fit(iterations)
            parts.checkpoints.history.close()
    return start, {record["iteration"]: repr(record["lm_loss"]) for record in records}, said.getvalue()


def dies(rank: int, folder: Path) -> int:
    """Saves 2 and 4, and complete local steps 5 and 6. Rank 2 is killed before it commits its share of 7, after all
    others committed theirs."""
    torch.set_num_threads(1)
    commit, keep_only = LocalSave.commit, ReplicaFolder.keep_only

    def killed(save: LocalSave, retention: Retention) -> Committed:
        if save.state.iteration == DIES_AT and rank == 2:
            while len(list(folder.glob(f"machine*/*/rank_*/iter_000000{DIES_AT}"))) < RANKS - 1:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(save, retention)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalSave, "commit", killed)
        patched.setattr(ReplicaFolder, "keep_only", lambda at, step: [] if step == LAST_WHOLE else keep_only(at, step))
        _, parts = make_parts(command(rank, folder), rank=rank, world_size=RANKS)
        with parts:
            parts.trainer.fit(2)
            parts.checkpoints.save(parts.progress)
            parts.trainer.fit()
    return 0


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(RankFailed):
        run_ranks(RANKS, dies, folder, timeout=120.0)
    for name in TREES:
        shutil.copytree(folder / name, folder / "before" / name)
    return folder


def restore(folder: Path) -> None:
    for name in TREES:
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(folder / "before" / name, folder / name)


def files_of(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"machine*/*/rank_0000{rank}/iter_000000{LAST_WHOLE}/mp_rank_*/distrib_optim_*.pt"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose(folder: Path, what: str) -> None:
    lost = {"machine 0": ("machine0",), "both": ("machine0", "machine1")}
    for name in lost.get(what.partition(",")[0], ()):
        shutil.rmtree(folder / name)
    if what == "damaged":
        flip(files_of(folder, 3)[1])
        os.truncate(files_of(folder, 1)[0], 100)
    if what == "damaged twice":
        for path in files_of(folder, 3):
            flip(path)
    if what.startswith("rewound"):
        (folder / "save/latest_checkpointed_iteration.txt").write_text("2")
    if what == "another run":
        (folder / "save/.lineage").write_text("0" * 32)


CASES: dict[str, tuple[int, dict[str, Any], str]] = {
    "as it was": (LAST_WHOLE, {}, "local step 7 is incomplete (missing: the share of rank 2)"),
    "machine 0": (LAST_WHOLE, {}, ""),
    "damaged": (LAST_WHOLE, {}, "differs from what was written: that copy of the share of rank 3 is not used"),
    "damaged twice": (5, {}, "local step 6 is incomplete (missing: the share of rank 3)"),
    "both": (4, {}, "no local step continues from iteration 4"),
    "another run": (4, {}, "no local step continues from iteration 4"),
    "rewound": (2, {}, "no local step continues from iteration 2"),
    "one step": (2, {"ckpt_step": 2}, ""),
    "weights alone": (0, {"finetune": True}, ""),
}
"""Lost parts -> (iteration at which a restart resumes, additional settings, message)."""


def of_the_neighbour(directory: Path, read: Any = share.read) -> ShareRecord:
    record = read(directory)
    return replace(record, rank=record.rank ^ 1)


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "machine 0, a share under the wrong rank": (share, "read", of_the_neighbour),
    "as it was, the older of two steps": (find, "newest_first", sorted),
    "rewound, whoever it goes on from": (Line, "__eq__", lambda *_: True),
    "machine 0, nothing is sent": (LocalStep, "transfers", lambda *_: []),
}


def resume(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"whole": train(rank, RANKS, flags(**SETTINGS))}

    def restart(what: str, iterations: int | None, changes: dict[str, Any]) -> Any:
        dist.barrier()
        if rank == 0:
            restore(folder)
            lose(folder, what)
        dist.barrier()
        return train(rank, RANKS, command(rank, folder, **changes), iterations)

    restart("as it was", 1, {"async_save": True})
    found["in the background"] = train(rank, RANKS, command(rank, folder, async_save=True), 1)
    for what, (_, changes, _) in CASES.items():
        found[what] = restart(what, 1 if "finetune" not in changes else 0, changes)
    for what, planted in PLANTED.items():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(*planted)
            try:
                found[what] = restart(what, 0, {})
            except MegatronError as error:
                found[what] = -1, {}, str(error)
    return found


@pytest.fixture(scope="module")
def resumed(killed: Path) -> dict[str, Any]:
    first, *others = run_ranks(RANKS, resume, killed, timeout=120.0)
    assert all(other[what][:2] == first[what][:2] for other in others for what in first)
    found: dict[str, Any] = first
    return found


@pytest.mark.parametrize("what", CASES)
def test_a_restart_goes_on_from_the_newest_whole_step(what: str, resumed: dict[str, Any]) -> None:
    step, changes, says = CASES[what]
    start, losses, said = resumed[what]
    assert start == step and says in said, said
    if "finetune" not in changes:
        assert losses == {step + 1: resumed["whole"][1][step + 1]}


def test_a_step_of_the_background_is_whole(resumed: dict[str, Any]) -> None:
    start, losses, _ = resumed["in the background"]
    assert start == LAST_WHOLE + 1 and losses == {8: resumed["whole"][1][8]}


def elsewhere(rank: int, folder: Path) -> tuple[int, dict[int, str], str]:
    return train(rank, 2, command(rank, folder, 2, tensor_model_parallel_size=1, zero_stage=3), 1)


def test_another_number_of_ranks_in_another_layout(killed: Path, resumed: dict[str, Any]) -> None:
    restore(killed)
    (start, losses, _), _ = run_ranks(2, elsewhere, killed)
    assert start == LAST_WHOLE
    assert float(losses[7]) == pytest.approx(float(resumed["whole"][1][7]), abs=0.2)  # with other dropout
    assert {path.parent.name for path in killed.glob("machine*/*/rank_*/iter_*")} == {"rank_00000", "rank_00001"}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_bug_is_seen(what: str, resumed: dict[str, Any]) -> None:
    assert resumed[what][0] != CASES[what.partition(",")[0]][0]
