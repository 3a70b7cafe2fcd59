"""Every data-parallel rank writes and reads its own share; it sends none of it and keeps no records of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import content, manifest
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.checkpoint.reader import StepReader, _Places
from megatron.checkpoint.run_state import RunHistory
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.storage import HashingFile
from megatron.checkpoint.verify import inspect_step
from megatron.distributed import collectives, messages
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.state.division import Division
from tests.helpers.distributed import RankFailed, run_ranks
from tests.helpers.runs import flags, make_parts
from tests.unit.checkpoint.support import loaded_equals, make_params, make_state

RANKS = 4
GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint_schema_2"  # of two ranks, before files were divided


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the bytes of a checkpoint that this rank writes and reads, and those that it sends."""
    seen: Counter[str] = Counter()
    write, elements, found_places, encoded = HashingFile.write, StepReader.elements, _Places._places, messages._encoded

    def written(self: HashingFile, data: Any) -> int:
        seen["written"] += memoryview(data).nbytes
        return write(self, data)

    def read(self: StepReader, *what: Any) -> torch.Tensor:
        found = elements(self, *what)
        seen["read " + what[2].key[0]] += found.numel() * found.element_size()
        return found

    def placed(self: _Places, record: TensorRecord, piece: Slice, *what: Any) -> Any:
        """Counts bytes that are read straight into existing memory while they are hashed."""
        places = list(found_places(self, record, piece, *what))
        seen["read " + piece.key[0]] += sum(len(memory) for _, _, memory in places)
        return places

    def sent(value: Any) -> torch.Tensor:
        message = encoded(value)
        seen["plain values"] += len(message)
        seen["messages"] += 1
        return message

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HashingFile, "write", written)
        patched.setattr(StepReader, "elements", read)
        patched.setattr(_Places, "_places", placed)
        patched.setattr(messages, "_encoded", sent)
        for name in ("broadcast", "gather_along", "all_reduce"):
            original = getattr(collectives, name)

            def counted(tensor: torch.Tensor, *rest: Any, _original: Any = original, **more: Any) -> Any:
                seen["tensors sent"] += 1
                return _original(tensor, *rest, **more)

            patched.setattr(collectives, name, counted)
        yield seen


# ---------------------------------------------------------------- state that all ranks hold


def save_dealt(rank: int, folder: Path) -> Counter[str]:
    parallel = ParallelState.build(Layout(RANKS), rank)
    state = make_state(rng={"stream": rank + 40})
    state = replace(state, replicas=dict.fromkeys(state.params, parallel.dp_cp))
    with counting() as seen:
        save_checkpoint(folder, state, parallel=parallel, save_tokenizer=None, history=RunHistory("all"))
    return seen


def load_rng(rank: int, folder: Path, ranks: int) -> int:
    from megatron.checkpoint.found_step import find_checkpoint
    from megatron.checkpoint.load import load_checkpoint

    parallel = ParallelState.build(Layout(ranks), rank)
    found = find_checkpoint(folder, parallel=parallel)
    assert found is not None
    rng = load_checkpoint(found, parallel=parallel, params=make_params(3)).rng
    assert rng is not None
    return int(rng["stream"] if "stream" in rng else rng["torch_cpu"][0])


def test_replicated_state_is_dealt_over_the_ranks(tmp_path: Path) -> None:
    seen = run_ranks(RANKS, save_dealt, tmp_path)
    step = tmp_path / "iter_0000010"
    record, problems = inspect_step(step, deep=True)
    assert problems == [] and record is not None
    names = {f"mp_rank_00/distrib_optim_{rank:05d}.pt" for rank in range(RANKS)} | {"mp_rank_00/model_optim_rng.pt"}
    assert set(record.files) == names | {name.replace(".pt", ".state.json") for name in names}
    assert loaded_equals(tmp_path, make_state(), load_rng=False)
    assert run_ranks(RANKS, load_rng, tmp_path, RANKS) == [40, 41, 42, 43]
    slices = [piece for kinds in record.optimizer.values() for one in kinds.values() for piece in one.slices]
    assert len(slices) == sum(len(kinds) for kinds in record.optimizer.values()), "one for a tensor, whoever has it"
    whole = [sum(state.numel() for _, state in kinds.values()) for kinds in (make_state().optimizer or {}).values()]
    stored = [torch.load(step / name, weights_only=True)["optimizer"]["state"] for name in sorted(names)]
    shares = [sum(t.numel() for kinds in one.values() for t in kinds.values()) for one in stored]
    weights = sum(tensor.numel() for _, tensor in make_state().params.values())
    assert sum(shares) == sum(whole) and max(*shares[1:4], shares[0] + weights) - min(shares[:4]) <= weights + 4
    assert max(each["plain values"] / each["messages"] for each in seen) <= 64
    assert not any(each["tensors sent"] for each in seen)


def test_the_weights_file_is_read_alone(tmp_path: Path) -> None:
    run_ranks(RANKS, save_dealt, tmp_path)
    main = torch.load(tmp_path / "iter_0000010/mp_rank_00/model_optim_rng.pt", weights_only=True)
    words = main["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert torch.equal(words, make_state().params["embedding.word_embeddings.weight"][1])
    assert main["checkpoint_version"] == 3.0 and main["args"].hidden_size == 8


def test_the_weights_file_is_that_of_a_run_of_one_rank(tmp_path: Path) -> None:
    """Apart from the optimizer's state, which no converter reads, both weights files open the same way."""
    run_ranks(RANKS, save_dealt, tmp_path / "four")
    with closing(RunHistory("one")) as history:
        parallel = ParallelState.build(Layout(1), 0)
        save_checkpoint(tmp_path / "one", make_state(), parallel=parallel, save_tokenizer=None, history=history)
    name = "iter_0000010/mp_rank_00/model_optim_rng.pt"
    one, four = (torch.load(tmp_path / folder / name, weights_only=True) for folder in ("one", "four"))
    assert one.keys() == four.keys() and vars(one["args"]) == vars(four["args"]) == dict(four["args"])
    ours, theirs = (dict(flat(content["model"])) for content in (one, four))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in theirs.values())


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        yield from flat(value, f"{path}.{key}") if isinstance(value, dict) else [(f"{path}.{key}", value)]


def test_planted_bug_a_rank_saves_the_piece_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by = Division.held_by

    def shifted(self: Division, rank: int) -> tuple[int, int]:
        start, stop = held_by(self, rank)
        return (start - 1, stop - 1) if self.group.rank == 2 and start else (start, stop)

    monkeypatch.setattr(Division, "held_by", shifted)
    run_ranks(RANKS, save_dealt, tmp_path)
    assert not loaded_equals(tmp_path, make_state(), load_rng=False)


def test_planted_bug_everything_on_the_first_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_dealt", lambda state: {})
    with pytest.raises((RankFailed, AssertionError, KeyError)):
        test_replicated_state_is_dealt_over_the_ranks(tmp_path)


def test_a_lost_share_is_an_incomplete_checkpoint(tmp_path: Path) -> None:
    run_ranks(RANKS, save_dealt, tmp_path)
    (tmp_path / "iter_0000010/mp_rank_00/distrib_optim_00002.pt").unlink()
    (problem,) = inspect_step(tmp_path / "iter_0000010")[1]
    assert problem.kind == "incomplete" and "distrib_optim_00002.pt is missing" in problem.text


def test_schema_2_verifies_and_every_rank_gets_its_random_state(tmp_path: Path) -> None:
    record, problems = inspect_step(GOLDEN / "iter_0000010", deep=True)
    assert problems == [] and record is not None and not record.divisions
    assert b'"schema": 2' in (GOLDEN / "iter_0000010/manifest.json").read_bytes()
    assert loaded_equals(GOLDEN, make_state(), load_rng=False)
    assert run_ranks(2, load_rng, GOLDEN, 2) == [0, 1]


# ---------------------------------------------------------------- state that the ranks divide


SETTINGS: dict[str, Any] = {"bf16": True, "optimizer": "adam", "train_iters": 2, "hidden_size": 128}


def save_and_load(rank: int, folder: Path, stage: int) -> tuple[Counter[str], Counter[str], int, int]:
    """Bytes that a save and a load of this rank move, the elements of all parameters, and those of its own pieces."""
    torch.set_num_threads(1)
    argv = flags(**SETTINGS, zero_stage=stage)
    _, parts = make_parts([*argv, "--save", str(folder), "--exit-interval", "1"], rank=rank, world_size=RANKS)
    with parts:
        parts.trainer.fit(0)
        with counting() as saved:
            parts.checkpoints.save(parts.progress)
        grads = parts.trainer.engine.store
        pieces = [grads.held(name) for name in grads.names]
        mine = sum(stop - start for start, stop in pieces)
        whole = sum(grads.parameter(name).numel() for name in grads.names)
    with counting() as loaded:
        _, parts = make_parts([*argv, "--load", str(folder)], rank=rank, world_size=RANKS)
    with parts:
        return saved, loaded, whole, mine


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bytes_of_a_rank(stage: int, tmp_path: Path) -> None:
    """Counts bf16 weights (2 bytes), masters and two moments (12); everything else is at most 1000 bytes a tensor."""
    results = run_ranks(RANKS, save_and_load, tmp_path, stage, timeout=120.0)
    (whole,) = {whole for _, _, whole, _ in results}
    overhead = 1000 * 4 * 28 + 50_000
    assert overhead < whole
    for rank, (saved, loaded, _, mine) in enumerate(results):
        weights = 2 * whole if rank == 0 else 0
        state = 12 * mine if stage else max(-(-14 * whole // RANKS) - weights, 0)
        extra = saved["written"] - weights - state
        assert 0 <= extra + 12 <= overhead, (rank, extra)
        assert saved["plain values"] / saved["messages"] <= 64
        if stage < 2:
            assert saved["tensors sent"] == 0
        assert loaded["read optimizer"] == 12 * (mine if stage else whole), "its own pieces, and no more"
    assert inspect_step(tmp_path / "iter_0000000", deep=True)[1] == []
    assert len(manifest.read(tmp_path / "iter_0000000").divisions) == 1
