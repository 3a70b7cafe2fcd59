"""`transformers` 4 and 5 read every exported tokenizer as the run did, for every kind and family."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.convert_checkpoint import main as convert
from megatron.config import ModelConfig, MoEConfig
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import CheckpointError
from megatron.interop.compare import open_step
from megatron.interop.hf.export import plan_export, write_export
from megatron.interop.hf.families import FAMILIES
from megatron.interop.hf.importer import open_folder
from megatron.interop.hf.tokenizer_check import PROGRAM, Expected, expected_of, first_misreading
from megatron.layout import Layout
from megatron.tokenizer.for_transformers import CONFIG, JSON, TokenizerFiles
from tests.helpers.other_programs import find_checkpoint
from tests.helpers.warm import warm_python
from tests.unit.checkpoint.test_tools import save_model
from tests.unit.tokenizer.kinds import KINDS

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[4]
ROWS = 600
PLAIN: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = PLAIN | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 24,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
NEOX = PLAIN | {"position_embedding_type": "rope", "use_parallel_residual": True}
EXPERTS = MoEConfig(num_experts=4, moe_router_topk=2)
MODELS: dict[str, tuple[dict[str, Any], MoEConfig | None]] = {
    "gpt2": (PLAIN, None),
    "gpt_neox": (NEOX, None),
    "llama": (LLAMA, None),
    "qwen2": (LLAMA | {"add_qkv_bias": True}, None),
    "qwen3": (LLAMA | {"qk_layernorm": True}, None),
    "olmo2": (LLAMA | {"qk_layernorm": True, "qk_layernorm_scope": "all", "norm_placement": "after"}, None),
    "mistral": (LLAMA | {"window_size": (7, 0)}, None),
    "mixtral": (LLAMA, EXPERTS),
    "qwen3_moe": (LLAMA | {"qk_layernorm": True}, EXPERTS),
}
assert MODELS.keys() == {family.model_type for family in FAMILIES}


ONE_OF_EACH_CLASS = ("gpt2", "llama", "qwen2", "qwen3", "mistral")
"""Types by how version 5 rebuilds their tokenizers: as GPT-2's, not, always as Qwen2's, as Qwen2's, not."""
OLD = Path(sys.prefix) / "transformers-4.57"
VERSIONS = {
    "as installed": None,
    "4.57": pytest.param(OLD, marks=pytest.mark.skipif(not OLD.is_dir(), reason="run tools/setup_environment.py")),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerFiles]:
    place = tmp_path_factory.mktemp("kinds")
    for kind, make in KINDS.items():
        (place / kind).mkdir()
        make(place / kind)
    return {kind: TokenizerFiles.of(place / kind) for kind in KINDS}


def copying(source: TokenizerFiles) -> Any:
    def save(folder: Path) -> None:
        for name in source.names:
            (folder / name).write_bytes((source.folder / name).read_bytes())

    return save


@pytest.fixture(scope="module")
def exports(kinds: dict[str, TokenizerFiles], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    """An export with weights for every family, and each kind of tokenizer beside the config.json of each family."""
    place, made = tmp_path_factory.mktemp("exports"), {}
    for model_type, (shape, moe) in MODELS.items():
        source, whole = kinds["qwen2"], place / model_type
        save_model(place / f"{model_type}-run", ModelConfig(**shape), copying(source), ROWS, moe)
        found = find_checkpoint(place / f"{model_type}-run", parallel=ParallelState.build(Layout(1), 0))
        assert found is not None
        export = plan_export(found)
        assert export.family.model_type == model_type
        write_export(export, whole, log=lambda text: None)
        made[model_type] = expected_of(source, whole, ROWS, 64, pipeline=True)
        for kind, files in kinds.items():
            if kind != "qwen2" and model_type in ONE_OF_EACH_CLASS and export.family.keeps_tokenizer(files.json(JSON)):
                folder = place / f"{model_type} {kind}"
                folder.mkdir()
                (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
                for name, content in files.portable(ROWS).items():
                    (folder / name).write_bytes(content)
                made[folder.name] = expected_of(files, folder, ROWS, 64, pipeline=False)
    return made


def ask(requests: Iterable[dict[str, Any]], version: Path | None) -> list[dict[str, Any]]:
    """Answers of one process, from the transformers in the folder `version` or the installed one."""
    python = warm_python() if version is None else sys.executable
    environment = os.environ | ({} if version is None else {"PYTHONPATH": str(version)})
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([python, str(PROGRAM)], input=lines, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
def test_every_kind_in_every_family_is_read_as_the_run_reads_it(
    exports: dict[str, Expected], version: Path | None
) -> None:
    if version is not None:  # there the class does not depend on the family
        exports = {name: one for name, one in exports.items() if name in MODELS or name.startswith("llama ")}
    answers = ask([expected.request for expected in exports.values()], version)
    assert {answer.get("version", "")[:4] for answer in answers} == {
        transformers.__version__[:4] if version is None else "4.57"
    }
    differences = {
        name: difference
        for (name, expected), answer in zip(exports.items(), answers, strict=True)
        if (difference := first_misreading(expected, answer)) is not None
    }
    assert differences == {}
    assert sum(answer["pipeline"] is not None for answer in answers) == len(MODELS)


def test_texts_that_the_vocabulary_cannot_write_are_left_out(tmp_path: Path) -> None:
    """The word vocabulary has no token for unknown words."""
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}))
    rust.save(str(tmp_path / JSON))
    assert expected_of(TokenizerFiles.of(tmp_path), tmp_path, 2, 64, pipeline=True).request["texts"] == ["a"]


# ---------------------------------------------------------------- the tool


def export(run: Path, out: Path, *more: str) -> int:
    return convert(["--load", str(run), "--to", "hf", "--save", str(out), *more])


@pytest.fixture
def run(kinds: dict[str, TokenizerFiles], tmp_path: Path) -> Path:
    """A model with Qwen2's biases and GPT-2's tokenizer."""
    save_model(tmp_path / "run", ModelConfig(**LLAMA, add_qkv_bias=True), copying(kinds["gpt2"]), ROWS)
    return tmp_path / "run"


def test_a_model_like_qwen2_keeps_another_tokenizer_as_llama(
    run: Path, kinds: dict[str, TokenizerFiles], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "hf") == 0
    printed = capsys.readouterr().out
    assert (
        "not as Qwen2ForCausalLM, whose tokenizer transformers 5.8 and later" in printed
        and "its pipeline runs" in printed
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "LlamaForCausalLM" and not model.model.layers[0].self_attn.o_proj.bias.any()
    config = open_folder(tmp_path / "hf").config
    assert config.add_qkv_bias and not config.add_bias_linear
    assert convert(["--load", str(tmp_path / "hf"), "--to", "native", "--save", str(tmp_path / "again")]) == 0
    before, after = open_step(run), open_step(tmp_path / "again")
    assert before.manifest.model.keys() == after.manifest.model.keys()
    for name, record in before.manifest.model.items():
        assert torch.equal(before.reader().logical(name, record), after.reader().logical(name, record)), name
    model.model.layers[0].self_attn.o_proj.bias.data[3] = 1.0
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"o_proj\.bias is not zero, but this project's model has no such bias"):
        open_folder(tmp_path / "hf")


def test_a_tokenizer_that_no_folder_keeps_stops_the_export(
    kinds: dict[str, TokenizerFiles], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ModelConfig(**LLAMA, add_qkv_bias=True, window_size=(7, 0))
    save_model(tmp_path / "run", shape, copying(kinds["gpt2"]), ROWS)
    assert export(tmp_path / "run", tmp_path / "hf") == 2
    error = capsys.readouterr().err
    assert "--window-size (7, 0): only Qwen2ForCausalLM" in error and "transformers 5.8 and later" in error
    assert error.count("\n") == 1 and not (tmp_path / "hf").exists()
    save_model(tmp_path / "theirs", shape, copying(kinds["qwen2"]), ROWS)
    assert export(tmp_path / "theirs", tmp_path / "hf") == 0


UNREADABLE = {
    "model_max_length": "512",
    "padding_side": None,
    "truncation_side": "up",
    "chat_template": [{"name": "a"}],
}


def test_values_that_transformers_cannot_read_are_left_out_by_name(
    kinds: dict[str, TokenizerFiles], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users cannot edit a checkpoint's files but want its model."""

    def save(folder: Path) -> None:
        copying(kinds["qwen2"])(folder)
        (folder / CONFIG).write_text(json.dumps(kinds["qwen2"].json(CONFIG) | UNREADABLE))

    save_model(tmp_path / "run", ModelConfig(**LLAMA), save, ROWS)
    assert export(tmp_path / "run", tmp_path / "hf") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokenizer_config.json: " in line]
    assert [line.partition("config.json: ")[2].partition(" is ")[0] for line in lines] == [*UNREADABLE]
    assert "is '512', but transformers requires a positive number; the exported" in lines[0]
    assert not UNREADABLE.keys() & json.loads((tmp_path / "hf" / CONFIG).read_text()).keys()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").padding_side in ("left", "right")


LENGTHS = {
    '"512"': False,
    "-5": False,
    "0": False,
    "NaN": False,
    "Infinity": False,
    "[512]": False,
    "true": False,
    "{}": False,
    "null": True,
    "512": True,
    "512.5": True,
    "1e30": True,
    "1000000000000000019884624838656": True,
}
TEMPLATES = {
    '["a"]': False,
    '[{"template": "x"}]': False,
    '[{"name": "a"}]': False,
    "5": False,
    "false": False,
    '[{"name": ["a"], "template": "x"}]': False,
    '[{"name": "a", "template": 5}]': False,
    '{"a": 5}': False,
    '"x"': True,
    "null": True,
    "[]": True,
    '[{"name": "a", "template": "x"}]': True,
    '{"a": "x"}': True,
}


@pytest.mark.parametrize(
    ("key", "text", "kept"),
    [("model_max_length", *each) for each in LENGTHS.items()]
    + [("chat_template", *each) for each in TEMPLATES.items()],
)
def test_which_values_transformers_reads(
    key: str, text: str, kept: bool, kinds: dict[str, TokenizerFiles], tmp_path: Path
) -> None:
    copying(kinds["qwen2"])(tmp_path)
    given = json.dumps(kinds["qwen2"].json(CONFIG) | {key: 0}).replace(f'"{key}": 0', f'"{key}": {text}')
    (tmp_path / CONFIG).write_text(given)
    files = TokenizerFiles.of(tmp_path)
    assert [key in line for line in files.left_out()] == ([] if kept else [True])
    assert (key in json.loads(files.portable(ROWS)[CONFIG])) == kept
    if kept:
        for name, content in files.portable(ROWS).items():
            (tmp_path / name).write_bytes(content)
        transformers.AutoTokenizer.from_pretrained(tmp_path)("hello")


def test_a_tokenizer_with_dropout_is_not_exported(
    kinds: dict[str, TokenizerFiles], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(folder: Path) -> None:
        copying(kinds["qwen2"])(folder)
        described = kinds["qwen2"].json(JSON)
        (folder / JSON).write_text(json.dumps({**described, "model": {**described["model"], "dropout": 0.1}}))

    save_model(tmp_path / "run", ModelConfig(**LLAMA), save, ROWS)
    assert export(tmp_path / "run", tmp_path / "hf") == 2
    error = capsys.readouterr().err
    assert "tokenizer.json: its model has dropout 0.1" in error and error.count("\n") == 1
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kind", ["gpt2 without an end", "llama2", "contradictions"])
def test_an_export_that_is_read_differently_leaves_nothing(
    kind: str,
    kinds: dict[str, TokenizerFiles],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted bug: files are copied unchanged, with the class that version 4 wrote."""

    def copied(files: TokenizerFiles, rows: int) -> dict[str, bytes]:
        found = {name: (files.folder / name).read_bytes() for name in files.names}
        config = {**files.json(CONFIG), "tokenizer_class": "GPT2Tokenizer"}
        return {**found, CONFIG: json.dumps(config).encode()}

    save_model(tmp_path / "run", ModelConfig(**LLAMA), copying(kinds[kind]), ROWS)
    monkeypatch.setattr(TokenizerFiles, "portable", copied)
    assert export(tmp_path / "run", tmp_path / "hf") == 12
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"transformers {transformers.__version__}" in error and error.endswith("nothing was exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folders_exported_earlier_are_checked(
    run: Path, kinds: dict[str, TokenizerFiles], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "hf"
    assert export(run, out) == 0
    for more, against in (([], "its own tokenizer.json"), (["--load", str(run)], "the tokenizer in")):
        assert convert(["--check", str(out), *more]) == 0
        assert f"compared {out} with {against}" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    assert convert(["--check", str(out)]) == 12
    assert "transformers 5.8 and later read its tokenizer as Qwen2's" in capsys.readouterr().err
    (out / "config.json").write_text(json.dumps(config))
    for name in kinds["llama3"].names:
        (out / name).write_bytes((kinds["llama3"].folder / name).read_bytes())
    assert convert(["--check", str(out)]) == 0
    assert convert(["--check", str(out), "--load", str(run)]) == 12
    assert "export it again with tools/convert_checkpoint.py --to hf" in capsys.readouterr().err


def test_what_cannot_be_checked_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for words, message in (
        (["--check", "nowhere"], "--check nowhere: no such directory"),
        (["--check", str(tmp_path / "empty")], "has no tokenizer.json"),
        (["--check", str(tmp_path), "--to", "hf", "--save", "x"], "converts nothing; remove --to, --save"),
        (["--load", str(run), "--to", "hf"], "the following arguments are required: --save"),
    ):
        assert convert(words) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
