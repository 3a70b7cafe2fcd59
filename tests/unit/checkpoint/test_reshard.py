"""Resharding: any number of tensor-parallel ranks saves, and any other number loads."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import manifest, slices
from megatron.checkpoint.manifest import Slice, TensorRecord
from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.run_state import RunHistory, Sharded
from megatron.checkpoint.save import save_checkpoint
from megatron.checkpoint.verify import inspect_step
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError
from megatron.layout import Layout
from megatron.state.division import even_ranges
from megatron.state.shard import Shard, split_size
from tests.helpers.distributed import run_ranks
from tests.helpers.step_tensors import model_tensors
from tests.unit.checkpoint.support import PADDED, SHAPES, load, make_params, make_state

COLUMNS = {"layers.0.self_attention.dense.weight", "layers.0.mlp.dense_4h_to_h.weight"}
COPIED = {"layers.0.input_layernorm.weight", "final_layernorm.weight", "embedding.position_embeddings.weight"}
WORDS = "embedding.word_embeddings.weight"


def shard(params: dict[str, Sharded], tp: int, rank: int) -> dict[str, Sharded]:
    """Parameters of one tensor-parallel rank: shards, the vocabulary with the rank's padding, and replicas."""
    held: dict[str, Sharded] = {}
    for name, (spec, tensor) in params.items():
        whole = tensor.detach()[: SHAPES[name][0][0]] if name == WORDS else tensor.detach()
        if tp == 1 or name in COPIED:
            held[name] = (spec, tensor.detach().clone())
            continue
        part = replace(spec, ranges=even_ranges(split_size(spec), tp, rank))
        if name == WORDS:  # equal shares of the padded table: the last ranks may hold padding alone
            rows, size = PADDED // tp, split_size(spec)
            part = replace(spec, ranges=((min(rank * rows, size), min(rank * rows + rows, size)),))
        local = part.take(whole)
        stored = local.reshape(local.shape[0], -1) if name in COLUMNS else local.reshape(-1, *SHAPES[name][1][1:])
        if name == WORDS:
            stored = torch.nn.functional.pad(stored, (0, 0, 0, PADDED // tp - stored.shape[0]))
        held[name] = (part, stored.clone())
    return held


def save_split(directory: Path, tp: int) -> None:
    """Saves on `tp` gloo ranks together, as a tensor-parallel run does."""

    def body(rank: int) -> str:
        parallel = ParallelState.build(Layout(tp, tp=tp), rank)
        params = shard(make_params(), tp, rank)
        moments = {n: {"exp_avg": (spec, tensor * 2)} for n, (spec, tensor) in params.items()}
        state = make_state(params=params, optimizer=moments)
        history = RunHistory("t")
        return save_checkpoint(directory, state, parallel=parallel, save_tokenizer=None, history=history).path.name

    assert run_ranks(tp, body) == ["iter_0000010"] * tp


@pytest.mark.parametrize("saved, wanted", list(product((1, 2, 4), repeat=2)))
def test_every_split_loads_into_every_other(tmp_path: Path, saved: int, wanted: int) -> None:
    save_split(tmp_path, saved)
    _, problems = inspect_step(tmp_path / "iter_0000010", deep=True)
    assert problems == []
    record = manifest.read(tmp_path / "iter_0000010")
    assert len(record.files) == 2 * saved
    reader = StepReader(tmp_path / "iter_0000010", record)
    for rank in range(wanted):
        expected = shard(make_params(), wanted, rank)
        for name, (spec, tensor) in expected.items():
            target = torch.full_like(tensor, 7.0)
            reader.fill(spec, target, record.model[name])
            assert torch.equal(target, tensor), (name, rank)
            moment = reader.optimizer_like(name, spec, tensor.shape)["exp_avg"]
            assert torch.equal(moment, tensor * 2), (name, rank)


def test_a_rank_that_holds_nothing_but_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """13 words in a table padded to 32: two of four ranks hold none."""
    monkeypatch.setitem(globals(), "PADDED", 32)
    save_split(tmp_path, 4)
    _, problems = inspect_step(tmp_path / "iter_0000010", deep=True)
    assert problems == []
    record = manifest.read(tmp_path / "iter_0000010")
    reader = StepReader(tmp_path / "iter_0000010", record)
    for name, (spec, tensor) in make_params().items():
        target = torch.full_like(tensor, 7.0)
        reader.fill(spec, target, record.model[name])
        assert torch.equal(target, tensor), name


def test_whole_tensors_come_back_from_a_split_save(tmp_path: Path) -> None:
    save_split(tmp_path, 4)
    reader = StepReader(tmp_path / "iter_0000010", manifest.read(tmp_path / "iter_0000010"))
    for name, (_, tensor) in make_params().items():
        expected = tensor.detach()[: SHAPES[name][0][0]] if name == WORDS else tensor.detach()
        assert torch.equal(model_tensors(reader)[name], expected), name


def test_load_on_another_layout_says_that_random_states_do_not_apply(tmp_path: Path) -> None:
    save_split(tmp_path, 2)
    params = make_params(seed=9)
    messages: list[str] = []
    loaded = load(tmp_path, params, messages=messages)
    assert loaded is not None and loaded.rng is None
    assert any("tp 2 -> 1" in message for message in messages)
    assert all(torch.equal(params[name][1], tensor) for name, (_, tensor) in make_params().items())


def test_planted_swap_of_two_slices_is_seen(tmp_path: Path) -> None:
    """Planted bug: exchanging the slices of two ranks makes the comparison above fail."""
    save_split(tmp_path, 2)
    record = manifest.read(tmp_path / "iter_0000010")
    name = "layers.0.mlp.dense_h_to_4h.weight"
    first, second = record.model[name].slices
    swapped = replace(
        record.model[name], slices=(replace(first, ranges=second.ranges), replace(second, ranges=first.ranges))
    )
    target = torch.zeros(SHAPES[name][1])
    spec, tensor = make_params()[name]
    StepReader(tmp_path / "iter_0000010", record).fill(spec, target, swapped)
    assert not torch.equal(target, tensor)


def test_a_gap_is_refused() -> None:
    record = TensorRecord((8, 3), "torch.float32", 0, (Slice("a", ("x",), ((0, 3),), (3, 3)),))
    assert not slices.covers_exactly(record)
    with pytest.raises(CheckpointError, match=r"w: indices \[\(3, 8\)\] of dimension 0 are in no file"):
        slices.fill(Shard("w", (8, 3)), torch.zeros(8, 3), record, lambda piece: torch.zeros(3, 3))


@pytest.mark.parametrize(
    "ranges, exact",
    [
        ([((0, 4),), ((4, 8),)], True),
        ([((0, 4),), ((0, 4),), ((4, 8),)], True),  # a copy, as KV heads fewer than ranks are
        ([((0, 2), (4, 6)), ((2, 4), (6, 8))], True),
        ([None, None], True),
        ([((0, 8),), ((8, 8),)], True),  # a rank that holds nothing but padding rows of a vocabulary
        ([((0, 7),), ((7, 7),)], False),
        ([((0, 8),), ((9, 9),)], False),
        ([((0, 5),), ((4, 8),)], False),
        ([((0, 4),), ((4, 9),)], False),
        ([((0, 4),)], False),
        ([], False),
    ],
)
def test_coverage(ranges: list, exact: bool) -> None:
    record = TensorRecord((8,), "torch.float32", 0, tuple(Slice("a", ("x",), r, (1,)) for r in ranges))
    assert slices.covers_exactly(record) is exact
