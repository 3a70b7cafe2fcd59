"""Mixture of experts equals transformers: logits and every gradient of MixtralForCausalLM and Qwen3MoeForCausalLM in
fp64 to 1e-10. Random weights are large enough that routers have preferences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig, MoEConfig
from megatron.model import GPT
from megatron.model.moe import MoE, Router
from megatron.model.router import Routing
from megatron.ops import resolve
from megatron.ops.expert_rows import ByExpert

EQUAL = 1e-10

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
    """Maps their weights, independently of the exporter; their model has all experts in one tensor."""
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
    """Keeps their norms and router softmax in fp64; they round to fp32 whatever the model's dtype."""
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
    right = MoE._by_expert

    def wrong(self: MoE, routing: Routing) -> ByExpert:
        order = right(self, routing)
        return replace(order, place=order.place.flip(0))

    patch.setattr(MoE, "_by_expert", wrong)


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
    """Their loss of one sequence and one layer is k times ours: they count each of the k choices."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    from megatron.model.moe_losses import balance_loss

    logits = torch.randn(1, SEQ, EXPERTS, dtype=torch.float64)
    theirs = modeling.load_balancing_loss_func((logits.view(SEQ, EXPERTS),), EXPERTS, 2)
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=EXPERTS).view(1, -1)
    ours = balance_loss(logits.softmax(-1), counts, 2, 1, "sequence")
    assert abs(theirs.item() - 2 * ours.item()) < 1e-6
