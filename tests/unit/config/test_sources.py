"""--config FILE, precedence, --print-config, and configurations as plain dicts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.config import RunConfig, adopt_checkpoint_args, describe, from_dict, parse_args, to_dict
from megatron.config.flag import Setting
from megatron.config.run import all_settings
from megatron.config.values import parse_value
from megatron.errors import ConfigError
from tests.unit.config.commands import LLAMA3, SMALL, TUTORIAL, argv, without

REST = "--seq-length 32 --micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 100"


def parse_file(folder: Path, text: str, flags: str = REST) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text(text)
    return parse_args(argv(f"--config {file}", flags))


def test_keys_are_flags_or_fields_flat_or_grouped(tmp_path: Path) -> None:
    text = """
        num-layers: 2
        model: {hidden_size: 64, num_attention_heads: 4, position-embedding-type: rope, bias_gelu_fusion: false}
        optimizer: sgd
        schedule:
          min_lr: 1e-5
        no-load-optim: true
        load: x
        swiglu: false
        iterations-to-skip: [3, 4]
        layernorm-epsilon: 1e-6
        ckpt_step:
    """
    config = parse_file(tmp_path, text)
    model = config.model
    assert (model.num_layers, model.hidden_size, model.positions, model.norm_epsilon) == (2, 64, "rope", 1e-6)
    assert model.activation == "gelu_erf"
    assert (config.optimizer.optimizer, config.schedule.min_lr) == ("sgd", 1e-5)
    assert config.training.iterations_to_skip == (3, 4)
    assert (config.checkpoint.load_optim, config.checkpoint.ckpt_step) == (False, None)
    assert any("--layernorm-epsilon: taken as --norm-epsilon" in line for line in config.notices)


def test_default_preset_file_flag_in_rising_precedence(tmp_path: Path) -> None:
    config = parse_file(
        tmp_path, "model: gpt2-345m\nnum_layers: 3\nhidden-size: 256\nseed: 7", f"{REST} --num-layers 2"
    )
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (2, 256, 16)
    origins = {name: config.origins.get(name, "default").split()[0] for name in ("num_layers", "hidden_size", "seed")}
    assert origins == {"num_layers": "flag", "hidden_size": "file", "seed": "file"}
    assert config.origins["num_attention_heads"] == "preset gpt2-345m"
    table = describe(config)
    assert [line.split() for line in table.splitlines() if line.startswith("num_layers ")] == [
        ["num_layers", "2", "flag"]
    ]
    assert "adam_beta1" in table and "default" in table


@pytest.mark.parametrize("written", ["[0.3, a, 0.7, b]", "0.3 a 0.7 b", "'0.3 a 0.7 b'"])
def test_lists_may_be_written_as_on_the_command_line(tmp_path: Path, written: str) -> None:
    config = parse_file(tmp_path, f"data-path: {written}\nsplit: 949,50,1", without(SMALL, "--mock-data") + TOKENIZER)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.data.split == "949,50,1"


TOKENIZER = " --tokenizer-type NullTokenizer"


def test_a_switch_of_a_file_is_turned_off_by_a_flag(tmp_path: Path) -> None:
    shape = "num-layers: 2\nhidden-size: 64\nnum-attention-heads: 4\nmax-position-embeddings: 32\n"
    assert not parse_file(tmp_path, shape + "bf16: true", f"{REST} --bf16=false").precision.bf16
    on = parse_file(tmp_path, shape + "disable-bias-linear: true", f"{REST} --disable-bias-linear=false")
    assert on.model.linear_bias


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num-layer: 2", "--num-layer: unknown setting (did you mean --num-layers?)"),
        ("modell: {num-layers: 2}", "'modell' is not a section (did you mean model?)"),
        ("num-layers: [1, 2]", "--num-layers 1 2: takes one value"),
        ("num-layers: true", "--num-layers true: not a whole number"),
        ("num-layers: 2.5", "--num-layers 2.5: not a whole number"),
        ("swiglu: perhaps", "--swiglu perhaps: a switch is true or false"),
        ("use-mcore-models: 3", "--use-mcore-models 3: a switch is true or false"),
        ("num-layers: 2\nnum_layers: 3", "'num_layers' is set twice"),
        ("num-layers: 2\nnum-layers: 3", "'num-layers' is set twice"),
        ("model: {num-layers: 2, hidden-size: 3, num-layers: 4}", "'num-layers' is set twice"),
        ("layernorm-epsilon: 1e-6\nnorm-epsilon: 1e-5", "contradict each other"),
        ("fp8-format: hybrid", "--fp8-format hybrid: not supported yet"),
        ("fp8-margin: 2", "--fp8-margin 2: not supported yet"),
        ("- a list", "not a mapping of settings"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_file(tmp_path, text)
    first, *_ = caught.value.lines  # the settings that the file does not give are others
    assert said in first and "run.yaml" in first and "\n" not in first


@pytest.mark.parametrize("command", [SMALL, TUTORIAL, LLAMA3], ids=["small", "tutorial", "llama3"])
def test_a_configuration_survives_dict_and_yaml(tmp_path: Path, command: str) -> None:
    config = parse_args(argv(command))
    plain = to_dict(config)
    assert from_dict(plain) == config
    assert from_dict(yaml.safe_load(yaml.safe_dump(plain))) == config
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(plain))
    assert parse_args(["--config", str(file)]) == dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, config=str(file))
    )


def test_what_only_concerns_the_launch_is_not_saved() -> None:
    plain = to_dict(parse_args(argv(SMALL, "--local-rank 3 --dry-run")))
    assert not {"local_rank", "dry_run", "print_config", "config"} & set(plain["runtime"])


def test_unknown_saved_settings_are_refused_by_name() -> None:
    plain = to_dict(RunConfig())
    plain["model"]["quantum"] = 3
    with pytest.raises(ConfigError, match=r"checkpoint: .* model.quantum = 3"):
        from_dict(plain)
    assert from_dict({"model": {"num_layers": 4}}).model.num_layers == 4


def test_adopting_the_arguments_of_a_checkpoint() -> None:
    saved: dict[str, dict[str, Any]] = to_dict(parse_args(argv(SMALL, "--swiglu --hidden-dropout 0.2")))
    rest = without(SMALL, "--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings")
    config = parse_args(argv(without(rest, "--seq-length"), "--load x --use-checkpoint-args"))
    adopted = adopt_checkpoint_args(config, saved)
    assert (adopted.model.num_layers, adopted.model.swiglu, adopted.data.seq_length) == (2, True, 32)
    assert adopted.model.hidden_dropout == 0.1, "how to train is still the command line's"
    assert adopted.origins["num_layers"] == "checkpoint"
    config = parse_args(argv(rest, "--num-layers 3 --load x --use-checkpoint-args"))
    with pytest.raises(ConfigError, match=r"--num-layers 3 \(flag\) and 2 of the checkpoint disagree"):
        adopt_checkpoint_args(config, saved)


@pytest.mark.parametrize(
    ("positions", "flags", "line"),
    [
        ("rope", "", "32 positions of the checkpoint raised to 64; the RoPE base is unchanged"),
        ("rope", "--rotary-base 20000", "32 positions of the checkpoint raised to 64"),
        ("learned_absolute", "", None),  # rejected when the weights are loaded
    ],
)
def test_raised_positions_are_reported(positions: str, flags: str, line: str | None) -> None:
    saved: dict[str, dict[str, Any]] = to_dict(parse_args(argv(SMALL, f"--position-embedding-type {positions}")))
    rest = without(SMALL, "--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings")
    raised = f"--max-position-embeddings 64 --load x --use-checkpoint-args --finetune {flags}"
    adopted = adopt_checkpoint_args(parse_args(argv(rest, raised)), saved)
    assert [notice for notice in adopted.notices if "positions of the checkpoint" in notice] == ([line] if line else [])


def test_sections_are_frozen_and_keyword_only() -> None:
    config = RunConfig()
    for name in {setting.section for setting in all_settings()}:
        section = getattr(config, name)
        assert type(section).__dataclass_params__.frozen
        assert all(field.kw_only for field in dataclasses.fields(section))
        assert hash(section) == hash(type(section)())


# ---------------------------------------------------------------- a file from a stranger

BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, r"line 2: \*a repeats a list or a section; write its values out"),
        ("a: &a {lr: 1}\noptimizer: {<<: *a}", r"\*a repeats a list or a section"),
        ("a: &a [*a]", r"\*a repeats a list or a section"),
        ("seed: " + "[" * 100_000, "line 1: nested too deeply; write settings as 'name: value'"),
        ("seed: !!int abc", "line 1: the tag tag:yaml.org,2002:int is not supported; write only the value"),
        ("seed: !!python/object/apply:os.system [ls]", "the tag .*os.system is not supported"),
        ("seed: 2024-01-01", "--seed 2024-01-01: not a whole number"),
        ("lr: 2024-13-45", "--lr 2024-13-45: not a number"),
        ("seed: " + "1" * 5000, r"line 1: 1{200}\.\.\. \(5000 characters\): out of range"),
        (
            "seed: 0x" + "1" * 5000,
            r"line 1: 0x1{198}\.\.\. \(5002 characters\) is a number in YAML-specific notation",
        ),
        ("seed: 99999999999999999999", "--seed 99999999999999999999: out of range; .* of at most 9223372036854775807$"),
        *(
            (f"seed: {number}", f"line 1: {number} is a number in YAML-specific notation; write it in decimal digits")
            for number in ("010", "0x1F", "0b11", "1_000", "1:30", "-07", "1_0.5", "1:30.5")
        ),
        ("lr: 1.0e-400", "line 1: 1.0e-400: out of range of a 64-bit number"),
        ("lr: .inf", "--lr inf: not a finite number"),
        ("? [a, b]\n: 1", "unhashable key|as a key"),
        ("checkpoint: {save: {a: 1}}", "--save: the value is a dict; give text"),
        ("seed: 1\n" + "# " + "x" * (1 << 20), "larger than 1048576 bytes"),
    ],
)
def test_a_strange_file_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        parse_file(tmp_path, text, f"{REST} {SMALL}")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_dates_and_anchored_numbers_are_what_is_written(tmp_path: Path) -> None:
    config = parse_file(tmp_path, "load: 2024-01-01\nseed: &s 7\nlog-interval: *s", f"{REST} {SMALL}")
    assert (config.checkpoint.load, config.logging.log_interval) == ("2024-01-01", 7)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--seed " + "1" * 5000, r"\(5000 characters\): out of range; .* of at most 9223372036854775807$"),
        ("--seed 9223372036854775808", "out of range; .* of at most 9223372036854775807$"),
        ("--lr " + "1" * 5000, r"\(5000 characters\): out of range of a 64-bit number"),
        ("--lr 1e-400", "--lr 1e-400: out of range of a 64-bit number"),
        *(
            (f"--seed {text}", f"--seed {text}: not a whole number")
            for text in ("3_2", "٣٢", "３２", "0x3", "1e2", "2.0")
        ),
        *((f"--lr {text}", f"--lr {text}: not a number") for text in ("1_0.5", "٣.٢", "1e1_0", "0x1p-3", "1..0", "e5")),
        *((f"--lr {text}", f"--lr {text}: not a finite number") for text in ("inf", "Infinity", "nan")),
    ],
)
def test_numbers_that_python_would_take_and_a_setting_does_not(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_args(argv(SMALL, REST, flags))


@pytest.mark.parametrize(
    ("flags", "value"), [("--seed 007", 7), ("--seed +5", 5), ("--lr .5", 0.5), ("--lr 5.", 5.0), ("--lr 1E-3", 1e-3)]
)
def test_numbers_in_other_ascii_spellings(flags: str, value: float) -> None:
    config = parse_args(argv(SMALL, REST.replace("--lr 1e-4", ""), "--lr 1e-4", flags))
    assert value in (config.training.seed, config.schedule.lr)


@pytest.mark.parametrize("pattern", ["[1]*300000000", "[1]*" + "9" * 5000, "1" * 5000, "²", "[1,0]*150000000+[1]"])
def test_expert_layers_are_counted_before_they_are_written_out(pattern: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--moe-layer-freq .*: (has [0-9]+ entries|is neither a number nor a 0/1 list)"
    ) as raised:
        parse_args(argv(SMALL, REST, f"--num-experts 2 --moe-layer-freq {pattern}"))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("setting", [s for s in all_settings() if s.base is int], ids=lambda s: s.spelling)
def test_every_whole_number_has_a_largest_value(setting: Setting) -> None:
    assert setting.largest is not None and setting.largest <= 2**63 - 1
    many = setting.flag.nargs if isinstance(setting.flag.nargs, int) else 1
    for value in (str(int(setting.largest) + 1), "9" * 30):
        with pytest.raises(ConfigError, match=f"of at most {setting.largest}|choose from"):
            parse_value(setting, [value] * many)


def test_another_programs_file_is_refused_by_an_entry_that_reads_none(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 4}')
    with pytest.raises(
        ConfigError, match=r"--deepspeed_config .*ds.json: this program does not read it; use megatron.pretrain"
    ):
        parse_args(argv(SMALL, "--deepspeed --deepspeed_config", str(file)))
