"""Positions of tensors in the files of a division: the writer and every reader agree, and a foreign start is rejected.
Covers `positions.py`, with `content.py` and `verify.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import manifest, storage
from megatron.checkpoint.besides_tensors import encode_values, read_values
from megatron.checkpoint.content import RankContent, collect_notes, join_notes, rank_content
from megatron.checkpoint.manifest import Manifest, Slice
from megatron.checkpoint.positions import Positions, share_lengths
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.run_state import RunHistory, TrainState
from megatron.checkpoint.save import Save
from megatron.checkpoint.verify import DamagedCheckpointError, inspect_step, verified_manifest
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.state.division import Division, Members
from tests.unit.checkpoint.support import make_state

STEP = "iter_0000010"
RANKS = 4
Change = Callable[[dict[str, Any]], object]


def state_of(rank: int, ranks: int) -> tuple[TrainState, ParallelState]:
    """Two rows of one group, like two buckets of ZeRO 1; in the second, only some tensors have two kinds."""
    parallel = ParallelState.plan(Layout(ranks), rank)
    whole = make_state(rng={"stream": rank})
    group, rows, optimizer = Members("shard of rank 0", rank, ranks), [0, 0], {}
    sizes = [0, 0]
    for number, (_, tensor) in enumerate(whole.params.values()):
        sizes[number % 2] += tensor.numel()
    for number, (name, kinds) in enumerate((whole.optimizer or {}).items()):
        row = number % 2
        weight = whole.params[name][1]
        division = Division(group, weight.numel(), -(-sizes[row] // ranks), rows[row], row)
        rows[row] += weight.numel()
        start, stop = division.held
        optimizer[name] = {
            kind: (replace(spec, division=division), tensor.reshape(-1)[start:stop].clone())
            for kind, (spec, tensor) in kinds.items()
            if kind == "exp_avg" or weight.dim() == 1 or row == 0
        }
    return replace(whole, optimizer=optimizer, replicas=dict.fromkeys(whole.params, parallel.dp_cp)), parallel


def save_all(folder: Path, ranks: int) -> Manifest:
    """Writes the content of all ranks one after the other, and returns the manifest."""
    saves: list[Save] = []
    for rank in range(ranks):
        state, parallel = state_of(rank, ranks)
        saves.append(Save(folder, state, parallel, RunHistory("test"), None, {}))
    saves[0]._temporary.mkdir(parents=True)
    for save in saves:
        save.write(save.content())
    record = join_notes(saves[0]._header(), collect_notes(saves[0]._temporary, range(ranks)))
    (saves[0]._temporary / "manifest.json").write_bytes(manifest.encode(record))
    saves[0]._temporary.rename(folder / STEP)
    return record


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_all(tmp_path, RANKS)
    return tmp_path / STEP


def check_values(step: Path) -> None:
    """Checks that the manifest's reader and torch's loader both restore every tensor."""
    reader, wanted = StepReader(step, manifest.read(step)), make_state()
    names = sorted(name for name in reader.manifest.files if name.endswith(".pt"))
    files = {name: torch.load(step / name, weights_only=True) for name in names}
    for name, kinds in reader.manifest.optimizer.items():
        assert wanted.optimizer is not None
        for kind, record in kinds.items():
            tensor = wanted.optimizer[name][kind][1]
            assert torch.equal(reader.logical(name, record).view(-1), _without_padding(name, tensor)), (name, kind)
            stored = [content["optimizer"]["state"].get(name, {}).get(kind) for content in files.values()]
            whole = torch.cat(
                [part.view(-1) for _, part in sorted(zip(files, stored, strict=True)) if part is not None]
            )
            assert torch.equal(whole, tensor.reshape(-1)), (name, kind)
    for name, record in reader.manifest.model.items():
        assert torch.equal(reader.logical(name, record).view(-1), _without_padding(name, wanted.params[name][1])), name


def _without_padding(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return (tensor[:13] if name == "embedding.word_embeddings.weight" else tensor).detach().reshape(-1)


def test_the_manifest_torch_and_the_state_agree(saved: Path) -> None:
    check_values(saved)
    assert inspect_step(saved, deep=True)[1] == []


def test_a_kind_is_one_storage_in_the_order_of_the_division(saved: Path) -> None:
    for rank in range(RANKS):
        content = torch.load(saved / f"mp_rank_00/distrib_optim_{rank:05d}.pt", weights_only=True)
        moments = [kinds["exp_avg"] for kinds in content["optimizer"]["state"].values() if "exp_avg" in kinds]
        (storage_of_all,) = {tensor.untyped_storage().data_ptr() for tensor in moments}
        assert storage_of_all and sum(t.nbytes for t in moments) <= moments[0].untyped_storage().nbytes()


def test_the_manifest_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """Manifests of 2 and 64 ranks have equal sizes, apart from names and hashes of files and the sizes of shares."""
    few, many = save_all(tmp_path / "few", 2), save_all(tmp_path / "many", 64)
    for record in (few, many):
        assert all(len(tensor.slices) == 1 for _, tensor in manifest.all_tensors(record))
    bodies = [asdict(replace(record, files={}, layout={}, run_id="")) for record in (few, many)]
    for body in bodies:
        (division,) = body["divisions"].values()
        del division["files"]
    lengths = [len(json.dumps(body)) for body in bodies]
    assert lengths[1] <= lengths[0], "shares of fewer elements have fewer digits"
    for body in bodies:
        (division,) = body["divisions"].values()
        division["starts"] = sorted(division["starts"])
        for records in (body["model"], *body["optimizer"].values()):
            for piece in (piece for tensor in records.values() for piece in tensor["slices"]):
                piece["share"], piece["start"] = bool(piece["share"]), piece["start"] is not None
    assert bodies[0] == bodies[1]


def test_a_file_without_a_kind_has_no_room_for_it(tmp_path: Path) -> None:
    """The last ranks lack the rarer kind; their files do not store zeros for it."""
    save_all(tmp_path, 16)
    sizes = [(tmp_path / STEP / f"mp_rank_00/distrib_optim_{rank:05d}.pt").stat().st_size for rank in range(16)]
    assert min(sizes[1:]) < max(sizes[1:])


# ---------------------------------------------------------------- a stranger's numbers


def rewritten(step: Path, change: Change) -> None:
    body = json.loads((step / "manifest.json").read_bytes())["manifest"]
    change(body)
    record = manifest.typed(Manifest, body)
    (step / "manifest.json").write_bytes(manifest.encode(record))


def piece_of(body: dict[str, Any], name: str, kind: str = "exp_avg") -> dict[str, Any]:
    (piece,) = body["optimizer"][name][kind]["slices"]
    return piece


def weight_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    (piece,) = body["model"][name]["slices"]
    return piece


def starts_of(body: dict[str, Any]) -> dict[str, int]:
    (division,) = body["divisions"].values()
    return division["starts"]


MOMENT, SQUARE = "exp_avg torch.float32", "exp_avg_sq torch.float32"
QKV, DENSE = "layers.0.self_attention.query_key_value.weight", "layers.0.self_attention.dense.weight"
SCALE, LAST = "layers.0.input_layernorm.weight", "final_layernorm.weight"


def exchange(one: dict[str, Any], other: dict[str, Any], key: str) -> None:
    one[key], other[key] = other[key], one[key]


REFUSED: dict[str, tuple[Change, str]] = {
    "a start between two elements": (
        lambda body: starts_of(body).update({MOMENT: starts_of(body)[MOMENT] + 2}),
        "begins at byte .*, between two elements of 4 bytes",
    ),
    "a weight between two elements": (
        lambda body: weight_of(body, QKV).update(start=weight_of(body, QKV)["start"] + 1),
        "between two elements of 4 bytes",
    ),
    "a negative start": (lambda body: weight_of(body, QKV).update(start=-4), "begins at byte -4"),
    "a start behind the file": (
        lambda body: starts_of(body).update({SQUARE: 10**9}),
        "exp_avg_sq torch.float32 ends at byte .*, which has .* bytes",
    ),
    "a weight behind the file": (lambda body: weight_of(body, QKV).update(start=10**9), "ends at byte"),
    "two kinds that overlap": (
        lambda body: starts_of(body).update({SQUARE: starts_of(body)[MOMENT] + 4}),
        "begins in .* at byte .*, within exp_avg",
    ),
    "two weights that overlap": (
        lambda body: weight_of(body, QKV).update(start=weight_of(body, DENSE)["start"] + 4),
        "at byte .*, within",
    ),
    "starts in the first file alone": (
        lambda body: next(iter(body["divisions"].values())).update(
            first={kind: start + 2 for kind, start in starts_of(body).items()}, starts={}
        ),
        "has no first byte|begins at byte",
    ),
    "no start": (lambda body: starts_of(body).pop(SQUARE), "has no first byte"),
    "an offset shifted by one element": (
        lambda body: piece_of(body, "embedding.word_embeddings.weight").update(offset=1),
        "in row 0 of their division overlap",
    ),
    "the last offset of a row shifted by one element": (
        lambda body: piece_of(body, LAST).update(offset=piece_of(body, LAST)["offset"] + 1),
        "or elements after the last of its 4 files",
    ),
    "a share of another length": (
        lambda body: piece_of(body, QKV).update(share=piece_of(body, QKV)["share"] + 1),
        "overlap or have different shares",
    ),
    "a share beyond all numbers": (
        lambda body: piece_of(body, QKV).update(share=2**61),
        "has too many elements: shares of 2305843009213693952",
    ),
}
FOUND_DEEP: dict[str, tuple[Change, str]] = {
    "starts shifted by one element": (
        lambda body: starts_of(body).update(
            {kind: start + 4 for kind, start in starts_of(body).items() if kind == SQUARE}
        ),
        ", but in the manifest it begins at byte",
    ),
    "a weight shifted by one element": (
        lambda body: weight_of(body, LAST).update(start=weight_of(body, LAST)["start"] + 4),
        ", but in the manifest it begins at byte",
    ),
    "starts of two weights of one shape exchanged": (
        lambda body: exchange(weight_of(body, SCALE), weight_of(body, LAST), "start"),
        ", but in the manifest it begins at byte",
    ),
    "a tensor in another row": (
        lambda body: piece_of(body, QKV).update(row=5),
        ", but in the manifest it begins at byte",
    ),
    "offsets of two tensors of one shape exchanged": (
        lambda body: (
            exchange(piece_of(body, SCALE), piece_of(body, LAST), "offset"),
            exchange(piece_of(body, SCALE), piece_of(body, LAST), "row"),
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_start_that_no_writer_gives_is_refused(case: str, saved: Path) -> None:
    change, words = REFUSED[case]
    rewritten(saved, change)
    _, problems = inspect_step(saved)
    assert problems and problems[0].kind == "corrupt", problems
    with pytest.raises((DamagedCheckpointError, manifest.BrokenManifestError), match=words):
        verified_manifest(saved)


@pytest.mark.parametrize("case", FOUND_DEEP)
def test_deep_verification_compares_with_the_files_own_description(case: str, saved: Path) -> None:
    change, words = FOUND_DEEP[case]
    rewritten(saved, change)
    assert inspect_step(saved)[1] == [], "the numbers themselves are possible"
    problems = inspect_step(saved, deep=True)[1]
    assert problems and words in problems[0].text, problems


def test_deep_verification_compares_plain_values(saved: Path) -> None:
    name = "mp_rank_00/model_optim_rng.state.json"
    values = read_values(saved / name)
    values["opt_param_scheduler"]["num_steps"] += 1
    (saved / name).write_bytes(encode_values(values))
    record = manifest.read(saved)
    files = {**record.files, name: storage.hash_file(saved / name)}
    (saved / "manifest.json").write_bytes(manifest.encode(replace(record, files=files)))
    assert inspect_step(saved)[1] == []
    (problem,) = inspect_step(saved, deep=True)[1]
    assert f"its plain values differ from those in {name}" in problem.text


# ---------------------------------------------------------------- planted in the writer and in the reader


PLANTS: dict[str, tuple[Any, str, Any]] = {
    "a reader that is one element late": (
        Positions,
        "_elements_before",
        lambda original: lambda self, *of: {key: first + 1 for key, first in original(self, *of).items()},
    ),
    "a reader that has two tensors in each other's place": (
        Positions,
        "_elements_before",
        lambda original: lambda self, *of: _two_exchanged(original(self, *of)),
    ),
    "a writer whose starts are those of the kind before": (
        RankContent,
        "written",
        lambda original: (
            lambda self, file, record, starts: original(
                self, file, record, {of: start + 4 for of, start in starts.items()}
            )
        ),
    ),
}


def _two_exchanged(before: dict[Any, int]) -> dict[Any, int]:
    one, other = [key for key in before if key[2] in (SCALE, LAST)][:2]
    return {**before, one: before[other], other: before[one]}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bug_is_found(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, made = PLANTS[plant]
    monkeypatch.setattr(where, name, made(getattr(where, name)))
    save_all(tmp_path, RANKS)
    with pytest.raises(AssertionError):
        check_values(tmp_path / STEP)
    assert inspect_step(tmp_path / STEP, deep=True)[1], "and by deep verification"


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_lengths_are_those_of_the_parts(ranks: int) -> None:
    rows = [Division(Members("g", 0, ranks), size, 11, offset) for size, offset in ((5, 0), (9, 5), (3, 14))]
    rows = [row for row in rows if row.offset + row.elements <= 11 * ranks]
    wanted = [sum(stop - start for start, stop in (row.held_by(rank) for row in rows)) for rank in range(ranks)]
    assert share_lengths(rows).tolist() == (wanted if rows else [0])


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_what_all_ranks_hold_is_dealt_without_gaps(ranks: int) -> None:
    """No file has room for what it lacks. All ranks write equally much, unless the first has more with the weights
    alone."""
    state = make_state()
    weights = sum(tensor.nbytes for _, tensor in state.params.values())
    written = []
    for rank in range(ranks):
        parallel = ParallelState.plan(Layout(ranks), rank)
        dealt = replace(state, replicas=dict.fromkeys(state.params, parallel.dp_cp))
        storages = rank_content(dealt, parallel, {}).divided.values()
        room = sum(each.length * each.dtype.itemsize for each in storages)
        assert room - sum(tensor.nbytes for each in storages for tensor in each.tensors) <= 8
        written.append(room + (0 if rank else weights))
    assert max(written[1:]) - min(written[1:]) <= 8 * ranks
    assert abs(written[0] - written[1]) <= 8 * ranks if ranks < 4 else written[0] == weights
    whole = sum(tensor.nbytes for kinds in (state.optimizer or {}).values() for _, tensor in kinds.values())
    assert 0 <= sum(written) - whole - weights <= 8 * ranks


def test_a_slice_of_before_has_no_start() -> None:
    assert Slice("a", (), None, (2,)).start is None
