"""What the engine takes from the table of parameters."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from megatron.config import parse_args
from megatron.distributed.state import ParallelState
from megatron.engine import build_engine
from megatron.engine.build import _decay_by_row
from megatron.model.gpt import GPT
from megatron.model.parameters import Row, parameters
from megatron.ops import resolve
from megatron.optimizer import megatron_rule
from megatron.parallelize import parallelize
from tests.helpers.runs import flags


def test_decay_follows_the_row() -> None:
    """A row that says otherwise than the shape is obeyed; a parameter without a row decays by its shape."""
    rows = {name: parameter.row for name, parameter in parameters(parse_args(flags()).model, 97).items()}
    rule = _decay_by_row(rows, norms_of_qk=False)
    for name, row in rows.items():
        assert rule(name, nn.Parameter(torch.zeros(row.stored_shape))).wd_mult == float(row.decays), name
    vector = Row("scale", (3,))
    assert _decay_by_row({"scale": vector}, norms_of_qk=False)("scale", nn.Parameter(torch.zeros(3, 3))).wd_mult == 0.0
    matrix = nn.Parameter(torch.zeros(3, 3))
    assert rule("not.in.the.table", matrix) == megatron_rule("not.in.the.table", matrix)
    other = _decay_by_row({"x": replace(vector, name="x")}, norms_of_qk=False)
    assert rule("not.in.the.table", matrix) != other("x", matrix)


def test_weight_gradients_reach_the_buffers() -> None:
    """A queue of deferred products whatever the kernels; a plain route where a kernel multiplies into the buffers."""
    zero_bubble = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"}
    for kernels, settings, connected in (("ref", {}, False), ("auto", {}, True), ("ref", zero_bubble, True)):
        config = parse_args(flags(kernels=kernels, **settings))
        ranks, cpu = 2 if settings else 1, torch.device("cpu")
        state, ops = ParallelState.plan(config.parallel.layout(ranks), 0), resolve(kernels, "cpu")
        model = GPT(config.model, vocab_size=97, padded_vocab_size=128, kernels=ops)
        built = parallelize(
            model, config.parallel, state, lambda *_: (torch.zeros(()),) * 2, device=cpu, dtype=torch.float32
        )
        engine = build_engine(config, built, state, ops, cpu)
        assert (built.wgrads._sink is engine.grads) == connected, (kernels, settings)
