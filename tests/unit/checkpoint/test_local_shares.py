"""Shares of local checkpoints: which ranks hold copies, and which received or found shares are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint import lineage, paths, storage
from megatron.checkpoint.content import Part
from megatron.checkpoint.local import share
from megatron.checkpoint.local.replica_folder import Copies, ReplicaFolder
from megatron.checkpoint.local.share import ShareRecord
from megatron.checkpoint.local.transfer import LocalStep, ReceivedFiles, blocks_of
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.storage import FileRecord
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.cli import convert_checkpoint as convert_cli
from megatron.cli import verify_checkpoint as verify_cli
from megatron.distributed import streams
from megatron.distributed.parallel_state import Axis
from megatron.errors import CheckpointError, ConfigError, StorageError
from tests.unit.checkpoint.support import make_state, save

HEADER = Manifest(
    step=3, consumed_train_samples=0, consumed_valid_samples=0, run_id="r", layout={}, versions={}, fingerprint={},
    data={}, config={}, args={}, files={}, model={},
)  # fmt: skip


@pytest.mark.parametrize(("jump", "factor", "world"), [(1, 2, 2), (4, 2, 16), (2, 3, 12), (1, 1, 5)])
def test_every_share_goes_to_factor_minus_one_others(jump: int, factor: int, world: int) -> None:
    copies = Copies.of(jump, factor, world)
    for rank in range(world):
        group = copies.group(rank)
        assert rank in group and len(group) == factor and all((other - rank) % jump == 0 for other in group)
        exchanges = copies.exchanges(rank)
        assert {to for to, _ in exchanges} == {source for _, source in exchanges} == set(group) - {rank}
        for step, (to, _) in enumerate(exchanges):
            assert copies.exchanges(to)[step][1] == rank, "who sends is who is waited for"


def test_numbers_of_ranks_that_do_not_fit_and_copies_beside_their_originals_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--replication: 12, the number of ranks, is not a multiple of .* 4 .* 2; give"
    ):
        Copies.of(4, 2, 12)
    with pytest.raises(ConfigError, match=r"--replication-jump 1: ranks 0 and 1 .* see the same .* /dev/shm/x; give"):
        Copies.of(1, 2, 4).check_apart(["a", "a", "b", "b"], "/dev/shm/x")
    Copies.of(2, 2, 4).check_apart(["a", "a", "b", "b"], "/dev/shm/x")


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, FileRecord]]:
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1000)
    (tmp_path / "sent").mkdir()
    for name, size in (("a.pt", 2500), ("b.pt", 0), ("c.pt", 1000)):
        (tmp_path / "sent" / name).write_bytes(bytes(range(250)) * (size // 250))
    return tmp_path / "sent", {name: storage.hash_file(tmp_path / "sent" / name) for name in ("a.pt", "b.pt", "c.pt")}


def moved(folder: Path, files: dict[str, FileRecord], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    arrivals = ReceivedFiles(target, files)
    blocks = list(blocks_of(folder, files))
    assert [len(block) for block in blocks] == arrivals.sizes
    for block in blocks:
        arrivals.take(block)
    arrivals.finish()


def test_files_arrive_as_they_were(sent: tuple[Path, dict[str, FileRecord]], tmp_path: Path) -> None:
    moved(*sent, tmp_path / "target")
    for name in sent[1]:
        assert (tmp_path / "target" / name).read_bytes() == (sent[0] / name).read_bytes()


def test_what_cannot_be_read_or_written_is_told_after_all_was_sent(
    sent: tuple[Path, dict[str, FileRecord]], tmp_path: Path
) -> None:
    (sent[0] / "c.pt").unlink()
    with pytest.raises(StorageError, match=r"c\.pt arrived with other bytes"):
        moved(*sent, tmp_path / "target")
    (tmp_path / "full" / "a.pt").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"writing a file that another rank sent failed at .*full"):
        moved(*sent, tmp_path / "full")


def test_what_a_killed_load_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """Leftovers of another step go, too: their links keep the disk space of shares that were deleted since."""
    left = tmp_path / ".tmp-iter_0000002.loaded"
    left.mkdir()
    (left / "x.pt").write_bytes(b"x")
    step = LocalStep(ReplicaFolder(tmp_path, 0, ("here",), Copies()), Axis.single("world"), HEADER, {}, {})
    with step.at_hand([]) as folder:
        assert sorted(tmp_path.iterdir()) == [folder]
    assert not list(tmp_path.iterdir())


def test_a_changed_record_is_not_read(tmp_path: Path) -> None:
    record = ShareRecord("number", 1, 4, HEADER, Part())
    raw = share.encode(record)
    assert share.decode(raw, tmp_path) == record
    with pytest.raises(DamagedCheckpointError, match="its own checksum"):
        share.decode(raw.replace(b'"rank": 1', b'"rank": 2'), tmp_path)
    with pytest.raises(DamagedCheckpointError, match="cannot be read as a share"):
        share.decode(raw[:-20], tmp_path)
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        share.read(tmp_path)


def test_a_name_that_cannot_be_read_is_no_missing_name(tmp_path: Path) -> None:
    assert lineage.name_of(tmp_path) is None and lineage.name_of(tmp_path / "not there") is None
    (tmp_path / paths.LINEAGE).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be read \(Is a directory\); it identifies this run"):
        lineage.name_of(tmp_path)


@pytest.mark.parametrize("depth", range(4))
def test_shares_alone_are_refused_by_name_and_a_save_directory_beside_them_is_not(
    depth: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rejects the folder of a share, of its rank, of its run, and the directory that was passed."""
    step = tmp_path / "disk/0123456789abcdef/rank_00003/iter_0000007"
    step.mkdir(parents=True)
    (step / paths.SHARE).write_text("{}")
    given = str([step, *step.parents][depth])
    to_hf = ["--to", "hf", "--save", str(tmp_path / "out")]
    for tool, arguments, code in (
        (verify_cli, [given], 12),
        (verify_cli, ["--compare", given, given], 12),
        (convert_cli, ["--load", given, *to_hf], 12),
    ):
        assert tool.main(arguments) == code
        told = capsys.readouterr()
        assert ": holds shares of a local non-persistent checkpoint" in told.err and str(tmp_path) in told.err
    save(tmp_path / "disk", make_state())
    assert verify_cli.main([str(tmp_path / "disk")]) == 0
