"""Folders as transformers and the Hub write them: any form is read, a wrong kind is named, and the export restores the
form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.cli.convert_checkpoint import main as convert
from megatron.errors import CheckpointError, ConfigError
from megatron.interop.hf.importer import open_folder, read_tensors
from tests.equivalence.test_hf_continue import FAMILIES, command, make_model, transformers, write_data
from tests.helpers.runs import generate_here, pretrain_here

GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3], "pad_token_id": 5}


def json_of(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values))


def converted(source: Path, to: str, out: Path) -> Path:
    assert convert(["--load", str(source), "--to", to, "--save", str(out)]) == 0
    return out


def as_bin(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def as_shards(folder: Path, suffix: str) -> None:
    """Splits the weights into two files with an index, as in large models."""
    held, places = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    whole = "pytorch_model.bin" if suffix == "bin" else "model.safetensors"
    for number, names in enumerate((sorted(held)[:5], sorted(held)[5:]), 1):
        name = f"{whole.partition('.')[0]}-{number:05d}-of-00002.{suffix}"
        part = {key: held[key] for key in names}
        torch.save(part, folder / name) if suffix == "bin" else save_file(part, folder / name)
        places |= dict.fromkeys(names, name)
    write_json(folder / f"{whole}.index.json", {"weight_map": places})


def without_prefix(folder: Path) -> None:
    """Removes the prefix of names, as in gpt2 on the Hub."""
    held = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in held.items()}, folder / "model.safetensors"
    )


def as_cache(folder: Path) -> None:
    """Makes a folder of links into a cache, as a download does."""
    cache = folder.parent / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    for path in folder.iterdir():
        shutil.move(path, cache / "blobs" / path.name)
    linked = cache / "snapshots" / "1234"
    linked.mkdir()
    for path in (cache / "blobs").iterdir():
        (linked / path.name).symlink_to(f"../../blobs/{path.name}")
    folder.rmdir()
    folder.symlink_to(linked)


FORMS = {
    "bin": as_bin,
    "safetensors in shards": lambda folder: as_shards(folder, "safetensors"),
    "bin in shards": lambda folder: as_shards(folder, "bin"),
    "names without a prefix": without_prefix,
    "the cache of a download": as_cache,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_folder_is_read(form: str, dtype: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    make_model(folder, "gpt2").to(getattr(torch, dtype)).save_pretrained(folder)
    before = {name: tensor for name, _, tensor in read_tensors(open_folder(folder))}
    FORMS[form](folder)
    source = open_folder(folder)
    after = {name: tensor for name, _, tensor in read_tensors(source)}
    assert source.dtype == dtype and before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    converted(folder, "native", tmp_path / "native")


def test_a_tied_head_that_is_another_table_is_refused(tmp_path: Path) -> None:
    """Some versions of transformers use this head, and others the token embedding."""
    folder = tmp_path / "theirs"
    make_model(folder, "qwen2")
    held = load_file(folder / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, folder / "model.safetensors")
    open_folder(folder)
    held["lm_head.weight"][7, 3] += 1
    save_file(held, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.embed_tokens\.weight differ, but tie_word"):
        open_folder(folder)


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_code_in_a_bin_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    make_model(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Bomb()}, folder / "pytorch_model.bin")
    capsys.readouterr()
    assert convert(["--load", str(folder), "--to", "native", "--save", str(tmp_path / "native")]) == 12
    printed = capsys.readouterr()
    assert "cannot be read as plain weights" in printed.err and "this ran" not in printed.out
    torch.save([1, 2], folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="is not a dictionary of tensors by name"):
        open_folder(folder)


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    make_model(folder)
    shutil.move(folder / "model.safetensors", tmp_path / "secret")
    (folder / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"is a link to .*secret, outside of its folder"):
        open_folder(folder)
    (folder / "model.safetensors").unlink()
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "../secret"}})
    with pytest.raises(CheckpointError, match=r"names '\.\./secret', which is not a file of its folder"):
        open_folder(folder)


@pytest.mark.parametrize("form", [None, "bin", "safetensors in shards", "bin in shards"])
def test_a_model_of_theirs_is_named_with_the_command_that_imports_it(
    form: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    make_model(folder)
    if form is not None:
        FORMS[form](folder)
    way = f"holds a Hugging Face model: import it with python tools/convert_checkpoint.py --load {folder} --from hf"
    capsys.readouterr()
    assert convert(["--load", str(folder), "--from", "native", "--to", "hf", "--save", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count(way) == 1
    assert convert(["--load", str(folder), "--to", "hf", "--save", str(tmp_path / "x")]) == 2
    assert "--to hf: --load has this format already" in capsys.readouterr().err


def test_a_name_of_the_hub_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "mistralai/Mistral-7B-v0.3"
    for start in (
        lambda: pretrain_here(command(Path(name))),
        lambda: generate_here("--load", name, "--prompt", "abc"),
        lambda: convert(["--load", name, "--to", "native", "--save", str(tmp_path / "x")]),
    ):
        capsys.readouterr()
        assert start() == 2
        error = capsys.readouterr().err
        assert f"`hf download {name} --local-dir DIR` fetches it" in error and error.count("\n") == 1


# ---------------------------------------------------------------- given back as it came


@pytest.mark.parametrize("family", FAMILIES)
def test_class_ids_and_generation_settings_come_back(family: str, tmp_path: Path) -> None:
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    make_model(theirs, family, bos_token_id=0, eos_token_id=[2, 3], pad_token_id=7)
    write_json(theirs / "generation_config.json", GENERATION)
    tokenizer = json_of(theirs / "tokenizer_config.json") | {"model_max_length": 4096, "bos_token": "a"}
    write_json(theirs / "tokenizer_config.json", tokenizer)
    native = converted(theirs, "native", tmp_path / "native")
    assert pretrain_here(command(native, write_data(tmp_path / "data"), save=run, save_interval=2)) == 0
    out = converted(run, "hf", tmp_path / "out")
    before, after = json_of(theirs / "config.json"), json_of(out / "config.json")
    kept = ("architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert json_of(out / "generation_config.json") == GENERATION
    assert json_of(out / "tokenizer_config.json").items() >= tokenizer.items()
    assert type(transformers.AutoModelForCausalLM.from_pretrained(out)).__name__ == before["architectures"][0]


def test_what_was_left_out_stays_out(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    make_model(theirs)
    (theirs / "generation_config.json").unlink()
    values = json_of(theirs / "config.json")
    write_json(theirs / "config.json", {name: value for name, value in values.items() if "token_id" not in name})
    out = converted(converted(theirs, "native", tmp_path / "native"), "hf", tmp_path / "out")
    assert not [name for name in json_of(out / "config.json") if "token_id" in name]
    assert not (out / "generation_config.json").exists()


@pytest.mark.parametrize("wrong", ["2", -1, [1, "2"], True, {"a": 1}])
def test_an_id_that_is_none_is_refused(wrong: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = tmp_path / "theirs"
    make_model(theirs)
    write_json(theirs / "config.json", json_of(theirs / "config.json") | {"eos_token_id": wrong})
    assert convert(["--load", str(theirs), "--to", "native", "--save", str(tmp_path / "native")]) == 12
    assert f"eos_token_id {wrong!r} is not the id of a token" in capsys.readouterr().err


def test_a_run_started_here_has_its_tokenizers_own_ids(tmp_path: Path) -> None:
    make_model(tmp_path / "theirs")
    names = json_of(tmp_path / "theirs/tokenizer_config.json") | {"bos_token": {"content": "a"}, "pad_token": "b"}
    write_json(tmp_path / "theirs/tokenizer_config.json", names)
    own = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tmp_path / "theirs", "seq_length": 16}
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    fresh = {"load": None, "finetune": None, "use_checkpoint_args": None, "save": tmp_path / "run", "save_interval": 2}
    assert pretrain_here(command(tmp_path, **own, **shape, **fresh)) == 0
    out = converted(tmp_path / "run", "hf", tmp_path / "out")
    ids = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2}
    assert json_of(out / "config.json").items() >= ids.items()
    assert json_of(out / "generation_config.json") == ids
