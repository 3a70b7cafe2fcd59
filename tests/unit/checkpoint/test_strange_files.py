"""Untrusted files with wrong types anywhere: every reader accepts them or rejects them in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron.checkpoint import manifest, storage
from megatron.checkpoint.architecture import model_config, moe_config
from megatron.checkpoint.besides_tensors import encode_values, read_values, saved_values
from megatron.checkpoint.verify import inspect_step
from megatron.config import ModelConfig, MoEConfig, adopt_checkpoint_args, parse_args, to_dict
from megatron.data.indexed.record import read_record
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.hf.families import FAMILIES
from megatron.interop.hf.family import Facts, Family
from megatron.interop.hf.importer import open_folder, read_tensors
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.huggingface import HuggingFaceTokenizer
from tests.helpers.mutations import mutated, only_our_errors, texts
from tests.helpers.runs import flags, make_parts
from tests.unit.checkpoint.support import load, make_state, save
from tests.unit.checkpoint.test_safety import STEP, rewrite_manifest
from tests.unit.config.commands import SMALL, argv
from tests.unit.tokenizer.support import write_small_bpe

COUNT = 300
LLAMA = {
    **{"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8, "rms_norm_eps": 1e-5},
    **{"tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "head_dim": 4},
}


def test_manifests(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    body = json.loads((tmp_path / STEP / "manifest.json").read_text())["manifest"]

    def read(changed: Any) -> None:
        try:
            rewrite_manifest(tmp_path, lambda whole: (whole.clear(), whole.update(changed)))
        except (ValueError, TypeError):
            return  # NaN, which canonical JSON cannot hold
        inspect_step(tmp_path / STEP, deep=True)
        load(tmp_path, make_state(1).params)

    taken, refused = only_our_errors(
        read, (changed for changed in mutated(body, COUNT, 5) if isinstance(changed, dict))
    )
    assert refused > taken


def test_settings_in_manifests() -> None:
    ours = parse_args(argv(SMALL, "--seq-length 32 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data"))
    saved = to_dict(ours)
    assert model_config(saved["model"]) == replace(ours.model, model=None)
    only_our_errors(
        lambda config: model_config(config["model"]) if "model" in config else None, mutated(saved, COUNT, 8)
    )
    only_our_errors(lambda config: moe_config({"moe": config}), mutated({**saved["moe"], "num_experts": 4}, COUNT, 9))
    # A manifest with half of a surrogate pair is refused before.
    as_read = (changed for changed in mutated(saved, COUNT, 10) if "\\ud8" not in json.dumps(changed))
    taken, refused = only_our_errors(lambda config: adopt_checkpoint_args(ours, config), as_read)
    assert taken and refused


def test_texts_that_are_no_manifest(tmp_path: Path) -> None:
    only_our_errors(lambda text: manifest.decode(text.encode(), tmp_path), texts({"manifest": {}, "sha256": ""}, 50, 1))


def test_a_large_manifest_of_little_data_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, make_state())
    with open(tmp_path / STEP / "manifest.json", "r+b") as file:
        file.truncate(90_000_000)
    with pytest.raises(CheckpointError, match="has 90000000 bytes, more than the files that it describes"):
        manifest.read(tmp_path / STEP)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_config_json_of_each_family(family: Family) -> None:
    experts = family.model_type in ("mixtral", "qwen3_moe")
    moe = MoEConfig(num_experts=4, moe_ffn_hidden_size=12) if experts else MoEConfig()
    config = ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, max_position_embeddings=32, add_bias_linear=False
    )
    written = family.config_json(config, moe, Facts(64, "float32", 32, {"eos_token_id": 0}))
    family.read_config(written)
    taken, refused = only_our_errors(family.read_config, mutated(written, COUNT, 3))
    assert taken and refused


def hugging_face_folder(folder: Path) -> Path:
    shapes = {
        **{"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,)},
        **{
            f"model.layers.0.self_attn.{name}.weight": shape
            for name, shape in {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}.items()
        },
        **{
            f"model.layers.0.mlp.{name}.weight": shape
            for name, shape in {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}.items()
        },
        **{f"model.layers.0.{name}.weight": (8,) for name in ("input_layernorm", "post_attention_layernorm")},
    }
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_whole_hugging_face_folders(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path)
    assert len(list(read_tensors(open_folder(folder)))) == 8

    def read(text: str) -> None:
        (folder / "config.json").write_text(text)
        list(read_tensors(open_folder(folder)))

    only_our_errors(read, texts(LLAMA, COUNT, 4))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it has to be a whole number from 1 to 16384"),
        ({"num_hidden_layers": 10**4}, "describes 10000 layers and 0 experts, but the weights are 11 tensors"),
        (
            {"vocab_size": 10**30},
            "vocab_size is a number of 100 bits; it has to be a whole number from 1 to 2147483647",
        ),
        ({"hidden_size": "8"}, "hidden_size is '8'; it has to be a whole number"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 2},
            "3 attention heads are not divisible by 2 key-value heads",
        ),
        ({"rope_scaling": []}, r"rope_scaling is \[\]; it has to be an object or null"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it has to be true or false"),
    ],
)
def test_wrong_values_of_config_json_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = hugging_face_folder(tmp_path)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises((CheckpointError, ConfigError), match=words):
        list(read_tensors(open_folder(folder)))


def test_indices_of_safetensors(tmp_path: Path) -> None:
    """Reads one file's weights through an index that names it for every tensor."""
    folder = hugging_face_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    with safe_open(folder / "part.safetensors", "pt") as file:
        names = list(file.keys())
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "part.safetensors")}
    path = folder / "model.safetensors.index.json"

    def read(text: str) -> None:
        path.write_text(text)
        list(read_tensors(open_folder(folder)))

    read(json.dumps(index))
    taken, refused = only_our_errors(read, texts(index, COUNT, 15))
    assert taken and refused


@pytest.mark.parametrize("name", ["../part.safetensors", "/part.safetensors", "x" * 5000, "a\x00b", "missing", ".", ""])
def test_files_that_an_index_cannot_mean(tmp_path: Path, name: str) -> None:
    folder = hugging_face_folder(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert only_our_errors(lambda _: list(read_tensors(open_folder(folder))), iter([0])) == (0, 1)


def test_data_records(tmp_path: Path) -> None:
    checksums = {"algorithm": "sha256", "block_bytes": 8, "size": 8, "blocks": ["0" * 64]}
    content = {
        **{"format": "megatron-data-record", "version": 1, "tokenizer_fingerprint": "", "vocab_size": 1, "eod_id": 0},
        **{"dtype": "uint16", "documents": 1, "sequences": 1, "tokens": 1, "max_id": 0, "index_fingerprint": ""},
        **{"source": ["a"], "checksums": {"bin": checksums, "idx": checksums}, "append_eod": True},
    }

    def read(text: str) -> None:
        (tmp_path / "x.meta.json").write_text(text)
        read_record(tmp_path / "x")

    taken, refused = only_our_errors(read, texts(content, COUNT, 6))
    assert taken and refused


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_tokenizers(tmp_path: Path, name: str) -> None:
    vocab, merges = write_small_bpe(tmp_path)
    GPT2BPETokenizer(vocab, merges).save_pretrained(tmp_path)

    def read(text: str) -> None:
        (tmp_path / name).write_text(text)
        if name == "vocab.json":
            tokenizer: Any = GPT2BPETokenizer(vocab, merges)
        else:
            tokenizer = HuggingFaceTokenizer(tmp_path)
            tokenizer.save_pretrained(tmp_path / "copy")
        ids = tokenizer.encode_batch(["a text", "ü\n"])[0].tolist()
        tokenizer.detokenize(ids), tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod

    only_our_errors(read, texts(json.loads((tmp_path / name).read_text()), COUNT, 7))


@pytest.fixture(scope="module")
def run_of_one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    _, parts = make_parts(flags(save=directory))
    with parts:
        parts.trainer.fit(1)
        parts.checkpoints.save(parts.progress)
        parts.checkpoints.history.close()
    return directory


@pytest.mark.parametrize(
    "key, value, told",
    [
        (("rng_state",), [], "its random states cannot be restored .*; give --no-load-rng"),
        (("rng_state",), [{"torch_cpu": torch.zeros(5)}], "its random states .*KeyError: 'python'"),
        (("rng_state", 0, "torch_cpu"), torch.zeros(5056, dtype=torch.uint8), "its random states .*mt19937"),
        (("opt_param_scheduler",), None, "its learning-rate schedule cannot be restored .*; give --finetune"),
        (("opt_param_scheduler",), {}, "its learning-rate schedule .*num_steps"),
        (("opt_param_scheduler", "lr_decay_style"), "\ud800", r"--lr-decay-style is linear here and \\ud800 in"),
        (("optimizer", "extra"), None, "its optimizer's counters cannot be restored .*; give --no-load-optim"),
        (("optimizer", "extra", "step"), "x", "its optimizer state cannot be restored .*; give --no-load-optim"),
        (("extra",), 7, "its extra values cannot be restored"),
        ("data", {"train_samples": "x"}, "its number of training samples cannot be restored"),
        ("consumed_train_samples", 10**30, "or a size is negative or too large"),
    ],
)
def test_other_values_besides_tensors_than_a_run_saves(
    key: tuple[str | int, ...] | str, value: Any, told: str, run_of_one_step: Path, tmp_path: Path
) -> None:
    """The file and its manifest have valid checksums."""
    shutil.copytree(run_of_one_step, tmp_path / "run")
    step, name = tmp_path / "run/iter_0000001", "mp_rank_00/model_optim_rng.state.json"
    record = manifest.read(step)
    if isinstance(key, str):
        record = replace(record, **{key: value})
    else:
        content = branch = read_values(step / name)
        for part in key[:-1]:
            branch = branch[part]
        branch[key[-1]] = value
        (step / name).write_bytes(encode_values(content))
        record = replace(record, files={**record.files, name: storage.hash_file(step / name)})
    (step / "manifest.json").write_bytes(manifest.encode(record))
    with pytest.raises((CheckpointError, ConfigError), match=told) as error:
        make_parts(flags(load=tmp_path / "run"))
    assert str(error.value).encode()


def test_an_error_of_a_lost_peer_keeps_its_kind() -> None:
    """Restoring an optimizer gathers weights, so a peer may be lost then."""
    with pytest.raises(RuntimeError, match="closed by peer"), saved_values("state", Path("step"), "give none"):
        raise RuntimeError("Connection closed by peer")
