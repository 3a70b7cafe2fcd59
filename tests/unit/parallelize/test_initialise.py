"""Initial values are a function of (seed, name): a draw over the logical view, whatever the memory layout."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from megatron.config import parse_args
from megatron.distributed.parallel_state import Axis
from megatron.model.gpt import GPT
from megatron.model.init import initial_elements, initial_value
from megatron.model.random_values import normal_values
from megatron.ops import resolve
from megatron.parallelize import await_weights, initialise_part, whole_parts
from megatron.state.shard import Shard, element_runs
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, train_here
from tests.unit.parallelize.test_specs import MODELS, VOCABULARY, build, specs_of


@pytest.mark.parametrize("name", MODELS)
def test_the_values_are_the_draw_and_padding_is_zero(name: str) -> None:
    model, _ = build(name)
    specs, table = specs_of(model), model.table()
    initialise_part(whole_parts(model, specs), table, seed=5)
    for parameter_name, parameter in model.named_parameters():
        spec = specs[parameter_name]
        drawn = initial_value(table[parameter_name], 5)
        assert torch.equal(spec.view(parameter.data), drawn), parameter_name
        if parameter.shape[0] != spec.logical_shape[0] and parameter.shape[1:] == spec.logical_shape[1:]:
            assert not parameter[VOCABULARY:].any(), "padding rows have no meaning"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_draws_its_slice_of_the_whole_and_nothing_else(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = build(name)
    table, drawn = model.table(), []

    def counted(seed: int, name: str, runs: list[tuple[int, int]], std: float) -> torch.Tensor:
        drawn.append(sum(count for _, count in runs))
        return normal_values(seed, name, runs, std)

    for rank in range(ranks):
        for name, spec in specs_of(model, Axis("tp", rank, ranks, tuple(range(ranks)))).items():
            whole = initial_value(table[name], 5)
            with monkeypatch.context() as patched:
                patched.setattr("megatron.model.init.normal_values", counted)
                part = initial_elements(table[name], list(element_runs(spec)), 5).view(spec.local_shape)
            assert torch.equal(part, spec.take(whole)), (name, rank)
            if not isinstance(table[name].row.start, float):
                assert drawn.pop() == prod(spec.local_shape)


RESHAPED = [
    Shard("x", (3, 5, 4), dim=0, ranges=((1, 3),)),
    Shard("x", (3, 5, 4), dim=1, ranges=((0, 2), (4, 5))),
    Shard("x", (3, 5, 4), dim=2, ranges=((3, 4), (0, 1))),
    Shard("x", (3, 5, 4), dim=0, fold=2, ranges=((2, 7), (9, 15))),
    Shard("x", (3, 5, 4), ranges=()),
    Shard("x", ()),
]


@pytest.mark.parametrize("spec", RESHAPED)
def test_runs_are_where_the_slice_is(spec: Shard) -> None:
    numbered = torch.arange(prod(spec.logical_shape)).view(spec.logical_shape)
    elements = [i for first, count in element_runs(spec) for i in range(first, first + count)]
    assert elements == spec.take(numbered).flatten().tolist()


def test_a_resumed_run_draws_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another layout does not change that: all weights are loaded."""
    folder = {"save": tmp_path / "run", "load": tmp_path / "run", "save_interval": 2}
    whole = train_here(flags(train_iters=4))
    first = train_here(flags(train_iters=4, exit_interval=2, **folder))
    assert first["parts"].progress.iteration == 2
    with monkeypatch.context() as patched:
        patched.setattr("megatron.parallelize.specs.initial_elements", None)
        second = train_here(flags(train_iters=4, **folder))
    for name, expected in whole["weights"].items():
        assert torch.equal(second["weights"][name], expected), name


def test_weights_that_nobody_loads_are_not_numbers() -> None:
    model, _ = build("llama")
    specs = specs_of(model)
    await_weights(whole_parts(model, specs))
    for name, parameter in model.named_parameters():
        assert specs[name].view(parameter.data).isnan().all(), name
        assert int(parameter.isnan().sum()) == prod(specs[name].logical_shape), "padding rows are zero"


def test_depth_vocabulary_padding_and_family_do_not_move_other_draws() -> None:
    """A draw depends on its parameter's name, not on the number of draws before."""

    def weights(layers: int, padded: int) -> dict[str, torch.Tensor]:
        config = parse_args(flags(num_layers=layers)).model
        model = GPT(config, vocab_size=VOCABULARY, padded_vocab_size=padded, kernels=resolve("ref", "cpu"))
        initialise_part(whole_parts(model, specs_of(model)), model.table(), seed=5)
        return dict(model.named_parameters())

    shallow, deep = weights(1, 97), weights(3, 128)
    word = "embedding.word_embeddings.weight"
    assert torch.equal(shallow[word], deep[word][:VOCABULARY])
    same = "layers.0.self_attention.query_key_value.weight"
    assert torch.equal(shallow[same], deep[same])


def weights_of_rank(rank: int, size: int, argv: list[str]) -> dict[str, torch.Tensor]:
    _, parts = make_parts(argv, rank=rank, world_size=size)
    return {name: p.detach().clone() for name, p in parts.engine.model.named_parameters()}


@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_every_data_parallel_size_starts_from_the_same_model(precision: dict[str, bool]) -> None:
    argv = flags(**precision, micro_batch_size=1)
    alone = weights_of_rank(0, 1, argv)
    for size in (2, 4):
        for weights in run_ranks(size, weights_of_rank, size, argv):
            for name, expected in alone.items():
                assert torch.equal(weights[name], expected), name


def test_the_seed_changes_every_drawn_weight() -> None:
    one, other = weights_of_rank(0, 1, flags(seed=1)), weights_of_rank(0, 1, flags(seed=2))
    for name in one:
        is_drawn = one[name].dim() > 1
        assert torch.equal(one[name], other[name]) != is_drawn, name
