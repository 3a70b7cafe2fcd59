"""One command each imports, trains and exports a Hugging Face model; `transformers` is the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.convert_checkpoint import main as convert
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from megatron.training.assemble import assemble
from megatron.training.initialize import Run
from tests.helpers.other_programs import read_settings
from tests.helpers.runs import flags, make_run, pretrain_gpt, pretrain_here
from tests.unit.checkpoint.test_tools import WORDS, write_tokenizer
from tests.unit.tokenizer.kinds import QWEN2

transformers = pytest.importorskip("transformers")

ROWS = 40  # of the table; the tokenizer has fewer entries, as that of most models
SMALL: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                      "bos_token_id": 0, "eos_token_id": 0,
                      "initializer_range": 0.2}),
    "gpt_neox": ("GPTNeoX", {"vocab_size": ROWS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                             "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2}),
    "llama": ("Llama", {**SMALL, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}),
    "olmo2": ("Olmo2", {**SMALL, "tie_word_embeddings": False, "pad_token_id": 38, "eos_token_id": 0}),
    "qwen2": ("Qwen2", {**SMALL, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": None}),
    "qwen3": ("Qwen3", {**SMALL, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": ("Qwen3Moe", {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                               "norm_topk_prob": True}),
}  # fmt: skip
OF_THE_MODEL = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")


def make_model(folder: Path, family: str = "qwen2", **changes: Any) -> Any:
    torch.manual_seed(3)
    name, values = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**values, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if family == "qwen2":  # in such a folder transformers reads every tokenizer as Qwen2's
        description = json.loads((folder / "tokenizer.json").read_text())
        words = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
        parts = [words, description["pre_tokenizer"] | {"use_regex": False}]
        description |= {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}
        (folder / "tokenizer.json").write_text(json.dumps(description))
    return model


def imported(folder: Path, family: str = "qwen2", **changes: Any) -> tuple[Path, Any]:
    model = make_model(folder / "theirs", family, **changes)
    native = folder / "native"
    assert convert(["--load", str(folder / "theirs"), "--from", "hf", "--to", "native", "--save", str(native)]) == 0
    return native, model


def write_data(prefix: Path, highest: int = len(WORDS) - 1) -> Path:
    with IndexedDatasetBuilder(str(prefix), "uint16") as builder:
        for document in range(40):
            ids = [1 + (document * 5 + place) % (len(WORDS) - 1) for place in range(30)]
            builder.add_document([*ids[:-1], highest, 0])
    return prefix


def command(native: Path, data: Path | None = None, **changes: Any) -> list[str]:
    own = {
        "load": native,
        "finetune": True,
        "use_checkpoint_args": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    where = {} if data is None else {"mock_data": None, "data_path": data, "split": "100,0,0"}
    quiet = {"train_iters": 2, "lr_decay_style": "constant"}
    return flags(**{**dict.fromkeys(OF_THE_MODEL), **own, **where, **quiet, **changes})


def loss_of_first_batch(argv: list[str]) -> tuple[float, torch.Tensor, Run]:
    run, script, seen = make_run(read_settings(argv)), pretrain_gpt(), []

    def spy(model: Any, batch: Any) -> Any:
        loss, count = script.forward_step(model, batch)
        seen.append((float(loss.detach() / count), torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1)))
        return loss, count

    with assemble(run, script.datasets_provider, script.model_provider, spy) as parts:
        parts.trainer.iterate()
    return *seen[0], run


@pytest.mark.parametrize("family", FAMILIES)
def test_one_command_goes_on_with_the_imported_model(family: str, tmp_path: Path) -> None:
    native, theirs = imported(tmp_path, family)
    loss, text, run = loss_of_first_batch(command(native, write_data(tmp_path / "data")))
    with torch.no_grad():
        expected = float(theirs.float()(text, labels=text).loss)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert (run.vocab_size, run.data_vocab_size) == (ROWS, len(WORDS))
    assert run.config.data.seq_length == 16, "the run's own"


def test_a_trained_model_goes_back_with_the_rows_beyond_its_tokenizer(tmp_path: Path) -> None:
    """A rate of almost 0 exports what was imported, so no row was lost or redrawn."""
    native, theirs = imported(tmp_path)
    argv = command(native, write_data(tmp_path / "data"), lr=1e-30, save=tmp_path / "run", save_interval=2)
    assert pretrain_here(argv) == 0
    out = tmp_path / "out"
    assert convert(["--load", str(tmp_path / "run"), "--to", "hf", "--save", str(out)]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert back.config.vocab_size == ROWS
    ours, before = back.state_dict(), theirs.state_dict()
    assert ours.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-25)
    assert convert(["--load", str(tmp_path / "run"), "--to", "hf", "--save", str(out), "--overwrite"]) == 0


def test_the_run_resumes_with_the_same_settings(tmp_path: Path) -> None:
    native, _ = imported(tmp_path)
    data, run = write_data(tmp_path / "data"), tmp_path / "run"
    assert pretrain_here(command(native, data, save=run, save_interval=2)) == 0
    again = command(native, data, save=run, save_interval=2, load=run, finetune=None, train_iters=4)
    assert pretrain_here(again) == 0
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_the_vocabulary_can_be_given_and_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    native, _ = imported(tmp_path, "gpt2")
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tmp_path / "theirs"}
    data = write_data(tmp_path / "data")
    typed = {**shape, **tokenizer, "use_checkpoint_args": None}
    assert pretrain_here(command(native, data, **typed, vocab_size=ROWS)) == 0
    capsys.readouterr()
    for size, message in (
        (None, f"give --vocab-size {ROWS}, as in the checkpoint"),
        (ROWS + 1, f"give --vocab-size {ROWS}, as in the checkpoint"),
        (5, f"--vocab-size 5: the tokenizer has {len(WORDS)} entries"),
    ):
        assert pretrain_here(command(native, data, **typed, vocab_size=size)) in (2, 12)
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match=rf"--vocab-size {ROWS}: .*a larger one requires --load"):
        make_run(read_settings(command(native, data, **{**typed, "load": None, "finetune": None}, vocab_size=ROWS)))


def test_ids_beyond_the_tokenizer_are_refused_in_data(tmp_path: Path) -> None:
    native, _ = imported(tmp_path)
    data = write_data(tmp_path / "data", highest=len(WORDS))
    with pytest.raises(DataError, match=rf"{len(WORDS)} is not in the vocabulary of {len(WORDS)}"):
        loss_of_first_batch(command(native, data))


@pytest.mark.parametrize("imports", [True, False], ids=["imported", "loaded as it is"])
def test_a_model_with_one_expert_per_token_goes_on(
    imports: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    native, theirs = imported(tmp_path, "qwen3_moe", num_experts_per_tok=1)
    argv = command(native if imports else tmp_path / "theirs", write_data(tmp_path / "data"))
    loss, tokens, _ = loss_of_first_batch(argv)
    expected = theirs(tokens, labels=tokens).loss
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert pretrain_here(argv) == 0
    assert "the router learns only from the load-balance loss" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"router-pre-softmax true .flag. and false of the checkpoint disagree"):
        read_settings([*argv, "--moe-router-pre-softmax"])


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Path]:
    yield imported(tmp_path)[0]


def test_the_tokenizer_is_the_checkpoints_own_copy(native: Path) -> None:
    (native.parent / "theirs/tokenizer.json").unlink()
    config = read_settings(command(native))
    assert config.tokenizer.tokenizer_model == str(native / "release/tokenizer")
    assert make_run(config).tokenizer is not None


def test_another_tokenizer_may_be_given(native: Path) -> None:
    (native.parent / "own").mkdir()
    write_tokenizer(native.parent / "own")
    given = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": native.parent / "own"}
    config = read_settings(command(native, **given))
    assert (config.tokenizer.tokenizer_model, config.tokenizer.vocab_size) == (str(native.parent / "own"), ROWS)


def test_precedence_is_printed(native: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here([*command(native, rotary_base=5e5), "--print-config"]) == 0
    printed = capsys.readouterr().out
    origin = {words[0]: words[-1] for line in printed.splitlines() if len(words := line.split()) > 1}
    assert {origin[name] for name in ("num_layers", "normalization", "vocab_size", "tokenizer_model")} == {"checkpoint"}
    assert {origin[name] for name in ("seq_length", "lr", "rotary_base", "attention_dropout")} == {"flag"}
    assert "A later source wins: default, preset, file, flag" in printed


def test_a_shape_that_disagrees_is_refused(native: Path) -> None:
    with pytest.raises(ConfigError, match=r"--num-layers 3 \(flag\) and 2 of the checkpoint disagree"):
        read_settings(command(native, num_layers=3))
    with pytest.raises(ConfigError, match="--seq-length: required and not given"):
        read_settings(command(native, seq_length=None))


def test_a_model_without_a_tokenizer_needs_one_for_text_only(tmp_path: Path) -> None:
    make_model(tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer.json").unlink()
    native = tmp_path / "native"
    assert convert(["--load", str(tmp_path / "theirs"), "--from", "hf", "--to", "native", "--save", str(native)]) == 0
    saved = json.loads((native / "release/manifest.json").read_text())["manifest"]["config"]["tokenizer"]
    assert saved == {"vocab_size": ROWS}
    assert pretrain_here(command(native)) == 0
