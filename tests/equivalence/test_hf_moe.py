"""Models with experts to transformers and back: equal logits, bit-equal weights; unsupported settings are rejected."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.run_state import RunHistory, TrainState
from megatron.checkpoint.save import save_checkpoint
from megatron.config import ModelConfig, MoEConfig
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.hf.check import check_export, compare_logits
from megatron.interop.hf.export import Export, plan_export, write_export
from megatron.interop.hf.families import by_model_type
from megatron.interop.hf.importer import open_folder, read_tensors
from megatron.layout import Layout
from megatron.model.moe_losses import balance_loss
from megatron.model.parameters import parameters
from megatron.state.shard import Shard
from tests.helpers.other_programs import find_checkpoint

pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
QWEN = SHAPE | {"qk_layernorm": True, "kv_channels": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", SHAPE, {"num_experts": 4}),
    "mixtral, narrow experts": ("MixtralForCausalLM", SHAPE, {"num_experts": 5, "moe_ffn_hidden_size": 24}),
    "mixtral, window": ("MixtralForCausalLM", SHAPE | {"window_size": (19, 0)}, {"num_experts": 4}),
    "qwen3": ("Qwen3MoeForCausalLM", QWEN, {"num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 24}),
    "qwen3, not normalised": (
        "Qwen3MoeForCausalLM",
        QWEN,
        {"num_experts": 6, "moe_router_pre_softmax": True, "moe_ffn_hidden_size": 24},
    ),
    "qwen3, a dense layer": (
        "Qwen3MoeForCausalLM",
        QWEN,
        {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": "[1,0,1]"},
    ),
}


def save_random(directory: Path, config: ModelConfig, moe: MoEConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors, params = {}, {}
    for parameter in parameters(config, 61, moe).values():
        weight = torch.randn(parameter.stored_shape, generator=generator) * 0.2
        if parameter.name.endswith("layernorm.weight"):
            weight += 1
        tensors[parameter.name] = weight
        params[parameter.name] = (Shard(name=parameter.name, logical_shape=parameter.shape), weight)
    state = TrainState(
        iteration=1,
        consumed_train_samples=4,
        consumed_valid_samples=0,
        params=params,
        optimizer=None,
        optimizer_extra={},
        scheduler={},
        rng=None,
        config={"model": asdict(config), "moe": asdict(moe)},
        args={"padded_vocab_size": 64},
        data={},
    )
    with closing(RunHistory("t")) as history:
        save_checkpoint(
            directory, state, parallel=ParallelState.build(Layout(1), 0), save_tokenizer=None, history=history
        )
    return tensors


def plan(directory: Path) -> Export:
    found = find_checkpoint(directory, parallel=ParallelState.build(Layout(1), 0))
    assert found is not None
    return plan_export(found, token_ids={"bos_token_id": 3, "eos_token_id": 3})


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_and_import_gives_the_same_bits_back(tmp_path: Path, case: str) -> None:
    architecture, shape, experts = CASES[case]
    config, moe = ModelConfig(**shape), MoEConfig(**experts)
    tensors = save_random(tmp_path / "native", config, moe)
    export = plan(tmp_path / "native")
    assert export.family.architecture == architecture
    messages: list[str] = []
    write_export(
        export,
        tmp_path / "hf",
        check=lambda folder: check_export(export, folder, messages.append),
        log=messages.append,
    )
    assert any("logits equal" in message for message in messages)
    back = open_folder(tmp_path / "hf")
    read = {name: tensor for name, _, tensor in read_tensors(back)}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert back.moe.expert_layers(3) == moe.expert_layers(3)
    assert (back.moe.num_experts, back.moe.moe_router_topk) == (moe.num_experts, moe.moe_router_topk)
    assert back.moe.moe_router_pre_softmax == moe.moe_router_pre_softmax


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_load_balance_loss_weighs_what_it_did(family: str, layers: int) -> None:
    """Identical routers in all layers, the formula of `transformers`, and the exported coefficient."""
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    config = ModelConfig(**{**(SHAPE if family == "mixtral" else QWEN), "num_layers": layers})
    moe = MoEConfig(num_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.03)
    logits = torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shares = logits.softmax(-1)
    counts = torch.zeros(1, 4, dtype=torch.float64).scatter_add_(
        1, shares.topk(2).indices.view(1, -1), torch.ones(1, 32, dtype=torch.float64)
    )
    ours = moe.moe_aux_loss_coeff * layers * balance_loss(shares, counts, 2, 1, "sequence")
    theirs = modeling.load_balancing_loss_func((logits[0].float(),) * layers, 4, 2)
    exported = by_model_type(family).experts_to_json(config, moe)["router_aux_loss_coef"]
    assert float(exported * theirs) == pytest.approx(float(ours), rel=1e-5)
    assert float(ours) > 0.03


@pytest.mark.parametrize(
    ("key", "value"), [("num_experts_per_tok", 1), ("norm_topk_prob", False), ("decoder_sparse_step", 2)]
)
def test_a_wrong_config_json_is_seen(tmp_path: Path, key: str, value: Any) -> None:
    _, shape, experts = CASES["qwen3"]
    save_random(tmp_path / "native", ModelConfig(**shape), MoEConfig(**experts))
    export = plan(tmp_path / "native")
    write_export(export, tmp_path / "hf", log=lambda text: None)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises((CheckpointError, ValueError, RuntimeError)):
        compare_logits(export, tmp_path / "hf")


@pytest.mark.parametrize(
    ("shape", "experts", "named"),
    [
        (SHAPE, {"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid"),
        (
            QWEN,
            {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0},
            "--moe-router-topk-scaling-factor",
        ),
        (SHAPE, {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "--moe-router-num-groups 2"),
        (SHAPE, {"moe_shared_expert_intermediate_size": 8}, "--moe-shared-expert-intermediate-size"),
        (SHAPE, {"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor"),
        (SHAPE, {"moe_router_pre_softmax": True}, "--moe-router-pre-softmax"),
        (SHAPE, {"moe_layer_freq": "[0,1,1]"}, "--moe-layer-freq"),
        (QWEN | {"window_size": (7, 0)}, {}, "--window-size"),
    ],
)
def test_what_no_family_computes_is_refused(
    tmp_path: Path, shape: dict[str, Any], experts: dict[str, Any], named: str
) -> None:
    save_random(tmp_path, ModelConfig(**shape), MoEConfig(num_experts=4, **experts))
    with pytest.raises(ConfigError, match=named):
        plan(tmp_path)
