"""Rules that the engine derives from the table of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.checkpoint import manifest
from megatron.config import parse_args
from megatron.data_parallel import bucket_size
from megatron.distributed.parallel_state import ParallelState
from megatron.engine import assembly, build_engine
from megatron.engine.assembly import _overlaps
from megatron.engine.groups import Groups, check_marked
from megatron.errors import ConfigError
from megatron.model.gpt import GPT
from megatron.model.parameters import Row, parameters
from megatron.model.passes import SinglePass
from megatron.ops import resolve
from megatron.optimizer import megatron_rule
from megatron.parallelize import Parallel, parallelize
from megatron.parallelize.specs import foreign_specs
from tests.cluster.fake_run import fake_parts
from tests.helpers.runs import flags, make_parts


def groups(rows: Mapping[str, Row], **settings: Any) -> Groups:
    config = parse_args(flags(**settings))
    return Groups(config.optimizer, rows, {}, ParallelState.plan(config.parallel.layout(1), 0))


def test_decay_follows_the_row() -> None:
    """A row overrides the shape; a parameter without a row decays by its shape."""
    rows = {name: parameter.row for name, parameter in parameters(parse_args(flags()).model, 97).items()}
    rule = groups(rows).of
    for name, row in rows.items():
        assert rule(name, nn.Parameter(torch.zeros(row.stored_shape))).wd_mult == float(row.decays), name
    vector = Row("scale", (3,))
    assert groups({"scale": vector}).of("scale", nn.Parameter(torch.zeros(3, 3))).wd_mult == 0.0
    matrix = nn.Parameter(torch.zeros(3, 3))
    assert rule("not.in.the.table", matrix) == megatron_rule("not.in.the.table", matrix)
    other = groups({"x": replace(vector, name="x")}).of
    assert rule("not.in.the.table", matrix) != other("x", matrix)


def test_the_tables_of_the_vocabulary_have_the_decoupled_rate() -> None:
    """The rate applies to token embedding and output layer, not to the position table, as in Megatron."""
    settings = parse_args(flags(untie_embeddings_and_output_weights=True)).model
    rows = {name: parameter.row for name, parameter in parameters(settings, 97).items()}
    found = [name for name, row in rows.items() if groups(rows).of(name, nn.Parameter(torch.zeros(1))).decoupled]
    assert found == ["embedding.word_embeddings.weight", "output_layer.weight"]


def test_what_muon_orthogonalises() -> None:
    """Includes every matrix of a layer, also routers; excludes tables, biases and norms."""
    shape = {"swiglu": True, "ffn_hidden_size": 24, "disable_bias_linear": True, "num_experts": 2}
    config = parse_args(flags(optimizer="muon", **shape))
    rows = {name: found.row for name, found in parameters(config.model, 97, config.moe).items()}
    matrices = {name for name, row in rows.items() if row.is_linear_map}
    assert {name for name in matrices if name.startswith("layers.0")} == {
        "layers.0.self_attention.query_key_value.weight",
        "layers.0.self_attention.dense.weight",
        "layers.0.mlp.router.weight",
        *(f"layers.0.mlp.experts.{n}.dense_{kind}.weight" for n in (0, 1) for kind in ("h_to_4h", "4h_to_h")),
    }
    assert all(name.startswith("layers.") for name in matrices)
    fused = {rows[name].fused_maps for name in matrices}
    assert fused == {None, (1, (1, 1, 1)), (0, (1, 1))}


def test_muon_on_a_model_that_marks_no_matrix_is_refused() -> None:
    config = parse_args(flags(optimizer="muon")).optimizer
    model = nn.Linear(3, 3)
    built = Parallel(model, foreign_specs(model), SinglePass(model, lambda *_: (torch.zeros(()),) * 2))
    with pytest.raises(ConfigError, match="use_muon = True"):
        check_marked(config, built)
    model.bias.use_muon = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="bias is marked with use_muon and has 1 dimensions"):
        check_marked(config, built)
    del model.bias.use_muon
    model.weight.use_muon = True  # type: ignore[assignment]
    check_marked(config, built)
    state = ParallelState.plan(parse_args(flags()).parallel.layout(1), 0)
    group = Groups(config, {}, built.specs, state).of
    assert group("weight", model.weight).matrix is not None and group("bias", model.bias).matrix is None


def test_weight_gradients_reach_the_buffers() -> None:
    """Deferred products always reach them; others only with kernels that add into the buffers."""
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
        assert (built.wgrads._sink is engine.store) == connected, (kernels, settings)


def test_the_size_and_the_type_of_messages() -> None:
    def buffers(**settings: Any) -> list[tuple[int, torch.dtype]]:
        _, parts = make_parts(flags(bf16=True, **settings))
        with parts:
            return [(bucket.buffer.numel(), bucket.buffer.dtype) for bucket in parts.trainer.engine.store._buckets]

    ((every, dtype),) = buffers()
    assert dtype == torch.float32
    cut = buffers(ddp_bucket_size=5000, grad_reduce_in_bf16=True)
    assert len(cut) > 3 and sum(size for size, _ in cut) == every and {dtype for _, dtype in cut} == {torch.bfloat16}


ASKED = {"overlap_grad_reduce": True}
REFUSED = {"no_overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("settings", "on_gpu", "on_cpu"),
    [
        ({}, True, False),
        (ASKED, True, True),
        (REFUSED, False, False),
        ({"overlap_grad_reduce=false": True}, False, False),
        ({"cuda_graphs": True}, False, None),
    ],
)
def test_where_gradients_are_reduced_during_backward(
    settings: dict[str, Any], on_gpu: bool, on_cpu: bool | None
) -> None:
    with fake_parts(flags(bf16=True, **settings), 0, 2) as parts:
        assert parts.engine.store.overlap == on_gpu
    if on_cpu is not None:
        assert _overlaps(parse_args(flags(**settings)), torch.device("cpu")) == on_cpu


def test_both_answers_about_overlap_are_rejected() -> None:
    with pytest.raises(ConfigError, match="--no-overlap-grad-reduce and --overlap-grad-reduce exclude each other"):
        parse_args(flags(**ASKED, **REFUSED))


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [(None, 1, 40_000_000), (None, 40, 40_000_000), (None, 64, 64_000_000), (8000, 64, 8000)],
)
def test_buckets_grow_with_the_ranks(given: int | None, ranks: int, expected: int) -> None:
    assert bucket_size(given, ranks) == expected


def test_context_parallel_ranks_count_for_the_size_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    store = assembly.BucketStore

    def noted(*arguments: Any, bucket_size: int, **more: Any) -> Any:
        sizes.append(bucket_size)
        return store(*arguments, bucket_size=bucket_size, **more)

    monkeypatch.setattr(assembly, "BucketStore", noted)
    settings = {"context_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 48}
    with fake_parts(flags(bf16=True, **settings), 0, 96):
        assert sizes == [96_000_000]


def test_the_size_of_buckets_is_in_the_checkpoint(tmp_path: Path) -> None:
    for given, expected in ((None, 40_000_000), (8000, 8000)):
        folder = tmp_path / str(given)
        _, parts = make_parts(flags(train_iters=1, save=folder, ddp_bucket_size=given))
        parts.trainer.fit()
        assert manifest.read(folder / "iter_0000001").fingerprint["bucket_size"] == expected
