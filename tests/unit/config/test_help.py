"""The first screen, the searchable help, --version and the printed settings."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.cli import generate, preprocess_data
from megatron.config import describe, parse_args, to_dict
from megatron.config.help import train_help
from megatron.config.presets import PRESETS
from megatron.config.run import SECTIONS, all_settings
from megatron.errors import ConfigError
from megatron.version import __version__
from tests.docs.blocks import ROOT
from tests.unit.config.commands import SMALL, argv
from tests.unit.training.settings_table import BASE, CASES


def answer(*words: str) -> str:
    text = train_help("pretrain_gpt.py").answer(words)
    assert text is not None
    return text


def screen(tool: str) -> str:
    if tool == "train":
        return answer("--help")
    parser = preprocess_data.build_parser() if tool == "preprocess" else generate.parser()
    text = parser._help().answer(["-h"])
    assert text is not None
    return text


@pytest.mark.parametrize("tool", ["train", "preprocess", "generate"])
def test_the_first_screen_fits_a_terminal(tool: str) -> None:
    lines = screen(tool).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert "--help WORD" in screen(tool) and "--help-all" in screen(tool)


@pytest.mark.parametrize("tool", ["train", "preprocess", "generate"])
def test_every_flag_of_the_first_screen_exists(tool: str) -> None:
    known = {"--nproc_per_node", "--help", "--help-all"}
    if tool == "train":
        known |= {name for setting in all_settings() for name in setting.spellings}
    else:
        parser = preprocess_data.build_parser() if tool == "preprocess" else generate.parser()
        known |= parser._option_string_actions.keys() | {"--data-path", "--save"}
    named = set(re.findall(r"--[a-z][\w-]*", screen(tool)))
    assert len(named) > 8 and named <= known, named - known


def test_the_command_of_the_first_screen_runs_as_printed(tmp_path: Path) -> None:
    command = re.search(r"  (torchrun (?:.*\\\n)+.*)", answer("--help"))
    assert command
    words = shlex.split(command[1].replace("\\\n", " "))
    words[words.index("pretrain_gpt.py")] = str(ROOT / "pretrain_gpt.py")
    start = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "stopped at iteration 20" in done.stdout, done.stderr[-2000:]


def test_a_section_wins_over_a_word() -> None:
    text = answer("--help", "moe")
    assert text.startswith("moe:\n") and len(re.findall(r"^\w.*:$", text, re.M)) == 1
    assert text.count("\n  --") == sum(setting.section == "moe" for setting in all_settings())


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("warmup", ["--lr-warmup-iters", "--lr-warmup-fraction", "--warmup-num-steps"]),
        ("seq_length", ["--seq-length, --encoder-seq-length"]),
        ("--seq-length", ["--seq-length, --encoder-seq-length"]),
        ("persistent-save", ["--save-interval, --persistent-save-interval"]),  # an alias
        ("Hugging Face", ["--load"]),  # a text
    ],
)
def test_a_word_is_searched_in_names_aliases_and_texts(word: str, flags: list[str]) -> None:
    text = answer("--lr", "1", f"--help={word}")
    for flag in flags:
        assert re.search(rf"^  {re.escape(flag)}( |$)", text, re.M), flag


def test_other_flags_may_stand_beside_it() -> None:
    assert answer("--lr", "1e-3", "--help", "--seq-length", "8") == answer("-h")
    assert answer("--lr", "1e-3", "--help", "checkpoint").startswith("checkpoint:")
    assert train_help("pretrain_gpt.py").answer(["--lr", "1"]) is None


@pytest.mark.parametrize(("word", "near"), [("chekpoint", "checkpoint"), ("warmpu", "warmup"), ("xyzzy", "")])
def test_a_word_without_a_hit_is_an_error(word: str, near: str) -> None:
    with pytest.raises(ConfigError) as raised:
        answer("--help", word)
    line = str(raised.value)
    assert line.startswith(f"--help {word}: no flag and no section has this word; ")
    assert line.endswith(f"did you mean --help {near}?" if near else "--help-all prints every flag")


def test_everything_is_listed_with_its_marks() -> None:
    text = " ".join(answer("--help-all").split())
    assert all(f"{setting.spelling}" in text for setting in all_settings())
    assert "--num-layers INT" in text and "[required]" in text and "[default: 1234]" in text
    assert "[not supported yet: " in text and "[not supported: " in text and "[no-op: " in text
    assert all(f"{section}:" in text for section in SECTIONS)


def test_an_installed_command_names_itself() -> None:
    assert "torchrun --nproc_per_node 2 -m megatron.cli.train" in train_help("/bin/megatron-train").first_screen
    assert "megatron-train --help WORD" in train_help("/bin/megatron-train").first_screen


def test_help_needs_neither_torch_nor_numpy_nor_yaml() -> None:
    code = "import sys\nfrom megatron.config import parse_args\n"
    code += "try:\n    parse_args(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code\n"
    code += "assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    for words in (["--help"], ["--help", "moe"], ["--help-all"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert len(done.stdout.splitlines()) >= 1
    assert re.fullmatch(rf"megatron {re.escape(__version__)}, torch \S+, Python 3\.\S+\n", done.stdout)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} {ROOT}/pretrain_gpt.py --help-all | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["model:", "141"] and not done.stderr


def commands() -> list[list[str]]:
    """Every setting with a value that the table of effects has for it, and every preset."""
    rest = "--seq-length 32 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 100"
    lines = [f"--model {name} {rest}" for name in PRESETS]
    lines += [f"{BASE} {case.where} {case.given}" for case in CASES.values()]
    return [argv(line) for line in lines]


def test_printed_yaml_reads_back_to_the_same_run(tmp_path: Path) -> None:
    read = 0
    for words in commands():
        try:
            config = parse_args([*words, "--print-config", "--format", "yaml"])
        except ConfigError:
            continue  # the case is about a rejection, or about files
        file = tmp_path / "run.yaml"
        file.write_text(describe(config), encoding="utf-8")
        again = parse_args(["--config", str(file)])
        assert to_dict(again) == to_dict(config), words
        read += 1
    assert read > 150


def test_only_what_was_changed_is_printed() -> None:
    config = parse_args(argv(SMALL, "--clip-grad 0.5 --seed 1234 --print-config --changed"))
    rows = describe(config).splitlines()
    names = {row.split()[0] for row in rows[1:-1] if not row.startswith("[")}
    assert "clip_grad" in names and "seed" not in names and "adam_beta1" not in names
    assert "seed: 1234" in describe(parse_args(argv(SMALL, "--seed 1234 --print-config --format yaml")))


def test_yaml_goes_to_stdout_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *argv(SMALL), "--print-config", "--format", "yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert yaml.safe_load(done.stdout)["model"]["num_layers"] == 2 and "planned for 1 x cpu" in done.stderr
