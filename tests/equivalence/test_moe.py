"""Mixture of experts is what transformers computes, and the same in every layout: fp64, 1e-10.

Against MixtralForCausalLM and Qwen3MoeForCausalLM: logits and every gradient, with random weights large enough that
routers have preferences. Then expert parallelism, alone and with every other axis, against one process: losses, norms,
every gradient and the weights after five steps, with router losses, uneven loss masks, and experts that get no token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, MoEConfig
from megatron.distributed.state import Axis
from megatron.model import GPT
from megatron.model.moe import MoE, Router
from megatron.ops import resolve
from megatron.training.assemble import Parts
from tests.helpers.distributed import RankFailed
from tests.helpers.layouts import Outcome, at_layout, at_layouts, reference, worst
from tests.helpers.runs import flags

EQUAL = 1e-10
SEEN = 1e-6

# ---- transformers ----------------------------------------------------------------------------------------------------

HIDDEN, HEADS, EXPERTS, FFN, VOCAB, SEQ = 32, 4, 6, 24, 67, 19
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "intermediate_size": FFN, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "head_dim": HIDDEN // HEADS, "rms_norm_eps": 1e-6, "attn_implementation": "eager", "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "experts_implementation": "eager",
}  # fmt: skip
OURS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "num_query_groups": 2,
    "max_position_embeddings": 64,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
FAMILIES = ("mixtral", "qwen3_moe", "qwen3_moe, not normalised", "qwen3_moe, dense layers")


def their_model(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if family == "mixtral":
        config = transformers.MixtralConfig(**SHAPE, num_local_experts=EXPERTS, num_experts_per_tok=2)
    else:
        config = transformers.Qwen3MoeConfig(
            **SHAPE | {"intermediate_size": 40},
            num_experts=EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=FFN,
            norm_topk_prob="not normalised" not in family,
            mlp_only_layers=[1] if "dense layers" in family else [],
        )
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            parameter.copy_(drawn + 1.0 if parameter.ndim == 1 and "norm" in name else drawn)
    return model


def our_model(family: str, **changes: Any) -> GPT:
    moe: dict[str, Any] = {"num_experts": EXPERTS, "moe_ffn_hidden_size": FFN, "moe_router_topk": 2}
    shape = dict(OURS)
    if family != "mixtral":
        moe |= {"moe_router_topk": 3, "moe_router_pre_softmax": "not normalised" in family}
        moe |= {"moe_layer_freq": "[1,0,1]"} if "dense layers" in family else {}
        shape |= {"qk_layernorm": True, "ffn_hidden_size": 40}
    config = ModelConfig(**shape)
    kernels = resolve("ref", "cpu")
    return GPT(config, vocab_size=VOCAB, kernels=kernels, moe=MoEConfig(**moe | changes)).double()


def to_ours(theirs: dict[str, Tensor], ours: GPT) -> dict[str, Tensor]:
    """Written here a second time, independent of the exporter. Theirs keep all experts in one tensor."""
    result: dict[str, Tensor] = {}
    for name in dict(ours.named_parameters()):
        parts = name.split(".")
        layer = f"model.layers.{parts[1]}"
        if name == "embedding.word_embeddings.weight":
            result[name] = theirs["model.embed_tokens.weight"]
        elif name == "output_layer.weight":
            result[name] = theirs["lm_head.weight"]
        elif name == "final_layernorm.weight":
            result[name] = theirs["model.norm.weight"]
        elif "query_key_value" in name:
            q, k, v = (theirs[f"{layer}.self_attn.{p}_proj.weight"] for p in "qkv")
            width = HIDDEN // HEADS
            q, k, v = q.view(2, 2, width, HIDDEN), k.view(2, 1, width, HIDDEN), v.view(2, 1, width, HIDDEN)
            result[name] = torch.cat([q, k, v], 1).reshape(-1, HIDDEN)
        elif "self_attention.dense" in name:
            result[name] = theirs[f"{layer}.self_attn.o_proj.weight"]
        elif "q_layernorm" in name or "k_layernorm" in name:
            result[name] = theirs[f"{layer}.self_attn.{parts[3][0]}_norm.weight"]
        elif "layernorm" in name:
            result[name] = theirs[f"{layer}.{parts[2]}.weight"]
        elif "router" in name:
            result[name] = theirs[f"{layer}.mlp.gate.weight"]
        elif "experts" in name:
            kind = "gate_up_proj" if "h_to_4h" in name else "down_proj"
            result[name] = theirs[f"{layer}.mlp.experts.{kind}"][int(parts[4])]
        elif "dense_h_to_4h" in name:
            result[name] = torch.cat([theirs[f"{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up")])
        else:
            result[name] = theirs[f"{layer}.mlp.down_proj.weight"]
    return result


def norms_in_fp64(patch: pytest.MonkeyPatch) -> None:
    """Their norms and router softmax round to fp32 whatever the model's dtype."""
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    patch.setattr(modeling_mixtral.MixtralRMSNorm, "forward", forward)
    patch.setattr(modeling_qwen3_moe.Qwen3MoeRMSNorm, "forward", forward)
    patch.setattr(Tensor, "float", lambda self: self)
    softmax = F.softmax
    patch.setattr(F, "softmax", lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim))


def against_theirs(family: str, ours: GPT, patch: pytest.MonkeyPatch) -> float:
    """The largest relative difference of logits and gradients."""
    theirs = their_model(family)
    weights = to_ours(dict(theirs.named_parameters()), ours)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[name])
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(VOCAB, (2, SEQ), generator=generator) for _ in range(2))
    with patch.context() as inner:
        norms_in_fp64(inner)
        their_logits = theirs(tokens, use_cache=False).logits
        F.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
    our_logits = ours(tokens)
    F.cross_entropy(our_logits.flatten(0, 1), labels.flatten()).backward()
    expected = to_ours({n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}, ours)
    differences = [((our_logits - their_logits).norm() / their_logits.norm()).item()]
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        differences.append(((parameter.grad - expected[name]).norm() / expected[name].norm().clamp_min(1e-12)).item())
    return max(differences)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_every_gradient_are_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert against_theirs(family, our_model(family), monkeypatch) < EQUAL


def weights_left_out(patch: pytest.MonkeyPatch) -> None:
    weigh = Router._weights
    patch.setattr(Router, "_weights", lambda *args: weigh(*args) * 0 + 1)


def rows_in_wrong_order(patch: pytest.MonkeyPatch) -> None:
    from megatron.model import moe

    placed = moe._placed
    patch.setattr(moe, "_placed", lambda rows, order, choices: placed(rows, order.flip(0), choices))


@pytest.mark.parametrize("plant", [weights_left_out, rows_in_wrong_order])
def test_a_planted_bug_is_seen_beside_transformers(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = our_model("mixtral")
    plant(monkeypatch)
    assert against_theirs("mixtral", ours, monkeypatch) > 1e-3


def test_weights_that_are_not_normalised_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = our_model("mixtral", moe_router_pre_softmax=True)
    assert against_theirs("mixtral", ours, monkeypatch) > 1e-3


def test_the_balance_loss_is_theirs() -> None:
    """Of one sequence and one layer theirs is the number of choices times ours: they count each of the k alone."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    from megatron.model.moe_losses import balance_loss

    logits = torch.randn(1, SEQ, EXPERTS, dtype=torch.float64)
    theirs = modeling.load_balancing_loss_func((logits.view(SEQ, EXPERTS),), EXPERTS, 2)
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=EXPERTS).view(1, -1)
    ours = balance_loss(logits.softmax(-1), counts, 2, 1, "sequence")
    assert abs(theirs.item() - 2 * ours.item()) < 1e-6


# ---- layouts ---------------------------------------------------------------------------------------------------------

EP, TP = "expert_model_parallel_size", "tensor_model_parallel_size"
PP, CP = "pipeline_model_parallel_size", "context_parallel_size"
SP = {"sequence_parallel": True}

COMMON: dict[str, Any] = {
    "num_layers": 4,
    "micro_batch_size": 1,
    "init_method_std": 0.1,
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "optimizer": "sgd",
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
}
MIXTRAL = {**COMMON, "num_experts": 4, "moe_router_topk": 2}
DEEPSEEK = {
    **COMMON,
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_layer_freq": "([0]*1+[1]*3)",
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
MANY = {**MIXTRAL, "num_experts": 24, "moe_router_topk": 1, "moe_router_pre_softmax": True}  # most get no token
RECOMPUTED = {**DEEPSEEK, "recompute_granularity": "full", "recompute_method": "uniform"}
ODD = {**MIXTRAL, "num_experts": 6, "num_layers": 5, "vocab_size": 131, "seq_length": 15, "moe_layer_freq": 2}
FIRST_STAGE_DENSE = {**MIXTRAL, "moe_layer_freq": "[0,0,1,1]"}
DROPPING = {**MIXTRAL, "moe_expert_capacity_factor": 0.8}
LATE_DROPPED = {**DROPPING, "moe_token_drop_policy": "position"}

CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    2: [
        (MIXTRAL, {EP: 2}),
        (MANY, {EP: 2}),
        (DEEPSEEK, {TP: 2}),
        (DEEPSEEK, {TP: 2, **SP}),
        (RECOMPUTED, {PP: 2, "pipeline_schedule": "zero-bubble"}),
        (DEEPSEEK, {CP: 2}),
        (DROPPING, {EP: 2}),
        (LATE_DROPPED, {TP: 2}),
        (ODD, {}),
    ],
    4: [
        (DEEPSEEK, {EP: 4}),
        (MIXTRAL, {EP: 2, "overlap_grad_reduce": True}),
        (MANY, {EP: 4}),
        (MIXTRAL, {EP: 2, TP: 2}),
        (DEEPSEEK, {EP: 2, TP: 2, **SP}),
        (MANY, {EP: 2, TP: 2, **SP}),
        (DEEPSEEK, {EP: 2, PP: 2}),
        (FIRST_STAGE_DENSE, {EP: 2, PP: 2}),
        (MIXTRAL, {EP: 2, PP: 2, "pipeline_schedule": "zero-bubble", "overlap_grad_reduce": True}),
        (RECOMPUTED, {EP: 2, PP: 2, "num_layers_per_virtual_pipeline_stage": 1}),
        (DEEPSEEK, {EP: 2, CP: 2}),
        (MIXTRAL, {EP: 4, CP: 2}),
        (DROPPING, {EP: 2}),
        (ODD, {EP: 2}),
    ],
    8: [
        (DEEPSEEK, {EP: 2, TP: 2, **SP}),
        (MIXTRAL, {EP: 4, PP: 2}),
        (MIXTRAL, {EP: 2, TP: 2, PP: 2, **SP}),
        (DEEPSEEK, {EP: 4, TP: 2, CP: 2}),
    ],
}


@cache
def expected(family: tuple[str, ...]) -> Outcome:
    return reference(family)


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_is_the_single_process(ranks: int) -> None:
    cases = CASES[ranks]
    outcomes = at_layouts(ranks, [flags(**family, **axes) for family, axes in cases])
    off = {
        f"{number}: {axes}": difference
        for number, ((family, axes), outcome) in enumerate(zip(cases, outcomes, strict=True))
        if not (difference := worst(outcome, expected(tuple(flags(**family))))) < EQUAL
    }
    assert not off


@pytest.mark.parametrize("family", [MIXTRAL, DEEPSEEK, DROPPING], ids=["mixtral", "deepseek", "dropping"])
def test_the_micro_batch_size_does_not_matter(family: dict[str, Any]) -> None:
    outcome = reference(flags(**{**family, "micro_batch_size": 4}))
    assert worst(outcome, expected(tuple(flags(**family)))) < EQUAL


def test_a_loss_over_micro_batches_moves_with_their_size() -> None:
    """Megatron's default; said at the start of such a run."""
    family = {**MIXTRAL, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    difference = worst(reference(flags(**{**family, "micro_batch_size": 4})), expected(tuple(flags(**family))))
    assert difference > SEEN


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def is_seen(family: dict[str, Any], axes: dict[str, Any], plant: Callable[[Parts], None], ranks: int) -> bool:
    try:
        outcome = at_layout(ranks, flags(**family, **axes), plant, timeout=20.0)
    except RankFailed:
        raise  # the bug is to give wrong numbers, not to crash
    except AssertionError:
        return True
    return worst(outcome, expected(tuple(flags(**family)))) > SEEN


def experts_of(parts: Parts) -> list[MoE]:
    return [module for module in parts.trainer.engine.model.modules() if isinstance(module, MoE)]


def experts_summed_like_dense_ones(parts: Parts) -> None:
    grads, dp_cp = parts.trainer.engine.grads, parts.trainer.engine.parallel.dp_cp
    for bucket in grads._buckets:
        bucket.axis = dp_cp


def experts_not_summed(parts: Parts) -> None:
    for bucket in parts.trainer.engine.grads._buckets:
        if bucket.axis.name == "expert_dp":
            bucket.axis = Axis.single("expert_dp")


def results_in_wrong_order(parts: Parts) -> None:
    for module in experts_of(parts):
        inner = module.dispatcher.forward
        module.dispatcher.forward = (  # type: ignore[method-assign]
            lambda rows, counts, experts, inner=inner: inner(rows, counts, experts).flip(0)
        )


def weights_not_multiplied(parts: Parts) -> None:
    for module in experts_of(parts):
        weigh = module.router._weights
        module.router._weights = (  # type: ignore[method-assign]
            lambda *args, weigh=weigh: weigh(*args) * 0 + 1
        )


def router_losses_counted_by_every_rank(parts: Parts) -> None:
    """As if each rank's mean over its own sequences were the mean."""
    steps = parts.trainer.engine.routers
    assert steps is not None
    begin = steps.begin

    def wrong(batches: Any, *, batch_size: int, factor: float) -> None:
        begin(batches, batch_size=batch_size // steps.parallel.dp_cp.size, factor=factor)

    steps.begin = wrong  # type: ignore[method-assign]


def router_losses_left_out(parts: Parts) -> None:
    steps = parts.trainer.engine.routers
    assert steps is not None
    steps.reports.attach = lambda weights, watch, losses: weights  # type: ignore[method-assign]


def router_losses_reported_once_too_often(parts: Parts) -> None:
    """Each tensor-parallel rank of a split sequence takes its piece for the whole."""
    steps = parts.trainer.engine.routers
    assert steps is not None
    steps.reports.pieces = 1


def sequences_counted_by_their_pieces(parts: Parts) -> None:
    for module in experts_of(parts):
        module.router.sum_of_sequence = lambda counts: counts


def shared_expert_forgotten(parts: Parts) -> None:
    for module in experts_of(parts):
        module.forward = (  # type: ignore[method-assign]
            lambda x, module=module: module._routed(x, module.router(x))
        )


def bias_not_stepped(parts: Parts) -> None:
    steps = parts.trainer.engine.routers
    assert steps is not None
    steps._step_biases = lambda counts: None  # type: ignore[method-assign]


def bias_stepped_by_own_counts(parts: Parts) -> None:
    steps = parts.trainer.engine.routers
    assert steps is not None
    step = steps._step_biases

    def wrong(counts: Tensor) -> None:
        own = torch.zeros_like(counts)
        for layer, seen in steps.reports.counts.items():
            own[steps._layers.index(layer)] = seen
        step(own)

    steps._step_biases = wrong  # type: ignore[method-assign]


def expert_norms_not_added(parts: Parts) -> None:
    optimizer = parts.trainer.engine.optimizer
    optimizer._split_over = {name: axes[:-1] for name, axes in optimizer._split_over.items()}


@pytest.mark.parametrize(
    ("ranks", "family", "axes", "plant"),
    [
        (2, MIXTRAL, {EP: 2}, results_in_wrong_order),
        (2, MIXTRAL, {EP: 2}, weights_not_multiplied),
        (2, MIXTRAL, {EP: 2}, router_losses_counted_by_every_rank),
        (2, MIXTRAL, {EP: 2}, router_losses_left_out),
        (2, MIXTRAL, {EP: 2}, expert_norms_not_added),
        (2, DEEPSEEK, {EP: 2}, shared_expert_forgotten),
        (2, DEEPSEEK, {EP: 2}, bias_not_stepped),
        (2, DEEPSEEK, {EP: 2}, bias_stepped_by_own_counts),
        (2, DEEPSEEK, {TP: 2, **SP}, router_losses_reported_once_too_often),
        (2, DEEPSEEK, {CP: 2}, sequences_counted_by_their_pieces),
        (4, MIXTRAL, {EP: 2}, experts_summed_like_dense_ones),
        (4, MIXTRAL, {EP: 2}, experts_not_summed),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_is_seen(ranks: int, family: dict[str, Any], axes: dict[str, Any], plant: Any) -> None:
    assert is_seen(family, axes, plant, ranks)
