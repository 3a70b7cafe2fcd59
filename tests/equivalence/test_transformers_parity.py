"""Our logits and every gradient against transformers' own classes, with weights large enough to see a mistake.

On freshly initialised weights (std 0.02) a wrong QKV layout moves the loss by 0.0003, so weights here have std 0.2.
The mapping of weights is written here a second time, independent of the exporter. fp64 to 1e-10 (their RMSNorm
rounds to fp32 inside, whatever the model's dtype is; for fp64 that is undone by a patch in this file), and fp32 to
1e-4 with their classes untouched. Each planted bug must be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model import GPT
from megatron.ops import Kernels, resolve

transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, LAYERS, VOCAB, SEQ = 64, 4, 2, 199, 72
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    family: str  # gpt2, llama, qwen2, qwen3, mistral
    groups: int = HEADS
    tied: bool = False
    base: float = 1e4
    scaling: str = "none"
    biases: str = "none"  # none, qkv, all
    window: int | None = None
    options: tuple[tuple[str, Any], ...] = ()


def rope_cases() -> Iterator[Case]:
    """{MHA, GQA, MQA} x {tied, untied} x {1e4, 5e5, llama3, linear, yarn} x {no biases, biases}."""
    for groups in (4, 2, 1):
        for tied in (False, True):
            for base, scaling in ((1e4, "none"), (5e5, "none"), (5e5, "llama3"), (1e4, "linear"), (1e4, "yarn")):
                for biases in ("none", "all"):
                    name = f"llama-g{groups}-{'tied' if tied else 'untied'}-{base:g}-{scaling}-{biases}"
                    yield Case(name, "llama", groups, tied, base, scaling, biases)


CASES = [
    Case("gpt2", "gpt2", tied=True, biases="all"),
    Case("gpt2-untied-erf", "gpt2", biases="all", options=(("bias_gelu_fusion", False),)),
    *rope_cases(),
    Case("qwen2-gqa-tied", "qwen2", 2, True, 1e6, biases="qkv"),
    Case("qwen2-mha-untied", "qwen2", 4, False, 1e6, biases="qkv"),
    Case("qwen3-gqa-tied", "qwen3", 2, True, 1e6, options=(("kv_channels", 32),)),
    Case("qwen3-mqa-untied", "qwen3", 1, False, 1e6),
    Case("mistral-window", "mistral", 2, window=7),
    Case("mistral-window-mha-tied", "mistral", 4, True, window=31),
]


def our_config(case: Case) -> ModelConfig:
    values: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": not case.tied,
        "add_bias_linear": case.biases == "all",
        "add_qkv_bias": case.biases == "qkv",
    }
    if case.family != "gpt2":
        values |= {
            "ffn_hidden_size": 96,
            "num_query_groups": case.groups,
            "position_embedding_type": "yarn" if case.scaling == "yarn" else "rope",
            "rotary_base": case.base,
            "normalization": "RMSNorm",
            "norm_epsilon": 1e-6,
            "swiglu": True,
            "qk_layernorm": case.family == "qwen3",
            "window_size": None if case.window is None else (case.window - 1, 0),
        }
    values |= {
        "none": {},
        "linear": {"rotary_seq_len_interpolation_factor": 3.0},
        "llama3": {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "rope_original_max_position": 32},
        "yarn": {"yarn_factor": 4.0, "yarn_original_max_position_embeddings": 16, "yarn_beta_fast": 8.0},
    }[case.scaling]
    return ModelConfig(**values | dict(case.options))


def their_config(case: Case) -> Any:
    common = {"vocab_size": VOCAB, "tie_word_embeddings": case.tied, "attn_implementation": "sdpa"}
    options = dict(case.options)
    if case.family == "gpt2":
        gelu = "gelu_new" if options.get("bias_gelu_fusion", True) else "gelu"
        return transformers.GPT2Config(
            n_embd=HIDDEN, n_head=HEADS, n_layer=LAYERS, n_positions=128, activation_function=gelu,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common,
        )  # fmt: skip
    scaling: dict[str, dict[str, Any]] = {
        "none": {"rope_type": "default"},
        "linear": {"rope_type": "linear", "factor": 3.0},
        "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
    }  # fmt: skip
    common |= {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS, "intermediate_size": 96,
        "num_key_value_heads": case.groups, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
        "head_dim": options.get("kv_channels", HIDDEN // HEADS),
    }  # fmt: skip
    if hasattr(transformers.LlamaConfig(), "rope_parameters"):
        common["rope_parameters"] = {"rope_theta": case.base, **scaling[case.scaling]}
    else:  # transformers 4
        common |= {"rope_theta": case.base, "rope_scaling": scaling[case.scaling]}
    if case.family == "llama":
        return transformers.LlamaConfig(attention_bias=case.biases == "all", mlp_bias=case.biases == "all", **common)
    if case.family == "mistral":
        return transformers.MistralConfig(sliding_window=case.window, **common)
    return (transformers.Qwen2Config if case.family == "qwen2" else transformers.Qwen3Config)(**common)


def their_model(case: Case, dtype: torch.dtype) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_config(their_config(case)).to(dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(drawn + 1.0 if gain else drawn)
    return model.eval()


def gpt2_to_ours(theirs: Weights, config: ModelConfig) -> Weights:
    ours = {
        "embedding.word_embeddings.weight": theirs["transformer.wte.weight"],
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
        "final_layernorm.weight": theirs["transformer.ln_f.weight"],
        "final_layernorm.bias": theirs["transformer.ln_f.bias"],
    }
    if not config.tied:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for n in range(LAYERS):
        block = {key.removeprefix(f"transformer.h.{n}."): value for key, value in theirs.items()}
        qkv = block["attn.c_attn.weight"].t().reshape(3, HEADS, -1, HIDDEN)
        bias = block["attn.c_attn.bias"].reshape(3, HEADS, -1)
        layer = {
            "input_layernorm.weight": block["ln_1.weight"],
            "input_layernorm.bias": block["ln_1.bias"],
            "self_attention.query_key_value.weight": qkv.transpose(0, 1).reshape(3 * HIDDEN, HIDDEN),
            "self_attention.query_key_value.bias": bias.transpose(0, 1).reshape(-1),
            "self_attention.dense.weight": block["attn.c_proj.weight"].t(),
            "self_attention.dense.bias": block["attn.c_proj.bias"],
            "post_attention_layernorm.weight": block["ln_2.weight"],
            "post_attention_layernorm.bias": block["ln_2.bias"],
            "mlp.dense_h_to_4h.weight": block["mlp.c_fc.weight"].t(),
            "mlp.dense_h_to_4h.bias": block["mlp.c_fc.bias"],
            "mlp.dense_4h_to_h.weight": block["mlp.c_proj.weight"].t(),
            "mlp.dense_4h_to_h.bias": block["mlp.c_proj.bias"],
        }
        ours |= {f"layers.{n}.{key}": value for key, value in layer.items()}
    return ours


def llama_to_ours(theirs: Weights, config: ModelConfig) -> Weights:
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not config.tied:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for n in range(LAYERS):
        block = {key.removeprefix(f"model.layers.{n}."): value for key, value in theirs.items()}
        layer = {
            "input_layernorm.weight": block["input_layernorm.weight"],
            "post_attention_layernorm.weight": block["post_attention_layernorm.weight"],
            "self_attention.dense.weight": block["self_attn.o_proj.weight"],
            "mlp.dense_4h_to_h.weight": block["mlp.down_proj.weight"],
        }
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in block:
                parts = [
                    block[f"self_attn.{p}_proj.{kind}"].unflatten(0, (config.query_groups, -1, config.head_dim))
                    for p in "qkv"
                ]
                layer[f"self_attention.query_key_value.{kind}"] = torch.cat(parts, dim=1).flatten(0, 2)
            if f"mlp.gate_proj.{kind}" in block:
                halves = [block[f"mlp.{half}_proj.{kind}"] for half in ("gate", "up")]
                layer[f"mlp.dense_h_to_4h.{kind}"] = torch.cat(halves)
        for ours_name, their_name in (
            ("self_attention.dense", "self_attn.o_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
        ):
            if f"{their_name}.bias" in block:
                layer[f"{ours_name}.bias"] = block[f"{their_name}.bias"]
        if config.qk_layernorm:
            for part in "qk":
                layer[f"self_attention.{part}_layernorm.weight"] = block[f"self_attn.{part}_norm.weight"]
        ours |= {f"layers.{n}.{key}": value for key, value in layer.items()}
    return ours


def to_ours(case: Case, theirs: Weights, config: ModelConfig) -> Weights:
    return (gpt2_to_ours if case.family == "gpt2" else llama_to_ours)(theirs, config)


@contextmanager
def norms_in_fp64() -> Iterator[None]:
    """transformers rounds to fp32 inside RMSNorm; keep the input's precision instead."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("mistral", "Mistral")):
            classes = getattr(getattr(transformers.models, module), f"modeling_{module}")
            patch.setattr(getattr(classes, f"{name}RMSNorm"), "forward", forward)
        yield


def compare(
    case: Case,
    dtype: torch.dtype,
    tolerance: float,
    *,
    config: ModelConfig | None = None,
    kernels: Kernels | None = None,
    mapping: Callable[[Weights], Weights] = lambda weights: weights,
) -> None:
    """Raise AssertionError unless logits and every gradient agree."""
    config = config or our_config(case)
    theirs = their_model(case, dtype)
    ours = GPT(config, vocab_size=VOCAB, padded_vocab_size=256, kernels=kernels or resolve("auto", "cpu")).to(dtype)
    load(ours, mapping(to_ours(case, dict(theirs.named_parameters()), config)))
    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(5))
    labels = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(6))

    their_logits = theirs(tokens, use_cache=False).logits
    our_logits = ours(tokens)
    difference = (our_logits - their_logits).abs().max().item()
    assert difference <= tolerance * max(1.0, their_logits.abs().max().item()), f"logits differ by {difference}"

    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
    ours(tokens, labels=labels).mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    expected = mapping(to_ours(case, gradients, config))
    scale = max(gradient.norm().item() for gradient in expected.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, f"no gradient for {name}"
        rows = expected[name].shape[0]
        error = (parameter.grad[:rows] - expected[name]).norm().item()
        # A key bias has no gradient but rounding noise, so errors count against the largest gradient as well.
        assert error <= tolerance * (expected[name].norm().item() + 1e-3 * scale), f"{name}: {error}"
        assert not parameter.grad[rows:].any(), f"{name}: padded rows have a gradient"


@torch.no_grad()
def load(model: nn.Module, weights: Weights) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    for name, parameter in parameters.items():
        parameter.zero_()
        parameter[: weights[name].shape[0]].copy_(weights[name])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fp64(case: Case) -> None:
    with norms_in_fp64():
        compare(case, torch.float64, 1e-10)


@pytest.mark.parametrize("case", [c for c in CASES if c.groups != 1 and not c.tied], ids=lambda case: case.name)
def test_fp32_with_their_classes_untouched(case: Case) -> None:
    compare(case, torch.float32, 1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama-g2-untied-500000-llama3-all", "qwen3-gqa-tied", "mistral-window"])
@pytest.mark.parametrize("spec", ["ref", "auto,-attention,-linear_cross_entropy"])
def test_reference_kernels(name: str, spec: str) -> None:
    with norms_in_fp64():
        compare(case_named(name), torch.float64, 1e-10, kernels=resolve(spec, "cpu"))


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# ---- Planted bugs: the comparison must see each of them ------------------------------------------------------------


def swap_query_and_key(weights: Weights) -> Weights:
    changed = dict(weights)
    for name, value in weights.items():
        if "query_key_value.weight" in name:
            query, key, rest = value.unflatten(0, (HEADS, 3, -1)).unbind(1)
            changed[name] = torch.stack((key, query, rest), dim=1).flatten(0, 2)
    return changed


def whole_qkv_blocks(weights: Weights) -> Weights:
    """[3, heads] where [heads, 3] is meant."""
    changed = dict(weights)
    for name, value in weights.items():
        if "query_key_value.weight" in name:
            changed[name] = value.unflatten(0, (HEADS, 3, -1)).transpose(0, 1).flatten(0, 2)
    return changed


def swap_gate_and_up(weights: Weights) -> Weights:
    return {
        name: torch.cat(value.chunk(2)[::-1]) if "dense_h_to_4h.weight" in name else value
        for name, value in weights.items()
    }


def swap_norms(weights: Weights) -> Weights:
    return weights | {
        f"layers.{n}.{one}_layernorm.weight": weights[f"layers.{n}.{other}_layernorm.weight"]
        for n in range(LAYERS)
        for one, other in (("input", "post_attention"), ("post_attention", "input"))
    }


@pytest.mark.parametrize("bug", [swap_query_and_key, whole_qkv_blocks, swap_gate_and_up, swap_norms])
def test_wrong_mapping_is_seen(bug: Callable[[Weights], Weights]) -> None:
    with pytest.raises(AssertionError, match="logits differ"):
        compare(case_named("llama-g4-untied-10000-none-none"), torch.float32, 1e-4, mapping=bug)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gpt2", {"bias_gelu_fusion": False}),
        ("gpt2", {"norm_epsilon": 1e-6}),
        ("llama-g2-untied-10000-none-none", {"rotary_base": 5e5}),
        ("llama-g2-untied-500000-llama3-none", {"use_rope_scaling": False}),
        ("llama-g2-untied-10000-yarn-none", {"yarn_attention_factor": 1.0}),
        ("llama-g2-untied-10000-linear-none", {"rotary_seq_len_interpolation_factor": None}),
        ("llama-g2-untied-10000-none-none", {"norm_epsilon": 1e-5}),
        ("mistral-window", {"window_size": (7, 0)}),
    ],
)
def test_wrong_setting_is_seen(name: str, wrong: dict[str, Any]) -> None:
    case = case_named(name)
    with norms_in_fp64(), pytest.raises(AssertionError, match="logits differ"):
        compare(case, torch.float64, 1e-10, config=dataclasses.replace(our_config(case), **wrong))


def interleaved_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def sees_one_ahead(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(1)
    options |= {"mask": mask, "causal": False}
    return resolve("ref", "cpu").attention(query, key, value, **options)


@pytest.mark.parametrize("wrong", [{"rope": interleaved_rope}, {"attention": sees_one_ahead}])
def test_wrong_operation_is_seen(wrong: dict[str, Any]) -> None:
    kernels = dataclasses.replace(resolve("auto", "cpu"), **wrong)
    with pytest.raises(AssertionError, match="logits differ"):
        compare(case_named("llama-g4-untied-10000-none-none"), torch.float32, 1e-4, kernels=kernels)


def test_weights_of_a_fresh_model_would_hide_a_swap() -> None:
    """Why std 0.2: the same comparison on std 0.02 weights, at a tolerance that looks strict, sees nothing."""
    case = case_named("llama-g4-untied-10000-none-none")
    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(5))
    losses = []
    for mapping in (lambda weights: weights, swap_query_and_key):
        theirs = dict(their_model(case, torch.float32).named_parameters())
        small = {name: value * 0.1 if value.ndim == 2 else torch.ones_like(value) for name, value in theirs.items()}
        ours = GPT(our_config(case), vocab_size=VOCAB, kernels=resolve("auto", "cpu"))
        load(ours, mapping(to_ours(case, small, our_config(case))))
        losses.append(ours(tokens, labels=tokens).mean().item())
    assert abs(losses[0] - losses[1]) < 1e-3
