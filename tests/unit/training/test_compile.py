"""--compile: the layers go through torch.compile, and the run is the same to rounding."""

from __future__ import annotations

import pytest
import torch

from megatron.config import check_settings, parse_args
from megatron.errors import ConfigError
from tests.helpers.runs import flags, train_here


@pytest.mark.slow
def test_the_compiled_run_is_the_same_run() -> None:
    torch._dynamo.reset()
    shape = {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "train_iters": 4}
    still = {"attention_dropout": 0, "hidden_dropout": 0}
    plain = train_here(flags(**shape, **still))
    compiled = train_here(flags(**shape, **still, compile=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert plain["weights"].keys() == compiled["weights"].keys()
    for one, other in zip(plain["records"], compiled["records"]):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], rel=1e-5)
    for name, weight in plain["weights"].items():
        torch.testing.assert_close(compiled["weights"][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_layer_is_one_graph(bf16: bool) -> None:
    """The compiler silently leaves a layer uncompiled where it cannot trace."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train_here(flags(train_iters=1, compile=True, bf16=bf16))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["unimplemented"], dict(counters["unimplemented"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size 2"),
        ({"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size 2"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"recompute_activations": True}, "recomputation"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "recomputation"),
        ({"num_experts": 4, "disable_bias_linear": True}, "--num-experts 4"),
    ],
)
def test_what_cannot_be_combined_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"--compile and {named} exclude each other: .*; remove --compile"):
        check_settings(parse_args(flags(compile=True, **changes)))
