"""Tensor, sequence and pipeline parallelism in every schedule train what one process trains: fp64, 1e-10.

Compares losses, gradient norms, every gradient and the weights after two steps, on batches whose tokens all have
different weights. Then each collective in turn is broken, and the suite must find it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.distributed import collectives
from megatron.distributed.parallel_state import Axis
from megatron.tensor_parallel import SplitNorm, mappings
from megatron.training.assemble import Parts
from tests.helpers.distributed import RankFailed
from tests.helpers.layouts import Cases, at_layout, expected, few_batches, no_deeper, shallow, unequal, worst
from tests.helpers.runs import LLAMA_SHAPE, flags

EQUAL = 1e-10
SEEN = 1e-6  # a planted bug moves something by at least this much

COMMON: dict[str, Any] = {
    "num_layers": 4,
    "micro_batch_size": 1,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "optimizer": "sgd",
}
GPT2: dict[str, Any] = COMMON
LLAMA: dict[str, Any] = {
    **COMMON,
    **LLAMA_SHAPE,
    "group_query_attention": True,
    "num_query_groups": 2,
    "qk_layernorm": True,
}
RECOMPUTED = {**LLAMA, "recompute_granularity": "full", "recompute_method": "uniform"}
ONE_GROUP = {**LLAMA, "num_query_groups": 1, "add_qkv_bias": True}
ODD = {**GPT2, "num_layers": 5, "vocab_size": 131, "ffn_hidden_size": 88}
NEOX = {
    **COMMON,
    "position_embedding_type": "rope",
    "rotary_percent": 0.25,
    "use_parallel_residual": True,
    "no_bias_gelu_fusion": True,
    "untie_embeddings_and_output_weights": True,
}
OLMO = {**LLAMA, "norm_placement": "after", "qk_layernorm_scope": "all"}
CENTRED = {**OLMO, "num_query_groups": 1, "normalization": "LayerNorm", "apply_layernorm_1p": True}
SELECTIVE = {**GPT2, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]}


def layout(tp: int = 1, pp: int = 1, **more: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more}


GROUPS_OF_3 = {"num_layers_per_virtual_pipeline_stage": 1, "microbatch_group_size_per_virtual_pipeline_stage": 3}
SP = {"sequence_parallel": True}
COUNTED = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
FOUR_LAYERS: Cases = {
    2: [
        (GPT2, layout(tp=2)),
        (ONE_GROUP, layout(tp=2, **SP)),
        (NEOX, layout(tp=2)),
        (OLMO, layout(tp=2, **SP)),
        (LLAMA, layout(pp=2, pipeline_schedule="gpipe")),
        (RECOMPUTED, layout(pp=2, pipeline_schedule="zero-bubble")),
        (GPT2, layout(pp=2, num_layers_per_virtual_pipeline_stage=1)),
        ({**GPT2, "global_batch_size": 5}, layout(pp=2, **GROUPS_OF_3)),  # the second group has two
        (ODD, layout(pp=2, decoder_first_pipeline_num_layers=2)),
        (ODD, layout(pp=2, account_for_loss_in_pipeline_split=True)),
        ({**GPT2, "num_layers": 6}, layout(pp=2, num_virtual_stages_per_pipeline_rank=2, **COUNTED)),
        ({**GPT2, "num_layers": 2}, layout(pp=2, num_virtual_stages_per_pipeline_rank=2, **COUNTED)),
    ],
    4: [
        (GPT2, layout(tp=2, **SP)),
        (LLAMA, layout(tp=4)),
        (LLAMA, layout(tp=4, **SP)),
        (ONE_GROUP, layout(tp=4)),
        (ODD, layout(tp=4, **SP)),
        (NEOX, layout(tp=2, pp=2, pipeline_schedule="zero-bubble", **SP)),
        (OLMO, layout(tp=4)),  # fewer key-value heads than ranks
        (CENTRED, layout(tp=4, **SP)),
        ({**OLMO, "recompute_granularity": "selective"}, layout(tp=2, pp=2, num_layers_per_virtual_pipeline_stage=1)),
        (RECOMPUTED, layout(tp=2, pp=2, **SP)),
        (GPT2, layout(tp=2, pp=2, pipeline_schedule="zero-bubble")),
        (LLAMA, layout(tp=2, pp=2, num_layers_per_virtual_pipeline_stage=1, **SP)),
        (SELECTIVE, layout(tp=2, pp=2, pipeline_schedule="gpipe")),
        (GPT2, layout(pp=2, overlap_grad_reduce=True)),
        (GPT2, layout(pp=2, num_layers_per_virtual_pipeline_stage=1, overlap_grad_reduce=True)),
        (LLAMA, layout(pp=2, pipeline_schedule="zero-bubble", overlap_grad_reduce=True)),
        ({**LLAMA, "global_batch_size": 16}, layout(pp=2, overlap_grad_reduce=True, **GROUPS_OF_3)),
        (GPT2, layout(pp=4)),
        ({**LLAMA, "num_layers": 2}, layout(pp=4, **COUNTED)),  # the first and the last stage without a layer
        (ODD, layout(pp=4, decoder_first_pipeline_num_layers=2)),
        (ODD, layout(pp=4, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=2)),
        (GPT2, layout(pp=4, pipeline_schedule="zero-bubble")),
    ],
    8: [
        (GPT2, layout(tp=2, pp=2, pipeline_schedule="zero-bubble", **SP)),
        (LLAMA, layout(tp=4, pp=2)),
        (RECOMPUTED, layout(tp=2, pp=4, **SP)),
        (ONE_GROUP, layout(tp=2, pp=2, num_layers_per_virtual_pipeline_stage=1, overlap_grad_reduce=True)),
    ],
}


CASES = shallow(FOUR_LAYERS)


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_is_the_single_process(ranks: int) -> None:
    assert not unequal(ranks, CASES[ranks], EQUAL)


def test_nan_is_never_equal() -> None:
    """`max` skips NaN unless it comes first."""
    fine = expected(tuple(flags(**GPT2)))
    for kind, numbers in fine.numbers.items():
        bad = dataclasses.replace(fine, numbers={**fine.numbers, kind: [*numbers[:-1], float("nan")]})
        assert worst(bad, fine) == float("inf")
    name = next(iter(fine.weights))
    bad = dataclasses.replace(fine, weights={**fine.weights, name: fine.weights[name] * float("nan")})
    assert worst(bad, fine) == float("inf")


# What the suite is worth: each collective is left out, done twice, or done among the wrong ranks.

Collective = Callable[..., Any]


def left_out(original: Collective) -> Collective:
    def broken(tensor: torch.Tensor, axis: Axis, *rest: Any) -> Any:
        return original(tensor, Axis.single(axis.name), *rest)

    return broken


def left_out_in_shape(original: Collective) -> Collective:
    """Each rank uses its own shard instead of the gathered or summed tensor."""

    def broken(tensor: torch.Tensor, axis: Axis, dim: int) -> Any:
        if original.__name__ == "start_gather_along":
            return collectives.Pending(lambda: torch.cat([tensor] * axis.size, dim))
        return collectives.Pending(tensor.chunk(axis.size, dim)[axis.rank].contiguous)

    return broken


def doubled(original: Collective) -> Collective:
    def broken(tensor: torch.Tensor, axis: Axis, *rest: Any) -> Any:
        original(tensor, axis, *rest)
        if original.__name__ == "start_all_reduce":
            tensor.mul_(1.0)
        return original(tensor, axis, *rest)

    return broken


def among_wrong_ranks(state: Any, original: Collective) -> Collective:
    """Uses as many ranks along another axis."""

    def broken(tensor: torch.Tensor, axis: Axis, *rest: Any) -> Any:
        other = state.dp if axis.name == "tp" else state.tp
        return original(tensor, other, *rest)

    return broken


@dataclasses.dataclass(frozen=True)
class Plant:
    collective: str
    axis: str
    how: str  # left out, doubled, wrong ranks

    def __call__(self, parts: Parts) -> None:
        original = getattr(collectives, self.collective)
        shaped = self.collective in ("start_gather_along", "start_scatter_sum")
        if self.how == "left out":
            broken = left_out_in_shape(original) if shaped else left_out(original)
        elif self.how == "doubled":
            broken = doubled(original)
        else:
            broken = among_wrong_ranks(parts.engine.parallel, original)

        def only_there(tensor: torch.Tensor, axis: Axis, *rest: Any) -> Any:
            return (broken if axis.name == self.axis and axis.size > 1 else original)(tensor, axis, *rest)

        setattr(collectives, self.collective, only_there)


PLANTS = [
    *(Plant("all_reduce", "tp", how) for how in ("left out", "doubled", "wrong ranks")),
    *(Plant("start_all_reduce", "tp", how) for how in ("left out", "doubled", "wrong ranks")),
    *(Plant("start_all_reduce", "dp_cp", how) for how in ("left out", "doubled", "wrong ranks")),
]
SEQUENCE_PLANTS = [
    *(Plant("start_gather_along", "tp", how) for how in ("left out", "wrong ranks")),
    *(Plant("start_scatter_sum", "tp", how) for how in ("left out", "wrong ranks")),
    Plant("all_reduce", "tp", "left out"),  # the sum of the norms' gradients
]


def is_seen(family: dict[str, Any], axes: dict[str, Any], plant: Callable[[Parts], None], ranks: int = 4) -> bool:
    family = few_batches(ranks, no_deeper(family, axes), axes)
    try:
        outcome = at_layout(ranks, flags(**family, **axes), plant)
    except RankFailed:
        raise  # a bug that crashes or hangs proves nothing
    except AssertionError:
        return True
    return worst(outcome, expected(tuple(flags(**family)))) > SEEN


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_broken_collective_is_seen(plant: Plant) -> None:
    assert is_seen(GPT2, layout(tp=2), plant)


@pytest.mark.parametrize("plant", SEQUENCE_PLANTS, ids=str)
def test_a_broken_collective_of_sequence_parallelism_is_seen(plant: Plant) -> None:
    assert is_seen(GPT2, layout(tp=2, **SP), plant)


def without_replica_sums(parts: Parts) -> None:
    parts.trainer.engine.sum_replicas = lambda grads: None


def key_and_value_counted_twice(parts: Parts) -> None:
    counted = parts.trainer.engine.optimizer._by_axes
    for name, place in counted._places.items():
        if place.spec is not None:
            counted._places[name] = dataclasses.replace(place, spec=dataclasses.replace(place.spec, copies=()))


def norms_of_own_heads(parts: Parts) -> None:
    """A norm over all heads takes the mean of the local ones."""
    SplitNorm._mean = lambda norm, x: x.mean(-1, keepdim=True)  # type: ignore[method-assign]


def gradient_of_own_heads(parts: Parts) -> None:
    """The mean over all heads is right, but its gradient is that of the local ones."""

    def mean(norm: SplitNorm, x: torch.Tensor) -> torch.Tensor:
        return mappings.summed(x.sum(-1, keepdim=True), norm.axis) / norm.counted

    SplitNorm._mean = mean  # type: ignore[method-assign]


def micro_batches_exchanged(parts: Parts) -> None:
    """A stage uses the gradient of another micro-batch."""
    from megatron.pipeline_parallel.links import Links, Message

    send = Links.send

    def wrong(self: Links, tensor: torch.Tensor, message: Message, to: int) -> None:
        if message.what == "gradient":
            message = dataclasses.replace(message, micro_batch=message.micro_batch ^ 1)
        send(self, tensor, message, to)

    Links.send = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("family", "axes", "plant"),
    [
        (GPT2, layout(tp=2, **SP), without_replica_sums),
        (GPT2, layout(tp=2, pp=2), without_replica_sums),
        (ONE_GROUP, layout(tp=4), without_replica_sums),
        (LLAMA, layout(tp=2), without_replica_sums),
        (ONE_GROUP, layout(tp=4), key_and_value_counted_twice),
        (GPT2, layout(tp=2, pp=2), key_and_value_counted_twice),
        (GPT2, layout(tp=2, pp=2, pipeline_schedule="gpipe"), micro_batches_exchanged),
        (OLMO, layout(tp=2), norms_of_own_heads),
        (OLMO, layout(tp=2), gradient_of_own_heads),
        (OLMO, layout(tp=4), without_replica_sums),
        (OLMO, layout(tp=4), key_and_value_counted_twice),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_forgotten_sum_or_copy_is_seen(family: dict[str, Any], axes: dict[str, Any], plant: Any) -> None:
    assert is_seen(family, axes, plant)
