"""The convert and generate tools, from a checkpoint directory to files and text."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.run_state import RunHistory, TrainState
from megatron.checkpoint.save import save_checkpoint
from megatron.cli.convert_checkpoint import main as convert
from megatron.cli.verify_checkpoint import main as verify
from megatron.config import ModelConfig
from megatron.distributed.parallel_state import ParallelState
from megatron.layout import Layout
from megatron.model.parameters import parameters
from megatron.state.shard import Shard
from tests.helpers.runs import generate_here

WORDS = ["<|endoftext|>", *"abcdefghij", "Ġ", "def", "Ġhello"]


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json with a word-level vocabulary."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": WORDS[0], "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
        ],
        "model": {"type": "BPE", "vocab": {word: i for i, word in enumerate(WORDS)}, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "normalizer": None, "post_processor": None, "truncation": None, "padding": None,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": WORDS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_model(
        tmp_path / "run", ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, max_position_embeddings=32)
    )
    return tmp_path / "run"


def save_model(
    directory: Path, config: ModelConfig, tokenizer: Any = write_tokenizer, rows: int = len(WORDS), moe: Any = None
) -> None:
    generator = torch.Generator().manual_seed(1)
    params = {
        p.name: (
            Shard(name=p.name, logical_shape=p.shape),
            torch.randn(p.stored_shape, generator=generator) * 0.2,
        )
        for p in parameters(config, rows, moe).values()
    }
    state = TrainState(
        iteration=5, consumed_train_samples=0, consumed_valid_samples=0, params=params, optimizer=None,
        optimizer_extra={}, scheduler={}, rng=None, args={}, data={},
        config={"model": asdict(config)} | ({} if moe is None else {"moe": asdict(moe)}),
    )  # fmt: skip
    parallel = ParallelState.build(Layout(1), 0)
    with closing(RunHistory("t")) as history:
        save_checkpoint(directory, state, parallel=parallel, save_tokenizer=tokenizer, history=history)


def test_to_hf_opens_in_transformers_with_its_tokenizer(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    out = run.parent / "my-model"
    assert convert(["--load", str(run), "--to", "hf", "--save", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "GPT2LMHeadModel" in printed and "logits equal" in printed and "tolerance" in printed
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == len(WORDS) == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0
    assert convert(["--load", str(run), "--to", "hf", "--save", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert convert(["--load", str(run), "--to", "hf", "--save", str(out), "--overwrite"]) == 0


def test_a_link_in_a_checkpoints_tokenizer_is_not_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "secret").write_text("not yours")
    (folder,) = run.rglob("tokenizer")
    (folder / "chat_template.jinja").symlink_to(run.parent / "secret")
    assert convert(["--load", str(run), "--to", "hf", "--save", str(run.parent / "out")]) == 12
    assert "chat_template.jinja is a symbolic link" in capsys.readouterr().err
    assert not (run.parent / "out").exists()


def test_files_that_no_manifest_lists_are_reported_and_not_exported(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (step,) = run.glob("iter_*")
    names = ("tokenizer/modeling.py", "tokenizer/special_tokens_map.json", "mp_rank_00/note.txt", "README")
    (step / names[1]).parent.mkdir(exist_ok=True)
    for name in names:
        (step / name).write_text('{"eos_token": "a"}')
    assert verify([str(run)]) == 1
    told = capsys.readouterr().out
    assert "extra: " in told and "has 4 file(s) that its manifest does not list" in told and "good" not in told
    assert all(repr(name) in told for name in names)
    assert verify([str(run), "--deep", "--all"]) == 1
    capsys.readouterr()
    assert convert(["--load", str(run), "--to", "hf", "--save", str(run.parent / "out")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("warning:") == 1 and "has 4 file(s) that its manifest does not list" in printed
    assert {path.name for path in (run.parent / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert json.loads((run.parent / "out/tokenizer_config.json").read_text())["eos_token"] == WORDS[0]
    for name in names:
        (step / name).unlink()
    assert verify([str(run)]) == 0


def test_a_damaged_newest_step_is_not_replaced_by_an_older_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (newest,) = run.glob("iter_*")
    older = run / "iter_0000001"
    shutil.copytree(newest, older)
    (newest / "manifest.json").write_text("{}")
    out = run.parent / "out"
    for start in (
        lambda: convert(["--load", str(run), "--to", "hf", "--save", str(out)]),
        lambda: generate_here("--load", run, "--prompt", "abc"),
    ):
        assert start() == 12
        error = capsys.readouterr().err
        assert (
            "only step 5 of " in error and "to use another step, give --ckpt-step (" in error and error.count("\n") == 1
        )
    assert not out.exists()


def test_from_hf_and_back_is_bit_equal(run: Path) -> None:
    from safetensors.torch import load_file

    first, native, second = (run.parent / name for name in ("first", "native", "second"))
    assert convert(["--load", str(run), "--to", "hf", "--save", str(first)]) == 0
    assert convert(["--load", str(first), "--from", "hf", "--to", "native", "--save", str(native)]) == 0
    assert (native / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (native / "release/tokenizer/tokenizer.json").is_file()
    assert convert(["--load", str(native), "--to", "hf", "--save", str(second)]) == 0
    ours, again = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert ours.keys() == again.keys() and all(torch.equal(ours[name], again[name]) for name in ours)
    assert (first / "config.json").read_text() == (second / "config.json").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--to", "megatron", "--save", "x", "--dtype", "float32"], "--dtype float32: has no effect without --to hf"),
        (
            ["--to", "megatron", "--save", "x", "--no-safe-serialization"],
            "--no-safe-serialization: has no effect without --to hf",
        ),
        (["--to", "native", "--save", "x"], "--to native: --load has this format already"),
        (["--to", "hf", "--save", "x", "--ckpt-step", "99"], "--ckpt-step 99"),
        (["--from", "hf", "--to", "native", "--save", "x"], r"config.json does not exist"),
        (["--from", "hf", "--to", "native", "--save", "x", "--dtype", "float32"], "--dtype float32"),
    ],
)
def test_convert_refuses_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    arguments = [str(run.parent / value) if value == "x" else value for value in arguments]
    assert convert(["--load", str(run), *arguments]) in (2, 12)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (run.parent / "x").exists()


def test_generate_needs_the_checkpoint_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--load", str(run), "--prompt", "abc", "--prompt", "fghij", "--max-new-tokens", "8", "--ignore-eod"]
    assert generate_here(*command, "--greedy") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("abc") and lines[1].startswith("fghij")
    drawn = []
    for seed in ("1", "1", "2"):
        assert generate_here(*command, "--temperature", "2", "--top-k", "9", "--top-p", "0.99", "--seed", seed) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", "abc" * 20], "60 tokens, but the model has 32 positions"),
        (["--prompt", "abc", "--temperature", "0"], "use --greedy"),
        (
            ["--prompt", "abc", "--greedy", "--top-k", "3"],
            "--greedy: with this flag, --temperature, --top-k and --top-p have no effect",
        ),
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "abc", "--dtype", "int8"], "--dtype int8"),
        (["--prompt", "abc", "--device", "abacus"], "--device abacus"),
        (["--prompt", "abc", "--kernels", "fast"], "--kernels fast"),
    ],
)
def test_generate_refuses_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert generate_here("--load", run, *arguments) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "warning"))]
    assert message in error


def test_generate_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=2, max_position_embeddings=32)
    save_model(tmp_path, config, tokenizer=None)
    assert generate_here("--load", tmp_path, "--prompt", "abc") == 2
    assert "the checkpoint holds no tokenizer" in capsys.readouterr().err
