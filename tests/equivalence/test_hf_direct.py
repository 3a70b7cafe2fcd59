"""`pretrain_gpt.py --load FOLDER --finetune` of a Hugging Face model: the loss of `transformers`, the weights of an
import bit for bit. A rank reads only what it holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint import paths
from megatron.checkpoint.manifest import read as read_manifest
from megatron.checkpoint.reader import StepReader
from megatron.cli.convert_checkpoint import main as convert
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.interop.hf import direct
from megatron.interop.hf.importer import open_folder
from megatron.layout import Layout
from megatron.model.parameters import parameters
from megatron.parallelize.specs import Cut
from megatron.state.shard import Shard
from megatron.training.assemble import assemble
from tests.equivalence.test_hf_continue import FAMILIES, ROWS, WORDS, command, make_model, write_data
from tests.equivalence.test_hf_folders import FORMS
from tests.helpers.distributed import run_ranks
from tests.helpers.other_programs import read_settings
from tests.helpers.runs import Recorder, make_run, pretrain_gpt, pretrain_here, read_metrics

PLAIN = {"use_checkpoint_args": None}  # no flag is needed for what the folder says


def native_of(folder: Path) -> Path:
    native = folder.parent / "native"
    assert convert(["--load", str(folder), "--to", "native", "--save", str(native)]) == 0
    return native


def first_losses(argv: list[str], rank: int = 0, ranks: int = 1) -> tuple[float, list[torch.Tensor]]:
    """Loss of the first global batch, and its texts where this rank sees them."""
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    run, script, texts = make_run(read_settings(argv), rank=rank, world_size=ranks), pretrain_gpt(), []

    def spy(model: Any, batch: Any) -> Any:
        if "labels" in batch:
            texts.append(torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1))
        return script.forward_step(model, batch)

    with assemble(run, script.datasets_provider, script.model_provider, spy, hooks=[Recorder(records)]) as parts:
        parts.trainer.fit()
    return records[0]["lm_loss"], texts


def loss_of_theirs(model: Any, texts: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return sum(float(model.float()(text, labels=text).loss) for text in texts) / len(texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_loss_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = make_model(tmp_path / "theirs", family)
    argv = command(tmp_path / "theirs", write_data(tmp_path / "data"), train_iters=1, **PLAIN)
    loss, texts = first_losses(argv)
    assert len(texts) == 4
    assert loss == pytest.approx(loss_of_theirs(theirs, texts), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_at_tp2_pp2_the_first_loss_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = make_model(tmp_path / "theirs", family)
    form = "bin in shards" if family == "gpt2" else "safetensors in shards"
    FORMS[form](tmp_path / "theirs")
    experts = {"expert_model_parallel_size": 2, "sequence_parallel": True} if family == "qwen3_moe" else {}
    axes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, **experts}
    ranks = 8 if experts else 4
    data = write_data(tmp_path / "data")
    _, texts = first_losses(command(tmp_path / "theirs", data, train_iters=1, **PLAIN))
    argv = command(tmp_path / "theirs", data, train_iters=1, **PLAIN, **axes)
    losses = [loss for loss, _ in run_ranks(ranks, lambda rank: first_losses(argv, rank, ranks))]
    assert losses == pytest.approx([loss_of_theirs(theirs, texts)] * ranks, rel=1e-5)


# ---------------------------------------------------------------- bit for bit, and no more than that


def held_by(source: Any, tp: int, rank: int) -> dict[str, tuple[Shard, torch.Tensor]]:
    """Every parameter's shard on one tensor-parallel rank, filled with another value."""
    rows = -(-source.vocab_size // (16 * tp)) * 16 * tp
    cut = Cut(ParallelState.plan(Layout(tp, tp=tp), rank).tp, padded_vocab_size=rows)
    held = {}
    for name, parameter in parameters(source.config, source.vocab_size, source.moe).items():
        spec = cut.spec(parameter)
        held[name] = (spec, torch.full(cut.stored_shape(parameter.row, spec), 7.5))
    return held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_an_import_bit_for_bit(family: str, dtype: str, tmp_path: Path) -> None:
    """Covers tensor parallelism beyond the number of key-value heads. Pipelines and experts only select names."""
    folder = tmp_path / "theirs"
    make_model(folder, family).to(getattr(torch, dtype)).save_pretrained(folder)
    step = native_of(folder) / paths.RELEASE
    imported, source = StepReader(step, read_manifest(step)), open_folder(folder)
    for tp in (1, 2, 4):
        for rank in range(tp):
            held = held_by(source, tp, rank)
            direct._fill(source, held, None)
            for name, (spec, tensor) in held.items():
                expected = torch.full_like(tensor, -7.5)
                imported.fill(spec, expected, imported.manifest.model[name], cast=True)
                assert torch.equal(tensor, expected), (tp, rank, name)


def mapped_kilobytes(path: Path) -> int:
    """Memory of a file's pages that this process has touched."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split(" ")[0].count("-") == 1 and ":" not in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.parametrize("form", [None, "bin"])
def test_a_rank_reads_its_slices_only(form: str | None, tmp_path: Path) -> None:
    folder, shape = tmp_path / "theirs", {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 32768}
    make_model(folder, "qwen2", **shape)
    if form is not None:
        FORMS[form](folder)
    file = next(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    size = file.stat().st_size / 1024
    source = open_folder(folder, compare=False)
    before = mapped_kilobytes(file)
    direct._fill(source, held_by(source, 8, 3), None)
    assert before < 0.1 * size and mapped_kilobytes(file) - before < 0.35 * size  # an eighth, and what splits columns
    direct._fill(source, held_by(source, 1, 0), None)
    assert mapped_kilobytes(file) > 0.9 * size


# ---------------------------------------------------------------- settings


def test_a_folder_without_tokenizer_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    make_model(folder)
    argv = command(folder, write_data(tmp_path / "data"), **PLAIN)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"holds a Hugging Face model without tokenizer.json; copy the model's"):
        read_settings(argv)
    config = read_settings([*argv, "--tokenizer-type", "NullTokenizer", "--vocab-size", str(ROWS)])
    assert any(line.endswith("(qwen2): the model's shape and vocabulary are taken from it") for line in config.notices)


def test_settings_come_from_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    make_model(folder)
    argv = command(folder, write_data(tmp_path / "data"), **PLAIN, attention_dropout=None)
    config = read_settings(argv)
    assert (config.model.num_layers, config.model.normalization, config.tokenizer.vocab_size) == (2, "RMSNorm", ROWS)
    assert config.tokenizer.tokenizer_model == str(folder)
    assert config.data.seq_length == 16
    assert any("holds a Hugging Face model (qwen2): the model's shape" in line for line in config.notices)
    assert any(line.startswith("--attention-dropout 0.1 is the default, ") for line in config.notices)
    assert not any(line.startswith("--hidden-dropout") for line in config.notices)
    assert pretrain_here([*argv, "--print-config"]) == 0
    printed = capsys.readouterr().out
    origin = {words[0]: words[-1] for line in printed.splitlines() if len(words := line.split()) > 1}
    assert (origin["num_layers"], origin["attention_dropout"], origin["hidden_dropout"]) == (
        "checkpoint",
        "default",
        "flag",
    )
    assert read_settings([*argv, "--use-checkpoint-args"]).model == config.model
    assert make_run(config).data_vocab_size == len(WORDS)


def test_trained_on_and_given_back(tmp_path: Path) -> None:
    """Direct loading keeps the same data besides weights as an import."""
    folder, data = tmp_path / "theirs", tmp_path / "data"
    make_model(folder, bos_token_id=3, eos_token_id=[2, 3])
    write_data(data)
    native, out = native_of(folder), {}
    for name, load, given in (("direct", folder, PLAIN), ("imported", native, {})):
        run = tmp_path / name
        log = {"metrics_jsonl": tmp_path / f"{name}.jsonl"}
        assert pretrain_here(command(load, data, save=run, save_interval=2, **given, **log)) == 0
        again = command(run, data, save=run, save_interval=2, finetune=None, train_iters=4, **log)
        assert pretrain_here(again) == 0
        assert convert(["--load", str(run), "--to", "hf", "--save", str(tmp_path / f"{name}-hf")]) == 0
        losses = [record["lm_loss"] for record in read_metrics(tmp_path / f"{name}.jsonl")]
        files = {path.name: path.read_bytes() for path in (tmp_path / f"{name}-hf").iterdir()}
        out[name] = (losses, files)
    assert out["direct"] == out["imported"] and len(out["direct"][0]) == 4
    assert json.loads(out["direct"][1]["config.json"])["eos_token_id"] == [2, 3]


def test_the_tokenizer_can_be_left_out_of_checkpoints(tmp_path: Path) -> None:
    make_model(tmp_path / "theirs")
    data = write_data(tmp_path / "data")
    for flag, kept in ((None, True), (True, False)):
        run = tmp_path / f"run-{kept}"
        own = {"save": run, "save_interval": 2, "no_save_tokenizer_assets": flag}
        assert pretrain_here(command(tmp_path / "theirs", data, **PLAIN, **own)) == 0
        assert (run / "iter_0000002" / paths.TOKENIZER).exists() is kept
        out = tmp_path / f"out-{kept}"
        assert convert(["--load", str(run), "--to", "hf", "--save", str(out)]) == 0
        assert (out / "tokenizer.json").exists() is kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"finetune": None}, "has only weights and cannot be resumed; add --finetune"),
        ({"num_layers": 3}, r"--num-layers 3 \(flag\) and 2 of the checkpoint disagree; remove it$"),
        ({"ckpt_step": 3}, "--ckpt-step 3: .*without steps and a manifest; remove it"),
        ({"skip_hash": True}, "--skip-hash: .*remove it"),
        ({"save": "theirs", "save_interval": 2}, "--save theirs: .*save to another directory"),
        ({"seq_length": None}, "--seq-length: required and not given"),
    ],
)
def test_what_does_not_go_together_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(Path("theirs"))
    with pytest.raises(ConfigError, match=message):
        read_settings(command(Path("theirs"), **{**PLAIN, **given}))


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def lose_a_shard(folder: Path) -> None:
    FORMS["safetensors in shards"](folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def other_shapes(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(16, 32)
    save_file(held, folder / "model.safetensors")


def one_tensor_less(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, folder / "model.safetensors")


def an_adapter(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/base"}))
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")


def an_adapter_with_a_configuration(folder: Path) -> None:
    config = (folder / "config.json").read_text()
    an_adapter(folder)
    (folder / "config.json").write_text(config)


def lose_the_index(folder: Path) -> None:
    FORMS["safetensors in shards"](folder)
    (folder / "model.safetensors.index.json").unlink()


def one_tensor_of_integers(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(held | {name: held[name].to(torch.int8)}, folder / "model.safetensors")


def names_of_a_wrapper(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    save_file({f"module._orig_mod.{name}": each for name, each in held.items()}, folder / "model.safetensors")


def a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


BAD = {
    "an adapter": (an_adapter, "holds an adapter of a/base, not a model; merge the two first"),
    "an adapter with a configuration": (an_adapter_with_a_configuration, "holds an adapter of a/base, not a model"),
    "shards without an index": (lose_the_index, r"of-00002\.safetensors but no model\.safetensors\.index\.json"),
    "a download that has begun": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.incomplete"),
        r"but model\.safetensors\.incomplete; the download is not complete: run it again",
    ),
    "a family with images": (
        lambda folder: edit_config(folder, model_type="qwen2_vl"),
        "the nearest is qwen2, which lacks images",
    ),
    "quantised": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq"}),
        r"the weights are quantised \(gptq\)",
    ),
    "integers": (one_tensor_of_integers, r"down_proj\.weight is I8; supported: float32"),
    "names of a wrapper": (
        names_of_a_wrapper,
        r"model\.safetensors: the names of its tensors begin with 'module\._orig_mod\.', so the model was saved within",
    ),
    "a pointer to a file": (a_pointer, "download it again: a part may be missing"),
    "a known family of others": (
        lambda folder: edit_config(folder, model_type="gemma2"),
        "the nearest is llama, which lacks soft caps",
    ),
    "a misspelt family": (lambda folder: edit_config(folder, model_type="qwen_2"), r"did its author mean qwen2\?"),
    "no model": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"no model\.safetensors and no pytorch_model\.bin; other formats of weights are not supported",
    ),
    "a family of others": (
        lambda folder: edit_config(folder, model_type="falcon"),
        "model_type 'falcon' cannot be imp",
    ),
    "a truncated file": (truncate, "cannot be read as safetensors"),
    "a lost shard": (lose_a_shard, r"names 2 files, but 1 of them are missing \(model-00002-of-00002.safetensors\)"),
    "other shapes": (other_shapes, r"q_proj\.weight is 16 x 32, but config\.json describes 32 x 32"),
    "a tensor less": (one_tensor_less, "missing: model.norm.weight"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_folder_is_one_line(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    make_model(folder)
    spoil, message = BAD[what]
    spoil(folder)
    capsys.readouterr()
    assert pretrain_here(command(folder, **PLAIN)) in (2, 12)
    error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(error) == 1
    assert re.search(message, error[0]), error[0]
