"""A load may hash a file while reading it into the model's and the optimizer's own memory. It gives the same bits as a
load of a verified step, reads each byte once and finds all damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint import manifest, reader, storage
from megatron.checkpoint.found_step import find_checkpoint
from megatron.checkpoint.load import load_checkpoint
from megatron.checkpoint.run_state import LoadedState, Sharded, TrainState
from megatron.checkpoint.verify import DamagedCheckpointError
from megatron.state.shard import Shard
from megatron.torch_files import safe_load
from tests.unit.checkpoint.support import load as in_two_passes
from tests.unit.checkpoint.support import make_params, make_state, one_process, save

EARLIER = Path(__file__).parents[2] / "golden" / "checkpoint"
Kinds = dict[str, dict[str, Tensor]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(storage, "_READ_BYTES", 300)


def empty(state: TrainState) -> Kinds:
    assert state.optimizer is not None
    return {
        name: {kind: torch.full_like(tensor, 7.0) for kind, (_, tensor) in kinds.items()}
        for name, kinds in state.optimizer.items()
    }


def in_one_pass(folder: Path, params: dict[str, Sharded], own: Kinds | None = None, **options: Any) -> LoadedState:
    found = find_checkpoint(folder, parallel=one_process(), hash_later=True)
    assert found is not None and found.unhashed
    return load_checkpoint(found, parallel=one_process(), params=params, own=own, log=lambda text: None, **options)


def check_equal(folder: Path, state: TrainState) -> int:
    """Returns how many of the optimizer's tensors were read in place."""
    params, own = make_params(seed=77), empty(state)
    loaded = in_one_pass(folder, params, own)
    assert loaded.optimizer is not None and state.optimizer is not None
    for name, (_, tensor) in state.params.items():
        assert torch.equal(params[name][1], tensor), name
    for name, kinds in state.optimizer.items():
        for kind, (_, tensor) in kinds.items():
            assert torch.equal(loaded.optimizer[name][kind], tensor), (name, kind)
    before = in_two_passes(folder)
    assert before is not None and loaded.rng is not None and before.rng is not None
    assert loaded.scheduler == before.scheduler and loaded.optimizer_extra == before.optimizer_extra
    assert loaded.iteration == before.iteration and torch.equal(loaded.rng["torch_cpu"], before.rng["torch_cpu"])
    assert loaded.rng["torch_cpu"].storage_offset() == 0  # torch sets a generator from the storage's beginning
    return sum(loaded.optimizer[name][kind] is own[name][kind] for name in own for kind in own[name])


def test_the_state_is_that_of_a_load_in_two_passes(tmp_path: Path) -> None:
    state = make_state()
    save(tmp_path, state)
    assert check_equal(tmp_path, state) == 2 * len(state.params)


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads each byte once, into its tensor or into a small buffer; no tensor is mapped and copied afterwards."""
    state = make_state()
    save(tmp_path, state)
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    handed: list[int] = []
    memory_for = storage._memory_for

    def counted(*where: Any) -> Iterator[memoryview]:
        for memory in memory_for(*where):
            handed.append(len(memory))
            yield memory

    monkeypatch.setattr(storage, "_memory_for", counted)
    monkeypatch.setattr(reader.StepReader, "elements", None)
    monkeypatch.setattr(safe_load, "load_file", None)
    in_one_pass(tmp_path, make_params(seed=77), empty(state))
    assert sum(handed) == sum(size.size for size in manifest.read(file.parents[1]).files.values())


def test_means_of_a_weight_are_not_taken_for_the_weight(tmp_path: Path) -> None:
    """Adafactor's means of rows and columns have the weight's name, but their own shape."""
    state = make_state()
    assert state.optimizer is not None
    draw, means = torch.Generator().manual_seed(3), 0
    for name, (_, weight) in state.params.items():
        if weight.dim() == 2:
            mean = torch.randn(weight.shape[0], generator=draw)
            state.optimizer[name]["exp_avg_sq_row"] = Shard(name, tuple(mean.shape)), mean
            means += 1
    save(tmp_path, state)
    assert means and check_equal(tmp_path, state) == 2 * len(state.params)


@pytest.mark.parametrize("plant", ["other bytes", "other memory", "not read"])
def test_planted_what_is_hashed_is_not_what_is_loaded(
    tmp_path: Path, plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    save(tmp_path, state)
    if plant == "other bytes":
        places = reader._Places._places

        def shifted(*given: Any) -> Any:
            return [(file, first + 4, memory) for file, first, memory in places(*given)]

        monkeypatch.setattr(reader._Places, "_places", shifted)
    elif plant == "other memory":
        monkeypatch.setattr(storage, "_memory_for", lambda start, stop, into: [memoryview(bytearray(stop - start))])
    else:
        part = reader.verify_share

        def without_the_last(*given: Any) -> None:
            part(*given[:-1], {name: places[:-1] for name, places in given[-1].items()})

        monkeypatch.setattr(reader, "verify_share", without_the_last)
    with pytest.raises(AssertionError):
        check_equal(tmp_path, state)


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    """A flipped bit in a tensor, between tensors or in the file's tables is rejected as damage."""
    state, draw = make_state(), random.Random(5)
    save(tmp_path, state)
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    whole = file.read_bytes()
    for place in [0, 5, len(whole) - 1, len(whole) - 30, *(draw.randrange(len(whole)) for _ in range(300))]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(DamagedCheckpointError, match="differs from what was written, first between bytes"):
            in_one_pass(tmp_path, make_params(seed=77), empty(state))
    file.write_bytes(whole)
    in_one_pass(tmp_path, make_params(seed=77), empty(state))


def test_what_is_stored_otherwise_is_read_from_the_verified_file(tmp_path: Path) -> None:
    """Covers another dtype, strided memory and tensors that share memory."""
    state = make_state()
    save(tmp_path, state)
    wide = make_params(seed=77, dtype=torch.float64)
    in_one_pass(tmp_path, wide, finetune=True)
    for name, (_, tensor) in state.params.items():
        assert torch.equal(wide[name][1], tensor.double()), name
    params, own = make_params(seed=77), empty(state)
    name, (_, expected) = next((n, p) for n, p in state.params.items() if p[1].dim() == 2)
    turned = torch.nn.Parameter(torch.zeros(expected.shape[::-1]).t())
    params[name] = (params[name][0], turned)
    own[name] = {"exp_avg": own[name]["exp_avg"], "exp_avg_sq": own[name]["exp_avg"]}
    loaded = in_one_pass(tmp_path, params, own)
    assert torch.equal(turned, expected) and loaded.optimizer is not None and state.optimizer is not None
    for kind, (_, tensor) in state.optimizer[name].items():
        assert torch.equal(loaded.optimizer[name][kind], tensor), kind
    assert loaded.optimizer[name]["exp_avg"] is own[name]["exp_avg"]
    assert loaded.optimizer[name]["exp_avg_sq"] is not own[name]["exp_avg_sq"]


def test_pieces_fill_their_places_and_hash_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, draw = tmp_path / "file", random.Random(3)
    for _ in range(60):
        monkeypatch.setattr(storage, "BLOCK_BYTES", draw.choice([7, 64, 1000]))
        monkeypatch.setattr(storage, "_READ_BYTES", draw.choice([3, 16, 5000]))
        content = draw.randbytes(draw.randint(1, 3000))
        path.write_bytes(content)
        places, at = [], draw.randint(0, 50)
        while at < len(content):
            places.append((at, memoryview(bytearray(min(draw.randint(0, 400), len(content) - at)))))
            at += len(places[-1][1]) + draw.choice([0, 1, 90])
        blocks, threads = range(storage.blocks_in(len(content))), draw.randint(1, 4)
        found = storage.hash_blocks(path, blocks, storage.HASH, threads, places)
        assert found == storage.hash_file(path).blocks
        assert all(bytes(memory) == content[first : first + len(memory)] for first, memory in places)
        some = sorted(draw.sample(blocks, draw.randint(1, len(blocks))))
        assert storage.hash_blocks(path, some, storage.HASH, threads) == tuple(found[block] for block in some)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    """The manifest locates the tensors, so the file's own description has no influence."""
    state = make_state()
    save(tmp_path, state)
    (step,) = tmp_path.glob("iter_*")
    (file,) = step.rglob("model_optim_rng.pt")
    whole = file.read_bytes()
    described = whole.index(b"archive/data.pkl")
    file.write_bytes(whole[:described] + bytes(len(whole) - described))
    record = manifest.read(step)
    files = {**record.files, file.relative_to(step).as_posix(): storage.hash_file(file, record.hash)}
    (step / "manifest.json").write_bytes(manifest.encode(replace(record, files=files)))
    assert check_equal(tmp_path, state) == 2 * len(state.params)


def test_a_step_of_before_starts_is_hashed_and_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BLOCK_BYTES", 16 * 2**20)
    state = make_state()
    params, own = make_params(seed=77), empty(state)
    loaded = in_one_pass(EARLIER, params, own)
    before = in_two_passes(EARLIER)
    assert loaded.optimizer is not None and before is not None and before.optimizer is not None
    for name, kinds in before.optimizer.items():
        for kind, tensor in kinds.items():
            assert (
                torch.equal(loaded.optimizer[name][kind], tensor)
                and loaded.optimizer[name][kind] is not own[name][kind]
            )
