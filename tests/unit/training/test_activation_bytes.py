"""Predicted activations equal what autograd keeps of a layer: never more, and little less with native kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.config.run import build
from megatron.model import GPT, recompute
from megatron.ops import Kernels, resolve
from megatron.ops.library import Library, library
from megatron.pipeline_schedules import fills_groups, interleaved
from megatron.training.activation_bytes import _most_of_interleaved, activation_bytes

BATCH, SEQ, VOCABULARY = 2, 64, 128
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 176,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
EXPERTS = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 48}
SELECTIVE = {"recompute_granularity": "selective"}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bf16": {"bf16": True},
    "llama": LLAMA,
    "few groups, normed": {**LLAMA, "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True},
    "norms after": {**LLAMA, "norm_placement": "after"},
    "parallel": {"use_parallel_residual": True},
    "squared relu": {"squared_relu": True},
    "selective": SELECTIVE,
    "mlp recomputed": {**SELECTIVE, "recompute_modules": ("mlp",)},
    "norms recomputed": {**SELECTIVE, "recompute_modules": ("layernorm",)},
    "experts": EXPERTS,
    "activation of experts recomputed": {**EXPERTS, **SELECTIVE, "recompute_modules": ("layernorm", "moe_act")},
    "experts recomputed": {**EXPERTS, "moe_layer_recompute": True},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
}


def kept_bytes(settings: dict[str, Any], layers: int, kernels: Kernels) -> int:
    """Bytes that a forward pass saves, without weights; each storage counts once."""
    config = build({**SHAPE, **settings, "num_layers": layers})
    model = GPT(config.model, vocab_size=VOCABULARY, kernels=kernels, moe=config.moe, recompute=config.recompute).to(
        torch.bfloat16 if settings.get("bf16") else torch.float32
    )
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def both(inner: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Hooks of a part that is recomputed. Torch calls the innermost hooks only."""
        return saved_tensors_hooks(lambda t: pack(kept) if isinstance(kept := inner(t), Tensor) else kept, unpack)

    tokens = torch.randint(VOCABULARY, (BATCH, SEQ))
    with pytest.MonkeyPatch.context() as patch, saved_tensors_hooks(pack, lambda tensor: tensor):
        patch.setattr(recompute, "saved_tensors_hooks", both)
        model.train()(tokens, labels=tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def predicted(settings: dict[str, Any], layers: int, kernels: Kernels) -> float:
    config = build({**SHAPE, **settings, "num_layers": layers, "seq_length": SEQ, "micro_batch_size": BATCH})
    found = activation_bytes(
        config, 0, micro_batch=BATCH, micro_batches=1, vocabulary=VOCABULARY, backend=kernels.backend
    )
    assert found.logits == BATCH * SEQ * VOCABULARY * (2 if settings.get("bf16") else 4)
    return found.layers


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("native", "least"), [(True, 0.96), (False, 0.65)], ids=["native", "torch"])
def test_a_layer_keeps_what_is_predicted(name: str, native: bool, least: float) -> None:
    """Compares two more layers, so that the model's constant part cancels."""
    if native and library().missing is not None:
        pytest.skip("the native kernels are not built")
    kernels = resolve("auto", "cpu", native=None if native else Library(missing="left out"))
    settings, (few, many) = CASES[name], (4, 6)
    kept = kept_bytes(settings, many, kernels) - kept_bytes(settings, few, kernels)
    share = (predicted(settings, many, kernels) - predicted(settings, few, kernels)) / kept
    assert least <= share <= 1.001, share


@pytest.mark.parametrize(("device", "factor", "rows"), [("cpu", 3.0, 1.0), ("cpu", 0.5, 0.5), ("cuda", 3.0, 3.0)])
def test_a_gpu_keeps_whole_buffers_of_experts(device: str, factor: float, rows: float) -> None:
    kernels = resolve("auto", device)

    def of_experts(**capacity: Any) -> float:
        settings = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 32}
        return predicted({**settings, **capacity}, 2, kernels) - predicted({**settings, **none}, 2, kernels)

    none = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
    assert of_experts(moe_expert_capacity_factor=factor) == pytest.approx(rows * of_experts())


def in_flight(stage: int, micro_batches: int, **layout: Any) -> float:
    """Activations in flight, in micro-batches of a whole stage."""
    settings = {**SHAPE, "num_layers": 8, "seq_length": SEQ, "micro_batch_size": 1, **layout}
    kernels = resolve("ref", "cpu")

    def layers(count: int, **more: Any) -> float:
        config = build({**settings, **more})
        found = activation_bytes(
            config, stage, micro_batch=1, micro_batches=count, vocabulary=1, backend=kernels.backend
        )
        return found.layers

    alone = {"pipeline_schedule": None, "num_layers_per_virtual_pipeline_stage": None}
    return layers(micro_batches) / layers(1, **alone)


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [("gpipe", [32, 32, 32, 32]), ("1f1b", [4, 3, 2, 1]), ("zero-bubble", [4, 4, 4, 4])],
)
def test_micro_batches_in_flight(schedule: str, counts: list[int]) -> None:
    layout = {"pipeline_model_parallel_size": 4, "pipeline_schedule": schedule}
    found = [in_flight(stage, 32, **layout) for stage in range(4)]
    if schedule == "zero-bubble":  # inputs go when B has run, and only what W needs stays
        assert all(0 < one <= most for one, most in zip(found, counts, strict=True))
    else:
        assert found == pytest.approx(counts)
    assert in_flight(0, 10**6, **{**layout, "pipeline_schedule": "1f1b"}) == pytest.approx(4)


def test_uneven_chunks_in_flight_are_those_of_the_schedule() -> None:
    draw, compared = random.Random(26), 0
    while compared < 300:
        ranks, count, micro_batches = draw.randint(2, 5), draw.randint(2, 4), draw.randint(1, 40)
        group, stage = draw.randint(ranks, ranks + 6), draw.randrange(ranks)
        if not fills_groups(micro_batches, group, ranks):
            continue
        compared += 1
        chunks = [float(draw.randint(0, 9)) for _ in range(count)]
        now = most = 0.0
        for action in interleaved(ranks, stage, micro_batches, count, group):
            now += {"F": chunks[action.chunk], "B": -chunks[action.chunk], "W": 0.0}[action.kind]
            most = max(most, now)
        found = _most_of_interleaved(micro_batches, group, 2 * (ranks - stage - 1), chunks)
        assert found == most, (ranks, stage, micro_batches, group, chunks)


def test_groups_of_any_size_are_planned_at_once() -> None:
    assert _most_of_interleaved(10**9, 10**9, 6, [1.0, 2.0]) == 10**9 + 7 * 2


def test_chunks_in_flight() -> None:
    layout = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2}
    # Warm-up of 2 (p - 1 - rank) + (v - 1) group passes, and one more, each of half a stage.
    assert [in_flight(stage, 32, **layout) for stage in (0, 1)] == pytest.approx([2.5, 1.5])
    larger = {**layout, "microbatch_group_size_per_virtual_pipeline_stage": 5}
    assert [in_flight(stage, 35, **larger) for stage in (0, 1)] == pytest.approx([4.0, 3.0])
