"""Ranks verify a checkpoint together: each hashes its share, and one rank's failure fails all."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import found_step, manifest, reader, storage
from megatron.checkpoint.besides_tensors import read_values
from megatron.checkpoint.found_step import find_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.positions import Positions, Stretch
from megatron.checkpoint.storage import FileRecord
from megatron.checkpoint.verify import identity
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.runs import flags, make_parts
from tests.unit.checkpoint.support import make_params, make_state, save

BLOCK = 512  # bytes: a small checkpoint has many of them


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(storage, "BLOCK_BYTES", BLOCK)
    save(tmp_path, make_state(10, seed=1))
    return tmp_path


def record_of(saved: Path) -> manifest.Manifest:
    return manifest.read(saved / "iter_0000010")


# ---------------------------------------------------------------- the shares


@pytest.mark.parametrize("seed", range(20))
def test_the_shares_are_all_blocks_once_and_equally_many(seed: int, saved: Path) -> None:
    draw = random.Random(seed)
    files = {f"f{i}": FileRecord(0, ("x",) * draw.choice([0, 1, 2, 30])) for i in range(draw.randint(1, 9))}
    record, parts = replace(record_of(saved), files=files), draw.choice([1, 2, 3, 8, 1000])
    shares = [record.blocks_of(part, parts) for part in range(parts)]
    seen = [(name, block) for share in shares for name, blocks in share.items() for block in blocks]
    assert seen == [(name, block) for name, file in files.items() for block in range(len(file.blocks))]
    sizes = [sum(map(len, share.values())) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_copy_is_another_file_and_a_link_to_the_folder_is_not(saved: Path, tmp_path: Path) -> None:
    step, record = saved / "iter_0000010", record_of(saved)
    shutil.copytree(step, tmp_path / "copy")
    (tmp_path / "same").symlink_to(step)
    assert identity(tmp_path / "same", record) == identity(step, record) != identity(tmp_path / "copy", record)


# ---------------------------------------------------------------- four ranks


@contextmanager
def counting(copies: dict[int, str], rank: int) -> Iterator[list[int]]:
    """Number of blocks of each call; ranks in `copies` see their own files."""
    hashed: list[int] = []
    hash_blocks, seen = storage.hash_blocks, found_step.identity

    def counted(path: Path, blocks: range, *how: Any) -> tuple[str, ...]:
        hashed.append(len(blocks))
        return hash_blocks(path, blocks, *how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage, "BLOCK_BYTES", BLOCK)
        patched.setattr(storage, "hash_blocks", counted)
        patched.setattr(found_step, "identity", lambda *where: copies.get(rank) or seen(*where))
        yield hashed


def verify(rank: int, folder: Path, copies: dict[int, str]) -> int:
    parallel = ParallelState.build(Layout(4), rank)
    with counting(copies, rank) as hashed:
        assert find_checkpoint(folder, parallel=parallel) is not None
    return sum(hashed)


def test_every_rank_hashes_a_quarter(saved: Path) -> None:
    blocks = sum(len(file.blocks) for file in record_of(saved).files.values())
    assert blocks > 40
    counts = run_ranks(4, verify, saved, {})
    assert sum(counts) == blocks and max(counts) - min(counts) <= 1, counts


def test_planted_a_second_reader_of_every_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Manifest.blocks_of
    monkeypatch.setattr(Manifest, "blocks_of", lambda self, part, parts: share(self, part // 2, parts // 2))
    with pytest.raises(AssertionError):
        test_every_rank_hashes_a_quarter(saved)


def test_ranks_with_a_copy_of_their_own_hash_it_among_them(saved: Path) -> None:
    blocks = sum(len(file.blocks) for file in record_of(saved).files.values())
    counts = run_ranks(4, verify, saved, {2: "of a machine", 3: "of a machine"})
    assert counts[0] + counts[1] == counts[2] + counts[3] == blocks


@pytest.mark.parametrize("where", [0.01, 0.4, 0.99])
def test_damage_in_the_share_of_one_rank_is_told_by_all(where: float, saved: Path) -> None:
    (file,) = (saved / "iter_0000010").glob("mp_rank_*/*.pt")
    content = bytearray(file.read_bytes())
    place = int(where * len(content))
    content[place] ^= 1
    file.write_bytes(content)
    first = place // BLOCK * BLOCK
    said = f"differs from what was written, first between bytes {first} and"
    with pytest.raises(RankFailed, match=said):
        run_ranks(4, verify, saved, {})


def load_in_one_pass(rank: int, folder: Path) -> int:
    """Number of elements of weights and moments in a load that hashes what it reads; all are compared."""
    parallel, wanted, params = ParallelState.build(Layout(4), rank), make_state(10, seed=1), make_params(seed=77)
    assert wanted.optimizer is not None
    own = {
        name: {kind: torch.full_like(tensor, torch.nan) for kind, (_, tensor) in kinds.items()}
        for name, kinds in wanted.optimizer.items()
    }
    for _, param in params.values():
        param.data.fill_(torch.nan)
    with counting({}, rank):
        found = find_checkpoint(folder, parallel=parallel, hash_later=True)
        assert found is not None and found.unhashed
        loaded = load_checkpoint(found, parallel=parallel, params=params, own=own, load_rng=False)
    assert loaded.optimizer is not None
    pairs = [(params[name][1], tensor) for name, (_, tensor) in wanted.params.items()]
    for name, kinds in wanted.optimizer.items():
        pairs += [(loaded.optimizer[name][kind], tensor) for kind, (_, tensor) in kinds.items()]
    assert all(torch.equal(here, there) for here, there in pairs), "not what was saved"
    return sum(here.numel() for here, _ in pairs)


def test_a_rank_reads_what_it_needs_beyond_its_share(saved: Path) -> None:
    """Each of four ranks hashes a quarter of the file's blocks for all, and reads the whole file for itself."""
    (elements,) = set(run_ranks(4, load_in_one_pass, saved))
    assert elements * 4 > 16 * BLOCK  # several blocks for each rank


def test_planted_a_rank_that_reads_its_share_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a file of one block, or a single rank, would not show it."""
    hash_blocks, blocks_of = storage.hash_blocks, Manifest.blocks_of
    shares: list[dict[str, range]] = []

    def noted(self: Manifest, part: int, parts: int) -> dict[str, range]:
        shares.append(dict(blocks_of(self, part, parts)))
        return blocks_of(self, part, parts)

    def its_own(path: Path, blocks: range, algorithm: str, threads: int, plan: Any) -> tuple[str, ...]:
        mine = next((share for name, share in shares[-1].items() if path.match(name)), range(0))
        found = hash_blocks(path, blocks, algorithm)
        hash_blocks(path, mine, algorithm, threads, plan)
        return found

    monkeypatch.setattr(Manifest, "blocks_of", noted)
    monkeypatch.setattr(storage, "hash_blocks", its_own)
    with pytest.raises(RankFailed, match="not what was saved"):
        run_ranks(4, load_in_one_pass, saved)


# ---------------------------------------------------------------- files that are read


def opened_on_resume(rank: int, argv: list[str]) -> list[str]:
    """Files of a checkpoint that a rank opens when it resumes at the same layout."""
    torch.set_num_threads(1)
    _, parts = make_parts([*argv, "--exit-interval", "1"], rank=rank, world_size=4)
    with parts:
        parts.trainer.fit()
    opened: set[str] = set()

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def named(positions: Positions, *what: Any) -> Iterator[Stretch]:
            for stretch in original(positions, *what):
                opened.add(stretch.file.split("/")[0])
                yield stretch

        return named

    def noting_values(path: Path) -> dict[str, Any]:
        opened.add(path.parent.name)
        return read_values(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Positions, "stretches", noting(Positions.stretches))
        patched.setattr(reader, "read_values", noting_values)
        _, parts = make_parts(argv, rank=rank, world_size=4)
    with parts:
        assert parts.progress.iteration == 1
    return sorted(opened)


def test_a_rank_opens_its_own_file_and_at_most_three_others(tmp_path: Path) -> None:
    """The other three files are those of the tensor-parallel group's first rank (replicated tensors), of the first
    stage (tied embedding; last stage only), and of rank 0 (unsplit tensors)."""
    argv = flags(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, save=tmp_path, load=tmp_path, train_iters=2
    )
    first, second, third, fourth = run_ranks(4, opened_on_resume, argv)
    assert first == ["mp_rank_00_000"]
    assert second == ["mp_rank_00_000", "mp_rank_01_000"]
    assert third == ["mp_rank_00_000", "mp_rank_00_001"]
    assert fourth == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
