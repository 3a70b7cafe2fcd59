"""Routers, capacity, and losses that reach the gradient once, compared with their definitions token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config import MoEConfig, RecomputeConfig
from megatron.model import GPT
from megatron.model.factory import ModuleFactory
from megatron.model.moe import MoE
from megatron.model.moe_losses import RouterReports, balance_loss, z_loss
from megatron.model.router import Router, within_capacity, within_groups
from megatron.ops import resolve
from tests.unit.model.helpers import LLAMA, build, config, tokens

HIDDEN, EXPERTS = 8, 5


def factory(settings: MoEConfig) -> ModuleFactory:
    return ModuleFactory(config(num_layers=1, hidden_size=HIDDEN), resolve("ref", "cpu"), settings)


def router(**options: Any) -> Router:
    settings = MoEConfig(num_experts=EXPERTS, **options)
    made = Router(factory(settings), 0).double()
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
    return made


def inputs(batch: int = 2, seq: int = 7) -> Tensor:
    return torch.randn(batch, seq, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe_router_topk": 3},
        {"moe_router_pre_softmax": True},
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 16.0},
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_score_function": "sigmoid", "moe_router_topk": 1, "moe_router_topk_scaling_factor": 2.5},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_dtype": "fp64"},
    ],
    ids=str,
)
def test_choice_and_weights_token_by_token(options: dict[str, Any]) -> None:
    made, x = router(**options), inputs()
    bias = [0.0] * EXPERTS
    if made.expert_bias is not None:
        made.expert_bias += torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4])
        bias = made.expert_bias.tolist()
    routing, topk = made(x), options.get("moe_router_topk", 2)
    sigmoid, factor = (
        options.get("moe_router_score_function") == "sigmoid",
        options.get("moe_router_topk_scaling_factor"),
    )
    for b, t in ((b, t) for b in range(2) for t in range(7)):
        logits = [sum(x[b, t, i].item() * made.weight[e, i].item() for i in range(HIDDEN)) for e in range(EXPERTS)]
        every = sum(math.exp(value) for value in logits)
        scores = [1 / (1 + math.exp(-v)) if sigmoid else math.exp(v) / every for v in logits]
        chosen = sorted(range(EXPERTS), key=lambda e: -(scores[e] + bias[e]))[:topk]
        total = sum(scores[e] for e in chosen)
        normalised = not options.get("moe_router_pre_softmax") and not (sigmoid and topk == 1)
        wanted = {e: scores[e] / (total if normalised else 1.0) * (factor or 1.0) for e in chosen}
        got = dict(zip(routing.experts[b, t].tolist(), routing.weights[b, t].tolist(), strict=True))
        assert got.keys() == wanted.keys()
        assert all(abs(got[e] - wanted[e]) < 1e-12 for e in wanted)


def grouped_router(**options: Any) -> Router:
    settings = MoEConfig(
        num_experts=12,
        moe_router_topk=4,
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        **options,
    )
    made = Router(factory(settings), 0)
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(6))
    assert made.expert_bias is not None
    made.expert_bias.copy_(0.3 * torch.randn(12, generator=torch.Generator().manual_seed(7)))
    return made


def differs_from_deepseek(ours: Router) -> bool:
    """Returns whether choices or weights differ from those of transformers' router, on many tokens."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    shape = {"hidden_size": HIDDEN, "n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    shape |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
    theirs = modeling.DeepseekV3TopkRouter(modeling.DeepseekV3Config(**shape))
    theirs.load_state_dict({"weight": ours.weight.data, "e_score_correction_bias": ours.expert_bias})
    x = torch.randn(3, 50, HIDDEN, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        _, weights, experts = theirs(x)
        routing = ours(x)
    wanted, found = (torch.zeros(150, 12) for _ in range(2))
    wanted.scatter_(1, experts, weights)
    found.scatter_(1, routing.experts.view(150, 4), routing.weights.view(150, 4))
    return not torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_experts_of_a_few_groups_as_in_deepseek() -> None:
    assert not differs_from_deepseek(grouped_router())


def no_groups(scores: Tensor, config: MoEConfig) -> Tensor:
    return scores


def the_best_expert_alone(scores: Tensor, config: MoEConfig) -> Tensor:
    """Planted bug: chooses groups by their largest score."""
    grouped = scores.unflatten(-1, (4, 3))
    open_groups = torch.zeros(grouped.shape[:-1]).scatter_(-1, grouped.amax(-1).topk(2, dim=-1).indices, 1)
    return grouped.masked_fill(open_groups.unsqueeze(-1) == 0, float("-inf")).flatten(-2)


def without_the_bias(scores: Tensor, config: MoEConfig) -> Tensor:
    """Planted bug: chooses groups without the bias, which then moves only the choice of experts."""
    made = grouped_router()
    assert made.expert_bias is not None
    closed = within_groups(scores - made.expert_bias, config).isinf()
    return scores.masked_fill(closed, float("-inf"))


@pytest.mark.parametrize("wrong", [no_groups, the_best_expert_alone, without_the_bias])
def test_a_wrong_choice_of_groups_is_seen(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.model.router.within_groups", wrong)
    assert differs_from_deepseek(grouped_router())


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_capacity_choice_by_choice(policy: str, capacity: int) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(3, 11, EXPERTS, generator=generator)
    weights, experts = scores.topk(2, dim=-1)
    settings = MoEConfig(num_experts=EXPERTS, moe_expert_capacity_factor=1.0, moe_token_drop_policy=policy)
    kept = within_capacity(experts, weights, capacity, settings)
    for b in range(3):
        choices = [(t, k) for t in range(11) for k in range(2)]
        for expert in range(EXPERTS):
            wanting = [(t, k) for t, k in choices if experts[b, t, k] == expert]
            if policy == "probs":
                wanting.sort(key=lambda place: -weights[b, place[0], place[1]].item())
            taken = {place for place in wanting if kept[b, place[0], place[1]]}
            assert taken == set(wanting[:capacity])


def test_what_is_dropped_is_missing_in_the_sum() -> None:
    shape = config(**LLAMA)
    make: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 16}
    models = []
    for factor in (None, 0.5):
        moe = MoEConfig(**make, moe_expert_capacity_factor=factor)
        models.append(build(shape, dtype=torch.float64, moe=moe).layers["0"].mlp)
    whole, dropping = models
    assert isinstance(whole, MoE) and isinstance(dropping, MoE)
    x = torch.randn(2, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    routing = dropping.router(x)
    assert routing.accepted is not None and 0 < routing.accepted.sum() < routing.accepted.numel()
    expected = torch.zeros_like(x)
    for b, t, k in routing.accepted.nonzero().tolist():
        expert = whole.experts[str(routing.experts[b, t, k].item())]
        expected[b, t] += routing.weights[b, t, k] * expert(x[b, t])
    assert torch.allclose(dropping(x), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(whole(x), expected, rtol=0, atol=1e-3)


def test_losses_by_their_definition() -> None:
    scores = torch.rand(3, 7, EXPERTS, dtype=torch.float64).softmax(-1)
    chosen = scores.topk(2, dim=-1).indices
    counts = torch.stack([torch.bincount(row.flatten(), minlength=EXPERTS) for row in chosen])
    each, together = 0.0, 0.0
    for e in range(EXPERTS):
        each += EXPERTS * sum(counts[b, e].item() / (7 * 2) * scores[b, :, e].mean().item() for b in range(3))
        together += EXPERTS * counts[:, e].sum().item() / (21 * 2) * scores[:, :, e].mean().item()
    assert balance_loss(scores, counts, 2, 1, "sequence").item() == pytest.approx(each, rel=1e-12)
    assert balance_loss(scores, counts, 2, 1, "micro-batch").item() == pytest.approx(3 * together, rel=1e-12)
    even = torch.full((1, 5, 5), 0.2, dtype=torch.float64)
    assert balance_loss(even, torch.full((1, 5), 2), 2, 1, "sequence").item() == pytest.approx(1.0)
    logits = torch.randn(3, 7, EXPERTS, dtype=torch.float64)
    assert torch.allclose(z_loss(logits, 1), logits.exp().sum(-1).log().square().mean(1).sum())


def with_losses(recompute: RecomputeConfig | None = None) -> GPT:
    moe = MoEConfig(
        num_experts=4,
        moe_ffn_hidden_size=16,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.3,
        moe_z_loss_coeff=0.02,
    )
    return build(config(**LLAMA), dtype=torch.float64, moe=moe, recompute=recompute)


def gradients(model: GPT) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_attached_losses_give_the_gradient_of_the_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective as one scalar: mean token loss + coefficients * mean over the sequences."""
    ids = tokens()
    attached = with_losses()
    assert attached.routers is not None
    attached.routers.begin(ids.numel() / len(ids))  # counted tokens times the factor 1, over the sequences
    attached(ids, labels=ids).sum().backward()
    written, parts = with_losses(), []

    def keep(self: RouterReports, weights: Tensor, watch: Any, losses: dict[str, Tensor]) -> Tensor:
        parts.append(0.3 * losses["load_balancing_loss"] + 0.02 * losses["z_loss"])
        return weights

    monkeypatch.setattr(RouterReports, "attach", keep)
    mean = written(ids, labels=ids).mean()
    (mean + torch.stack(parts).sum() / len(ids)).backward()
    expected = gradients(written)
    for name, gradient in gradients(attached).items():
        assert torch.allclose(gradient / ids.numel(), expected[name], rtol=1e-10, atol=1e-14), name


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(recompute_granularity="full", recompute_method="uniform"),
        RecomputeConfig(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
        RecomputeConfig(moe_layer_recompute=True),
    ],
    ids=["uniform", "block", "moe"],
)
def test_recomputation_reports_once(recompute: RecomputeConfig) -> None:
    ids, models = tokens(), (with_losses(), with_losses(recompute))
    for model in models:
        model(ids, labels=ids).sum().backward()
    plain, again = models
    assert plain.routers is not None and again.routers is not None
    assert plain.routers.losses == again.routers.losses and plain.routers.losses
    assert {n: c.tolist() for n, c in plain.routers.counts.items()} == {
        n: c.tolist() for n, c in again.routers.counts.items()
    }
    assert sum(c.sum() for c in plain.routers.counts.values()) == 4 * ids.numel() * 2
    expected = gradients(plain)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(again).items())


def test_an_evaluation_reports_nothing() -> None:
    model = with_losses().eval()
    model(tokens(), labels=tokens())
    with torch.no_grad():
        model.train()(tokens(), labels=tokens())
    assert model.routers is not None and not model.routers.losses and not model.routers.counts


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    moe = MoEConfig(num_experts=40, moe_ffn_hidden_size=8)
    model = build(config(**LLAMA), dtype=torch.float64, moe=moe)
    model(tokens(1, 3), labels=tokens(1, 3)).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    idle = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()]
    assert not missing and any(".experts." in name for name in idle)


def test_the_bias_stays_in_fp32() -> None:
    moe = MoEConfig(num_experts=4, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    model = GPT(config(**LLAMA), vocab_size=61, kernels=resolve("ref", "cpu"), moe=moe).to(torch.bfloat16)
    mlp = model.layers["0"].mlp
    assert isinstance(mlp, MoE) and mlp.router.expert_bias is not None
    assert mlp.router.expert_bias.dtype == torch.float32 and mlp.router.weight.dtype == torch.bfloat16
    assert "layers.0.mlp.router.expert_bias" in model.state_dict()


def test_generation_with_a_cache_is_the_whole_pass() -> None:
    moe = MoEConfig(num_experts=4, moe_shared_expert_intermediate_size=8)
    model = build(config(**LLAMA), dtype=torch.float64, moe=moe).eval()
    ids = tokens(1, 9)
    cache = model.make_cache(1, 9)
    parts = [model(ids[:, i : i + 1], cache=cache) for i in range(9)]
    assert torch.allclose(torch.cat(parts, 1), model(ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "reported"), [("aux_loss", 0.1), ("seq_aux_loss", 0.1), ("none", 0.0)])
def test_a_balancing_loss_that_is_turned_off_is_not_reported(kind: str, reported: float) -> None:
    config = MoEConfig(num_experts=4, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.2, moe_router_load_balancing_type=kind)
    assert RouterReports(config, 2).coefficients == {"load_balancing_loss": reported, "z_loss": 0.2}
