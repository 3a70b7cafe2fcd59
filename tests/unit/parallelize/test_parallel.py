"""parallelize() keeps some modules, rebuilds others, and rejects what would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config import ModelConfig, parse_args
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.model.factory import ModuleFactory
from megatron.model.gpt import GPT
from megatron.model.passes import SinglePass
from megatron.ops import resolve
from megatron.parallelize import Parallel, check_can_be_split, parallelize
from megatron.tensor_parallel import ColumnParallelLinear
from tests.helpers.runs import flags

TP2 = {"tensor_model_parallel_size": 2}


def built(model: nn.Module, *, ranks: int = 2, rank: int = 0, **settings: Any) -> Parallel:
    config = parse_args(flags(**settings)).parallel
    state = ParallelState.plan(config.layout(ranks), rank)
    return parallelize(
        model, config, state, lambda *_: (torch.zeros(()),) * 2, device=torch.device("cpu"), dtype=torch.float32
    )


def plain(kind: type[GPT] = GPT, **settings: Any) -> GPT:
    config = parse_args(flags(**settings))
    with torch.device("meta"):
        return kind(config.model, vocab_size=97, padded_vocab_size=128, kernels=resolve("ref", "cpu"), moe=config.moe)


def test_a_model_that_is_not_divided_is_taken_as_it_is() -> None:
    model = plain()
    parallel = built(model, ranks=1)
    assert parallel.model is model and isinstance(parallel.passes, SinglePass)
    assert parallel.wgrads is model.make.wgrads


def test_a_model_that_is_not_ours_is_taken_as_it_is() -> None:
    model = nn.Linear(2, 2)
    parallel = built(model)
    assert parallel.model is model and not parallel.rows
    with pytest.raises(ConfigError, match="only split Megatron's GPT, but the model provider returned a Linear"):
        built(model, **TP2)


def test_a_divided_one_is_made_in_memory_from_its_description() -> None:
    part = built(plain(), **TP2).model
    assert all(parameter.device.type == "cpu" for parameter in part.parameters())
    assert isinstance(part, GPT)
    qkv = part.layers["0"].self_attention.query_key_value
    assert isinstance(qkv, ColumnParallelLinear) and qkv.weight.shape[0] == 3 * 32 // 2


def test_every_part_is_given_the_same_settings() -> None:
    """A layout must not compute another function: the parallel factory gets all settings of the plain one."""
    model = plain(num_experts=4, disable_bias_linear=True)
    make = built(model, **TP2, num_experts=4, disable_bias_linear=True).model.make
    assert isinstance(make, ModuleFactory) and make is not model.make
    for name in ("config", "kernels", "moe", "recompute", "layers_with_experts"):
        assert getattr(make, name) == getattr(model.make, name), name


class Doubled(GPT):
    """A user's own forward pass."""

    def forward(self, *args: Any, **named: Any) -> Tensor:
        return 2 * super().forward(*args, **named)


class PassesOn(GPT):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)


class OwnConstructor(GPT):
    def __init__(self, config: ModelConfig, **named: Any) -> None:
        super().__init__(config, **named)
        self.config_of_mine = config


class OwnArguments(GPT):
    def __init__(self, config: ModelConfig, *, vocab_size: int, padded_vocab_size: int, kernels: Any, moe: Any) -> None:
        super().__init__(config, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, kernels=kernels, moe=moe)


class OwnForward(GPT):
    def forward(self, tokens: Tensor, *, labels: Any = None, hidden: Any = None, **_: Any) -> Tensor:
        return super().forward(tokens, labels=labels, hidden=hidden)


class NarrowForward(GPT):
    def forward(self, tokens: Tensor, *, position_ids: Any, document_ids: Any, hidden: Any = None) -> Tensor:
        return super().forward(tokens, hidden=hidden)


def test_a_subclass_stays_one() -> None:
    assert isinstance(built(plain(Doubled), **TP2).model, Doubled)


def replaced(model: GPT) -> None:
    model.layers["1"].mlp = nn.Identity()


def widened(model: GPT) -> None:
    model.layers["1"].mlp.dense_h_to_4h.weight = nn.Parameter(torch.zeros(3, 3))


def added(model: GPT) -> None:
    model.extra = nn.Parameter(torch.zeros(1))


def hooked(model: GPT) -> None:
    model.layers["0"].register_forward_hook(lambda *_: None)


def hooked_weight(model: GPT) -> None:
    model.layers["0"].mlp.dense_4h_to_h.weight.register_hook(lambda grad: grad)


def attribute(model: GPT) -> None:
    model.layers["0"].hidden_dropout = 0.25


def instance_forward(model: GPT) -> None:
    model.layers["0"].forward = lambda x, context: x


def buffered(model: GPT) -> None:
    model.register_buffer("seen", torch.zeros(1))


def shared(model: GPT) -> None:
    model.layers["1"].mlp.dense_4h_to_h.weight = model.layers["0"].mlp.dense_4h_to_h.weight


CHANGES = [replaced, widened, added, hooked, hooked_weight, attribute, instance_forward, buffered, shared]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_construction_are_refused_where_they_would_be_lost(change: Any) -> None:
    model = plain()
    change(model)
    for settings in (TP2, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}):
        with pytest.raises(ConfigError, match=r"GPT was changed after it was made \(.*\): tensor, pipeline"):
            built(model, **settings)


def test_what_may_change() -> None:
    """Dtype, device, training flag and frozen parameters may change; the last carry over."""
    model = plain().to(torch.bfloat16).eval()
    model.embedding.requires_grad_(False)
    for settings in (TP2, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}):
        part = built(model, **settings)
        frozen = {name for name, parameter in part.model.named_parameters() if not parameter.requires_grad}
        assert frozen == {name for name in part.specs if name.startswith("embedding.")} != set()
        assert all(not part.specs[name].replica_axes for name in frozen)


def test_without_a_layout_a_changed_model_is_trained_as_it_is() -> None:
    model = plain()
    model.layers["1"].mlp = model.layers["0"].mlp
    parallel = built(model, ranks=1)
    assert parallel.model is model and "layers.1.mlp.dense_4h_to_h.weight" not in parallel.specs
    added(model)
    with pytest.raises(AssertionError, match="only in the model or only in the table: extra"):
        built(model, ranks=1)


def test_subclasses() -> None:
    """Constructors must take GPT's arguments and change nothing after GPT's own."""
    assert isinstance(built(plain(PassesOn), **TP2).model, PassesOn)
    assert isinstance(built(plain(OwnForward), pipeline_model_parallel_size=2).model, OwnForward)
    with pytest.raises(ConfigError, match="was changed after it was made"):
        built(plain(OwnConstructor), **TP2)
    with pytest.raises(ConfigError, match="is a OwnArguments, whose constructor does not take the arguments of GPT"):
        built(plain(OwnArguments), **TP2)
    interleaved = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4}
    with pytest.raises(ConfigError, match=r"is a NarrowForward, whose forward\(\) does not take the `stage`"):
        built(plain(NarrowForward, num_layers=4), **interleaved)
    assert isinstance(built(plain(NarrowForward), pipeline_model_parallel_size=2).model, NarrowForward)


def test_a_factory_of_its_own_is_refused() -> None:
    class Own(ModuleFactory): ...

    config = parse_args(flags(**TP2)).model
    kernels = resolve("ref", "cpu")
    changed = ModuleFactory(config, kernels)
    changed.dropout = lambda x, probability, training: x
    for make in (Own(config, kernels), changed):
        model = GPT(config, vocab_size=97, padded_vocab_size=128, kernels=kernels, make=make)
        assert built(model, ranks=1).model is model
        with pytest.raises(ConfigError, match="GPT has its own module factory"):
            built(model, **TP2)


def test_the_dry_run_refuses_what_the_run_refuses() -> None:
    model, config = plain(), parse_args(flags(**TP2)).parallel
    hooked(model)
    with pytest.raises(ConfigError, match="was changed after it was made"):
        check_can_be_split(model, config, ParallelState.plan(config.layout(2), 0))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_experts_of_a_rank(rank: int) -> None:
    settings = {"num_experts": 4, "disable_bias_linear": True}
    part = built(plain(**settings), rank=rank, **settings, expert_model_parallel_size=2)
    numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in part.specs if ".experts." in name}
    assert numbers == ({0, 1}, {2, 3})[rank]
    assert list(part.model.layers["0"].mlp.experts) == [str(number) for number in sorted(numbers)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_stages_of_a_rank(rank: int) -> None:
    settings = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4}
    part = built(plain(num_layers=4), rank=rank, **settings)
    stages = [stage._arguments["stage"] for stage in part.passes.stages]  # type: ignore[attr-defined]
    assert [list(stage.layers) for stage in stages] == [[rank], [2 + rank]]
    assert [stage.last for stage in stages] == [False, rank == 1]
    assert list(part.model.layers) == [str(rank), str(2 + rank)]
    whole = built(plain(), rank=rank, pipeline_model_parallel_size=2)
    assert whole.passes.stages == [whole.model]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dtype", "fp32_residual", "expected"),
    [
        (torch.bfloat16, False, torch.bfloat16),
        (torch.bfloat16, True, torch.float32),
        (torch.float64, True, torch.float64),
    ],
)
def test_what_travels_between_stages(dtype: torch.dtype, fp32_residual: bool, expected: torch.dtype) -> None:
    settings = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = parse_args(flags(**settings, bf16=True, fp32_residual_connection=fp32_residual))
    state = ParallelState.plan(config.parallel.layout(4), 0)
    model = plain(bf16=True, fp32_residual_connection=fp32_residual)
    passes = parallelize(
        model, config.parallel, state, lambda *_: (torch.zeros(()),) * 2, device=torch.device("cpu"), dtype=dtype
    ).passes
    shape, like = passes.hidden_like({"tokens": torch.zeros(3, 16)})  # type: ignore[attr-defined]
    assert shape == (3, 8, 32) and like.dtype == expected
