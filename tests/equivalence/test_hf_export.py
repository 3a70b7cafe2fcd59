"""An exported model is the same model: logits of transformers' classes against ours.

Weights have a standard deviation of 0.2. On freshly initialised weights a swapped Q and K moves the loss by only
0.0003, so a broken exporter would pass. Every known exporter mistake is planted here and must be found.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint.reader import StepReader
from megatron.checkpoint.run_state import RunHistory, TrainState
from megatron.checkpoint.save import save_checkpoint
from megatron.cli.convert_checkpoint import main as convert_main
from megatron.config import ModelConfig
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.hf.check import check_export, compare_logits, compare_weights, our_logits
from megatron.interop.hf.exchange import Exchange
from megatron.interop.hf.export import Export, plan_export, write_export
from megatron.interop.hf.importer import open_folder, read_tensors
from megatron.layout import Layout
from megatron.model.parameters import parameters
from megatron.state.shard import Shard
from tests.helpers.other_programs import find_checkpoint

transformers = pytest.importorskip("transformers")

GPT2: dict[str, Any] = {"max_position_embeddings": 96, "attention_dropout": 0.0, "hidden_dropout": 0.0}
LLAMA: dict[str, Any] = {
    **GPT2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "norm_epsilon": 1e-6,
}
NEOX = GPT2 | {
    "position_embedding_type": "rope",
    "rotary_percent": 0.25,
    "use_parallel_residual": True,
    "bias_gelu_fusion": False,
    "untie_embeddings_and_output_weights": True,
}
OLMO = LLAMA | {"qk_layernorm": True, "qk_layernorm_scope": "all", "norm_placement": "after"}
TIED = {"untie_embeddings_and_output_weights": False}
LLAMA3 = {
    "use_rope_scaling": True,
    "rope_scaling_factor": 8.0,
    "rope_original_max_position": 32,
    "rotary_base": 500000.0,
}
YARN = {"position_embedding_type": "yarn", "yarn_factor": 4.0, "yarn_original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2 erf": ("GPT2LMHeadModel", GPT2 | {"bias_gelu_fusion": False}),
    "gpt2 untied": ("GPT2LMHeadModel", GPT2 | {"untie_embeddings_and_output_weights": True}),
    "gpt2 without biases": ("GPT2LMHeadModel", GPT2 | {"add_bias_linear": False}),
    "gpt2 with QKV bias alone": ("GPT2LMHeadModel", GPT2 | {"add_bias_linear": False, "add_qkv_bias": True}),
    "gpt2 squared relu": ("GPT2LMHeadModel", GPT2 | {"squared_relu": True}),
    "gpt2 wide mlp": ("GPT2LMHeadModel", GPT2 | {"ffn_hidden_size": 40}),
    "gpt2 layernorm 1p": ("GPT2LMHeadModel", GPT2 | {"apply_layernorm_1p": True}),
    "gpt2 qk layer scaling": ("GPT2LMHeadModel", GPT2 | {"apply_query_key_layer_scaling": True}),
    "neox": ("GPTNeoXForCausalLM", NEOX),
    "neox one after the other": ("GPTNeoXForCausalLM", NEOX | TIED | {"use_parallel_residual": False}),
    "neox without biases": ("GPTNeoXForCausalLM", NEOX | {"add_bias_linear": False, "rotary_percent": 1.0}),
    "neox base, tanh": (
        "GPTNeoXForCausalLM",
        NEOX | {"rotary_base": 5e5, "rotary_percent": 0.5, "bias_gelu_fusion": True},
    ),
    "neox linear scaling": ("GPTNeoXForCausalLM", NEOX | {"rotary_seq_len_interpolation_factor": 4.0}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama gqa": ("LlamaForCausalLM", LLAMA | {"num_query_groups": 2}),
    "llama mqa tied": ("LlamaForCausalLM", LLAMA | TIED | {"num_query_groups": 1}),
    "as mistral: heads that do not divide the hidden size": (
        "MistralForCausalLM",
        LLAMA | {"num_attention_heads": 3, "kv_channels": 8},
    ),
    "llama biases": ("LlamaForCausalLM", LLAMA | {"add_bias_linear": True, "num_query_groups": 2}),
    "llama base 5e5": ("LlamaForCausalLM", LLAMA | {"rotary_base": 500000.0}),
    "llama llama3 scaling": ("LlamaForCausalLM", LLAMA | LLAMA3 | {"num_query_groups": 2}),
    "llama linear scaling": ("LlamaForCausalLM", LLAMA | {"rotary_seq_len_interpolation_factor": 4.0}),
    "llama yarn": ("LlamaForCausalLM", LLAMA | YARN),
    "llama yarn factor": ("LlamaForCausalLM", LLAMA | YARN | {"yarn_attention_factor": 1.3}),
    "llama wide heads": ("LlamaForCausalLM", LLAMA | {"kv_channels": 16}),
    "mistral": ("MistralForCausalLM", LLAMA | {"num_query_groups": 2, "window_size": (19, 0)}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA | TIED | {"add_qkv_bias": True, "num_query_groups": 2}),
    "qwen2 wide heads": ("Qwen2ForCausalLM", LLAMA | {"add_qkv_bias": True, "kv_channels": 16}),
    "qwen2 window": ("Qwen2ForCausalLM", LLAMA | {"add_qkv_bias": True, "window_size": (19, 0)}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | TIED | {"qk_layernorm": True, "num_query_groups": 2, "kv_channels": 16}),
    "olmo2": ("Olmo2ForCausalLM", OLMO),
    "olmo2 gqa": ("Olmo2ForCausalLM", OLMO | TIED | {"num_query_groups": 2, "kv_channels": 16, "rotary_base": 5e5}),
    "olmo2 linear scaling": ("Olmo2ForCausalLM", OLMO | {"rotary_seq_len_interpolation_factor": 4.0}),
    "qwen3 window": ("Qwen3ForCausalLM", LLAMA | {"qk_layernorm": True, "window_size": (19, 0)}),
}


def model(**settings: Any) -> ModelConfig:
    return ModelConfig(**{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4} | settings)


def save_random(
    directory: Path, config: ModelConfig, *, vocab_size: int = 61, dtype: torch.dtype = torch.float32, **state: Any
) -> dict[str, torch.Tensor]:
    """A native checkpoint with weights of std 0.2 (norm gains around 1) and a vocabulary padded to 64 in the file."""
    generator = torch.Generator().manual_seed(7)
    tensors, params = {}, {}
    for parameter in parameters(config, vocab_size).values():
        weight = torch.randn(parameter.stored_shape, generator=generator) * 0.2
        if parameter.name.endswith("layernorm.weight") and not config.apply_layernorm_1p:
            weight += 1
        tensors[parameter.name] = weight.to(dtype)
        spec = Shard(name=parameter.name, logical_shape=parameter.shape)
        params[parameter.name] = (spec, tensors[parameter.name])
    values: dict[str, Any] = {
        "iteration": 1,
        "consumed_train_samples": 4,
        "consumed_valid_samples": 0,
        "params": params,
        "optimizer": None,
        "optimizer_extra": {},
        "scheduler": {},
        "rng": None,
        "config": {"model": {f: getattr(config, f) for f in config.__dataclass_fields__}},
        "args": {"padded_vocab_size": 64},
        "data": {},
    }
    parallel = ParallelState.build(Layout(1), 0)
    with closing(RunHistory("t")) as history:
        save_checkpoint(
            directory, TrainState(**(values | state)), parallel=parallel, save_tokenizer=None, history=history
        )
    return tensors


def plan(directory: Path, **options: Any) -> Export:
    found = find_checkpoint(directory, parallel=ParallelState.build(Layout(1), 0))
    assert found is not None
    return plan_export(found, **options)


def export_to(out: Path, export: Export) -> list[str]:
    messages: list[str] = []
    write_export(export, out, check=lambda d: check_export(export, d, messages.append), log=messages.append)
    return messages


@pytest.mark.parametrize(("trained", "asked"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_gain_stored_less_one_is_exported_in_half_precision(tmp_path: Path, trained: str, asked: str | None) -> None:
    """1 + weight is rounded once, to the export's precision; a message gives the largest error."""
    tensors = save_random(tmp_path / "ckpt", model(**GPT2, apply_layernorm_1p=True), dtype=getattr(torch, trained))
    messages = export_to(tmp_path / "hf", plan(tmp_path / "ckpt", dtype=asked))
    gains = load_file(tmp_path / "hf/model.safetensors")["transformer.ln_f.weight"]
    exact = tensors["final_layernorm.weight"].float() + 1
    assert torch.equal(gains, exact.to(gains.dtype))
    assert any("the largest rounding error of a weight" in line for line in messages) == (gains.dtype == torch.bfloat16)


@pytest.mark.parametrize("damaged", ["ln_f.weight", "ln_f.bias", "wte.weight"])
@pytest.mark.parametrize("less_one", [False, True])
def test_an_export_that_reads_back_different_is_refused(tmp_path: Path, less_one: bool, damaged: str) -> None:
    save_random(tmp_path / "ckpt", model(**GPT2, apply_layernorm_1p=less_one))
    export = plan(tmp_path / "ckpt")
    export_to(tmp_path / "hf", export)
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    tensors[f"transformer.{damaged}"].view(-1)[3] += 1e-6
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="has other values than those that were written"):
        compare_weights(export, tmp_path / "hf")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_and_import_gives_the_same_bits_back(tmp_path: Path, case: str) -> None:
    architecture, settings = CASES[case]
    config = model(**settings)
    tensors = save_random(tmp_path / "native", config)
    export = plan(tmp_path / "native", token_ids={"bos_token_id": 3, "eos_token_id": 3})
    assert export.family.architecture == architecture
    messages = export_to(tmp_path / "hf", export)
    assert any("logits equal" in message for message in messages)
    values = json.loads((tmp_path / "hf/config.json").read_text())
    assert values["vocab_size"] == 61 and values["eos_token_id"] == 3 and values["torch_dtype"] == "float32"

    source = open_folder(tmp_path / "hf")
    back = {name: tensor for name, _, tensor in read_tensors(source)}
    assert back.keys() == tensors.keys()
    if not config.apply_layernorm_1p:  # comes back as an ordinary gain
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    for derived in ("head_dim", "query_groups", "ffn_size", "activation", "rope_scaling", "tied", "window", "qkv_bias"):
        assert getattr(source.config, derived) == getattr(config, derived), derived


def test_logits_are_close_by_a_wide_margin(tmp_path: Path) -> None:
    """Rounding errors are far below the tolerance, so the tolerance hides no mistake."""
    save_random(tmp_path / "native", model(**CASES["llama llama3 scaling"][1]))
    export = plan(tmp_path / "native")
    export_to(tmp_path / "hf", export)
    assert compare_logits(export, tmp_path / "hf").relative < 1e-5


def test_olmo2_is_scaled_in_the_names_that_version_4_insists_on(tmp_path: Path) -> None:
    """Version 4's check for OLMo-2 requires two entries, one named `type`. Version 5 reads `type` as `rope_type`."""
    save_random(tmp_path / "native", model(**CASES["olmo2 linear scaling"][1]))
    export_to(tmp_path / "hf", plan(tmp_path / "native"))
    written = json.loads((tmp_path / "hf/config.json").read_text())["rope_scaling"]
    assert written == {"type": "linear", "factor": 4.0}


def test_an_export_that_transformers_does_not_open_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version 4 fails like this on OLMo-2 with YaRN."""

    def refuse(*given: Any, **options: Any) -> None:
        raise ValueError("`rope_scaling` must be a dictionary with two fields")

    save_random(tmp_path / "native", model(**OLMO | YARN))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    flags = ["--load", str(tmp_path / "native"), "--to", "hf", "--save", str(tmp_path / "hf")]
    assert convert_main(flags) == CheckpointError.exit_code and not (tmp_path / "hf").exists()
    told = capsys.readouterr().err
    assert "cannot open it (`rope_scaling` must be a dictionary with two fields); nothing was exported" in told


@pytest.mark.parametrize("case", ["gpt2", "llama mqa tied", "qwen3"])
def test_a_model_in_parts_on_several_devices_is_the_model(tmp_path: Path, case: str) -> None:
    """`device_map="auto"`: the first layer fits the device; the second is fetched when needed."""
    save_random(tmp_path / "native", model(**CASES[case][1]))
    export_to(tmp_path / "hf", plan(tmp_path / "native"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    whole = load(tmp_path / "hf")
    table = whole.get_input_embeddings().weight
    room = sum(p.nbytes for name, p in whole.named_parameters() if ".1." not in name and p is not table) + table.nbytes
    parts = load(tmp_path / "hf", device_map="auto", max_memory={"cpu": room}, offload_folder=tmp_path / "disk")
    assert set(parts.hf_device_map.values()) == {"cpu", "disk"}, parts.hf_device_map
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(parts(tokens).logits, whole(tokens).logits)


# ---------------------------------------------------------------- planted mistakes

Tensors = dict[str, torch.Tensor]


def swap(tensors: Tensors, one: str, other: str) -> None:
    for name in [name for name in tensors if one in name]:
        partner = name.replace(one, other)
        tensors[name], tensors[partner] = tensors[partner], tensors[name]


def conv_qkv_order(tensors: Tensors) -> None:
    """Planted bug: keeps Megatron's order of heads, [heads, 3, width] instead of [3, heads, width]."""
    for name in [name for name in tensors if "c_attn" in name]:
        rows = tensors[name].T if tensors[name].dim() == 2 else tensors[name]
        mixed = rows.reshape(3, 4, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
        tensors[name] = (mixed.T if mixed.dim() == 2 else mixed).contiguous()


def neox_qkv_order(tensors: Tensors) -> None:
    for name in [name for name in tensors if "query_key_value" in name]:
        rows = tensors[name]
        tensors[name] = rows.reshape(4, 3, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape).contiguous()


def interleaved_rope(tensors: Tensors) -> None:
    """Planted bug: applies the permutation that only Meta's own layout needs."""
    for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
        weight = tensors[name]
        tensors[name] = weight.view(-1, 2, 4, 32).transpose(1, 2).reshape(weight.shape).contiguous()


def keep_padding(tensors: Tensors) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, 3))


MUTANTS: dict[str, tuple[str, Callable[[Tensors], object], dict[str, Any]]] = {
    "gpt2 heads in Megatron's order": ("gpt2", conv_qkv_order, {}),
    "gpt2 not transposed": (
        "gpt2",
        lambda t: t.update({n: x.T.contiguous() for n, x in t.items() if n.endswith("attn.c_proj.weight")}),
        {},
    ),
    "gpt2 erf said to be tanh": ("gpt2 erf", lambda t: None, {"activation_function": "gelu_new"}),
    "gpt2 tanh said to be erf": ("gpt2", lambda t: None, {"activation_function": "gelu"}),
    "gpt2 norms swapped": ("gpt2", lambda t: swap(t, "ln_1", "ln_2"), {}),
    "neox heads as [3, heads, width]": ("neox", lambda t: neox_qkv_order(t), {}),
    "neox norms swapped": ("neox", lambda t: swap(t, ".input_layernorm", ".post_attention_layernorm"), {}),
    "neox biases swapped": (
        "neox one after the other",
        lambda t: swap(t, "mlp.dense_4h_to_h.bias", "attention.dense.bias"),
        {},
    ),
    "neox head tied": ("neox", lambda t: t.pop("embed_out.weight"), {"tie_word_embeddings": True}),
    "neox residuals in turn": ("neox", lambda t: None, {"use_parallel_residual": False}),
    "neox share of rotation": ("neox", lambda t: None, {"rotary_pct": 0.5}),
    "neox base dropped": ("neox base, tanh", lambda t: None, {"rotary_emb_base": 10000}),
    "neox gelu": ("neox", lambda t: None, {"hidden_act": "gelu_new"}),
    "untied head lost": ("gpt2 untied", lambda t: t.pop("lm_head.weight"), {"tie_word_embeddings": True}),
    "tied head made of its own": (
        "llama mqa tied",
        lambda t: t.update({"lm_head.weight": torch.randn(61, 32)}),
        {"tie_word_embeddings": False},
    ),
    "q and k swapped": ("llama", lambda t: swap(t, "q_proj", "k_proj"), {}),
    "gate and up swapped": ("llama", lambda t: swap(t, "gate_proj", "up_proj"), {}),
    "norms swapped": ("llama", lambda t: swap(t, ".input_layernorm", ".post_attention_layernorm"), {}),
    "q and k norms swapped": ("qwen3", lambda t: swap(t, "q_norm", "k_norm"), {}),
    "olmo2 norms swapped": ("olmo2", lambda t: swap(t, ".post_attention_layernorm", ".post_feedforward_layernorm"), {}),
    "olmo2 q and k norms swapped": ("olmo2", lambda t: swap(t, "q_norm", "k_norm"), {}),
    "olmo2 q and k swapped": ("olmo2", lambda t: swap(t, "q_proj", "k_proj"), {}),
    "olmo2 gate and up swapped": ("olmo2", lambda t: swap(t, "gate_proj", "up_proj"), {}),
    "olmo2 base dropped": ("olmo2 gqa", lambda t: None, {"rope_theta": 10000.0}),
    "interleaved rope": ("llama", interleaved_rope, {}),
    "padded vocabulary kept": ("llama", keep_padding, {"vocab_size": 64}),
    "rope base dropped": ("llama base 5e5", lambda t: None, {"rope_theta": 10000.0}),
    "rope scaling dropped": ("llama llama3 scaling", lambda t: None, {"rope_scaling": None}),
    "window dropped": ("mistral", lambda t: None, {"sliding_window": None}),
    "window one too long": ("mistral", lambda t: None, {"sliding_window": 21}),
    "epsilon": ("llama", lambda t: None, {"rms_norm_eps": 1e-3}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_planted_mistake_is_seen(tmp_path: Path, mutant: str) -> None:
    case, change, settings = MUTANTS[mutant]
    save_random(tmp_path / "native", model(**CASES[case][1]))
    export = plan(tmp_path / "native")
    out = tmp_path / "hf"
    write_export(export, out, log=lambda text: None)
    compare_logits(export, out)  # right before the mistake
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(CheckpointError, match="logits"):
        compare_logits(export, out)


def test_a_failed_check_leaves_no_folder(tmp_path: Path) -> None:
    save_random(tmp_path / "native", model(**LLAMA))
    export = plan(tmp_path / "native")

    def check(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
        check_export(export, folder, lambda text: None)

    with pytest.raises(CheckpointError, match="logits of transformers differ"):
        write_export(export, tmp_path / "hf", check=check, log=lambda text: None)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_half_precision_is_exported_as_trained_and_narrowing_is_measured(tmp_path: Path) -> None:
    save_random(tmp_path / "bf16", model(**LLAMA), dtype=torch.bfloat16)
    export_to(tmp_path / "a", plan(tmp_path / "bf16"))
    assert json.loads((tmp_path / "a/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_file(tmp_path / "a/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    save_random(tmp_path / "fp32", model(**LLAMA))
    messages = export_to(tmp_path / "b", plan(tmp_path / "fp32", dtype="bfloat16"))
    assert any("largest rounding error of a weight" in message for message in messages)


def test_large_exports_are_sharded(tmp_path: Path) -> None:
    tensors = save_random(tmp_path / "native", model(**LLAMA))
    export_to(tmp_path / "hf", plan(tmp_path / "native", shard_bytes=20_000))
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    back = {name: tensor for name, _, tensor in read_tensors(open_folder(tmp_path / "hf"))}
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def most_bytes_at_once(export: Export, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Largest number of bytes of weights that the export holds at once."""
    alive: dict[int, int] = {}
    most, logical = 0, StepReader.logical

    def counted(reader: StepReader, name: str, record: Any) -> torch.Tensor:
        nonlocal most
        tensor = logical(reader, name, record)
        storage = tensor.untyped_storage()
        alive[id(storage)] = storage.nbytes()
        weakref.finalize(storage, alive.pop, id(storage))
        most = max(most, sum(alive.values()))
        return tensor

    monkeypatch.setattr(StepReader, "logical", counted)
    write_export(export, folder, log=lambda text: None)
    monkeypatch.undo()
    return most


def test_memory_is_that_of_the_largest_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path / "native", model(**LLAMA))
    export = plan(tmp_path / "native")
    sizes = [4 * prod(record.logical_shape) for record in export.reader.manifest.model.values()]
    alone = most_bytes_at_once(export, tmp_path / "hf", monkeypatch)
    assert max(sizes) <= alone <= 2 * max(sizes) < sum(sizes) / 2


def test_an_export_that_keeps_its_tensors_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path / "native", model(**LLAMA))
    export, kept, shown = plan(tmp_path / "native"), [], Exchange.to_hf

    def keeping(exchange: Exchange, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        kept.append(stored)
        return shown(exchange, stored)

    monkeypatch.setattr(Exchange, "to_hf", keeping)
    sizes = [4 * prod(record.logical_shape) for record in export.reader.manifest.model.values()]
    assert most_bytes_at_once(export, tmp_path / "hf", monkeypatch) == sum(sizes)


def test_logits_are_compared_or_nothing_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path / "native", model(**LLAMA))
    monkeypatch.setattr("megatron.interop.hf.check.available_memory", lambda: 1000)
    command = ["--load", str(tmp_path / "native"), "--to", "hf", "--save", str(tmp_path / "hf")]
    assert convert_main([*command, "--verify"]) == 2 and not (tmp_path / "hf").exists()
    assert convert_main(command) == 0 and (tmp_path / "hf").exists()
    monkeypatch.undo()
    assert convert_main([*command, "--verify", "--overwrite", "--max-shard-size", "20KB"]) == 0
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    assert convert_main([*command, "--max-shard-size", "many"]) == 2


def test_the_classic_file_alone_is_the_model(tmp_path: Path) -> None:
    """Old converters read one `model_optim_rng.pt`: `args` by attribute, 23.06 names, [heads, 3, width]."""
    import transformers

    save_random(tmp_path, model(**GPT2))
    saved = torch.load(tmp_path / "iter_0000001/mp_rank_00/model_optim_rng.pt", weights_only=True)
    args, parts = saved["args"], saved["model"]["language_model"]
    assert args.bias_gelu_fusion and args.openai_gelu and saved["checkpoint_version"] == 3.0
    words = parts["embedding"]["word_embeddings"]["weight"]
    theirs = {"transformer.wte.weight": words, "lm_head.weight": words}
    theirs["transformer.wpe.weight"] = parts["embedding"]["position_embeddings"]["weight"]
    names = {
        "input_layernorm": "ln_1",
        "self_attention.query_key_value": "attn.c_attn",
        "self_attention.dense": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.dense_h_to_4h": "mlp.c_fc",
        "mlp.dense_4h_to_h": "mlp.c_proj",
    }
    for name, tensor in parts["encoder"].items():
        if name.startswith("final_layernorm"):
            theirs[name.replace("final_layernorm", "transformer.ln_f")] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        module, kind = rest.rsplit(".", 1)
        if module.endswith("query_key_value"):
            heads = args.num_attention_heads
            tensor = tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
        tensor = tensor.T if tensor.dim() == 2 else tensor
        theirs[f"transformer.h.{layer}.{names[module]}.{kind}"] = tensor
    config = transformers.GPT2Config(
        vocab_size=args.padded_vocab_size,
        n_positions=args.max_position_embeddings,
        n_embd=args.hidden_size,
        n_layer=args.num_layers,
        n_head=args.num_attention_heads,
        n_inner=args.ffn_hidden_size,
        activation_function="gelu_fast",
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    reference.load_state_dict(theirs)
    tokens = torch.randint(0, 61, (2, 64))
    with torch.no_grad():
        expected = reference(tokens).logits[..., :61]
    torch.testing.assert_close(our_logits(plan(tmp_path), tokens), expected, rtol=0, atol=1e-4)


FOREIGN: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96, "activation_function": "gelu"},
    "GPTNeoX": {"rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_act": "gelu_fast"},
    "Llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "Mistral": {"sliding_window": 20},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Olmo2": {"pad_token_id": 0, "eos_token_id": 1},
}
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}


@pytest.mark.parametrize("family", FOREIGN)
def test_what_transformers_saved_is_imported_whole(tmp_path: Path, family: str) -> None:
    """Imports a folder that transformers itself wrote, with its own defaults."""
    import transformers

    from megatron.cli.convert_checkpoint import main as convert

    shape = {} if family == "GPT2" else SHAPE
    config = getattr(transformers, f"{family}Config")(vocab_size=61, **(shape | FOREIGN[family]))
    torch.manual_seed(2)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(std=0.2)
            if parameter.ndim == 1 and ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                parameter.add_(1)
    theirs.save_pretrained(tmp_path / "hf")
    source, native = str(tmp_path / "hf"), str(tmp_path / "native")
    assert convert(["--load", source, "--from", "hf", "--to", "native", "--save", native]) == 0
    tokens = torch.randint(0, 61, (2, 80))
    with torch.no_grad():
        expected = theirs(tokens).logits
        ours = our_logits(plan(tmp_path / "native"), tokens)
    assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize(
    "settings, named",
    [
        (GPT2 | {"num_query_groups": 2}, "--num-query-groups 2"),
        (GPT2 | {"qk_layernorm": True}, "--qk-layernorm"),
        (GPT2 | {"swiglu": True}, "--swiglu"),
        (GPT2 | {"window_size": (8, 0)}, "--window-size"),
        (GPT2 | {"position_embedding_type": "none"}, "--position-embedding-type none"),
        (GPT2 | {"apply_residual_connection_post_layernorm": True}, "--apply-residual-connection-post-layernorm"),
        (NEOX | {"position_embedding_type": "none"}, "--position-embedding-type none"),
        (NEOX | {"num_query_groups": 2}, "--num-query-groups 2"),
        (OLMO | {"qk_layernorm_scope": "head"}, "--qk-layernorm-scope head"),
        (OLMO | {"qk_layernorm": False}, "no --qk-layernorm"),
        (LLAMA | {"qk_layernorm": True, "qk_layernorm_scope": "all"}, "--qk-layernorm-scope all"),
        (LLAMA | {"use_parallel_residual": True}, "--normalization RMSNorm"),
        (LLAMA | {"rotary_percent": 0.5}, "--rotary-percent 0.5"),
        (LLAMA | {"normalization": "LayerNorm"}, "--normalization LayerNorm"),
        (LLAMA | {"swiglu": False}, "--swiglu"),
        (LLAMA | {"qk_layernorm": True, "add_bias_linear": True}, "--qk-layernorm with biases"),
        (LLAMA | {"window_size": (8, 4)}, "--window-size"),
    ],
)
def test_what_no_family_computes_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    save_random(tmp_path, model(**settings))
    with pytest.raises(ConfigError, match=named):
        plan(tmp_path)


def test_an_existing_folder_is_refused_without_overwrite(tmp_path: Path) -> None:
    save_random(tmp_path / "native", model(**LLAMA))
    export = plan(tmp_path / "native")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--overwrite"):
        write_export(export, tmp_path / "hf")
    assert (tmp_path / "hf/notes.txt").exists()
    write_export(export, tmp_path / "hf", overwrite=True, log=lambda text: None)
    assert (tmp_path / "hf/config.json").exists() and not (tmp_path / "hf/notes.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "native"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "auto_map"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"hidden_size": 16}, "config.json describes"),
    ],
)
def test_foreign_folders_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_random(tmp_path / "native", model(**LLAMA))
    write_export(plan(tmp_path / "native"), tmp_path / "hf", log=lambda text: None)
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((ConfigError, CheckpointError), match=message):
        list(read_tensors(open_folder(tmp_path / "hf")))
