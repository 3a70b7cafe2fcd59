"""Initial values are a function of (seed, name): the draw over the logical view, whatever the memory looks like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.config import parse_args
from megatron.distributed.shard import even_ranges
from megatron.model.gpt import GPT
from megatron.model.init import initial_value
from megatron.ops import resolve
from megatron.parallelize import initialise_part
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts
from tests.unit.parallelize.test_specs import MODELS, VOCABULARY, build, specs_of


@pytest.mark.parametrize("name", MODELS)
def test_the_values_are_the_draw_and_padding_is_zero(name: str) -> None:
    model, _ = build(name)
    specs, table = specs_of(model), model.table()
    initialise_part(model, specs, table, seed=5)
    for parameter_name, parameter in model.named_parameters():
        spec = specs[parameter_name]
        drawn = initial_value(table[parameter_name], 5)
        assert torch.equal(spec.view(parameter.data), drawn), parameter_name
        if parameter.shape[0] != spec.logical_shape[0] and parameter.shape[1:] == spec.logical_shape[1:]:
            assert not parameter[VOCABULARY:].any(), "padding rows have no meaning"


def test_a_part_starts_as_its_slice_of_the_whole() -> None:
    """What a rank holds is drawn with the whole parameter."""
    model, _ = build("llama")
    name, table = "layers.1.mlp.dense_h_to_4h.weight", model.table()
    whole = specs_of(model)[name]
    part = replace(whole, ranges=even_ranges(whole.size, 2, 1))

    class Half(torch.nn.Module):
        def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
            yield name, self.weight

    half = Half()
    half.weight = torch.nn.Parameter(torch.empty(2 * part.local_shape[1], part.local_shape[2]))
    initialise_part(half, {name: part}, table, seed=5)
    assert torch.equal(part.view(half.weight.data), part.take(initial_value(table[name], 5)))


def test_depth_vocabulary_padding_and_family_do_not_move_other_draws() -> None:
    """A name decides; the number of draws before it does not."""

    def weights(layers: int, padded: int) -> dict[str, torch.Tensor]:
        config = parse_args(flags(num_layers=layers)).model
        model = GPT(config, vocab_size=VOCABULARY, padded_vocab_size=padded, kernels=resolve("ref", "cpu"))
        initialise_part(model, specs_of(model), model.table(), seed=5)
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
