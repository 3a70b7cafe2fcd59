"""EleutherAI's harness gives the same answers on our checkpoint as its `hf` model on the export, for each kind of task.
Needs the optional package lm_eval; without it, the tests check the messages for its absence."""

from __future__ import annotations

import json
import os
import sys
import types
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.cli.harness import main, without_files
from megatron.errors import ConfigError
from tests.equivalence.test_evaluate import FAMILIES, TEXTS, Saved, make_model
from tests.unit.tokenizer.support import SAMPLES

# Read when the packages are imported: all of a task's data is here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
INSTALLED = find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not INSTALLED, reason="lm_eval is not installed")


def test_without_the_package_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in [name for name in sys.modules if name.startswith(("lm_eval.", "megatron.evaluation.harness"))]:
        if name != "megatron.cli.harness":
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        main(["--model", "megatron"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: lm_eval: the package is not installed; run `pip install lm_eval`\n"


@pytest.mark.parametrize(
    ("given", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("bfloat16", "bfloat16")]
)
def test_short_names_of_dtypes_are_known(given: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not INSTALLED:
        for module in ("", ".__main__", ".api", ".api.instance", ".api.model", ".api.registry", ".models", ".utils"):
            monkeypatch.setitem(sys.modules, f"lm_eval{module}", MagicMock(TemplateLM=object))
        monkeypatch.setitem(sys.modules, "lm_eval.models.utils", MagicMock())
        monkeypatch.delitem(sys.modules, "megatron.evaluation.harness", raising=False)
    harness = import_module("megatron.evaluation.harness")
    if not INSTALLED:
        monkeypatch.delitem(sys.modules, "megatron.evaluation.harness")
    assert harness.model_options({"load": "x", "dtype": given}).dtype == name


def test_only_the_first_rank_writes() -> None:
    words = ["--model", "megatron", "--output_path", "a", "--log_samples", "--tasks", "t"]
    assert without_files(words) == ["--model", "megatron", "--tasks", "t"]
    assert without_files(["--output_path=a", "--limit", "3"]) == ["--limit", "3"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    pytest.importorskip("transformers")
    return make_model(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])


def answers(lm: Any) -> list[Any]:
    from lm_eval.api.instance import Instance

    def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
        return [Instance(kind, {}, args, number) for number, args in enumerate(arguments)]

    pairs = [(a, b) for a in (*SAMPLES[:4], "", "for i in ", "x" * 60) for b in (" range", "\n    total", "values[i]")]
    asked = [
        (text, {"until": until, "max_gen_toks": count, "do_sample": False})
        for text in SAMPLES[:3]
        for until, count in ((["\n"], 12), (["e", " the"], 9), ([], 6))
    ]
    likely = lm.loglikelihood(requests("loglikelihood", *pairs))
    rolling = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in TEXTS)))
    return [likely, rolling, lm.generate_until(requests("generate_until", *asked))]


@needs_harness
def test_every_answer_is_that_of_its_own_model(saved: Saved) -> None:
    from lm_eval.models.huggingface import HFLM

    from megatron.evaluation.harness import MegatronLM

    threads = torch.get_num_threads()
    ours = MegatronLM(load=str(saved.native), max_length=32, batch_size=4, device="cpu")
    torch.set_num_threads(threads)
    theirs = HFLM(pretrained=str(saved.folder), device="cpu", dtype="float32", max_length=32, batch_size=1)
    assert ours.prefix_token_id == theirs.prefix_token_id
    (likely, rolling, texts), (their_likely, their_rolling, their_texts) = answers(ours), answers(theirs)
    assert [pair[0] for pair in likely] == pytest.approx([pair[0] for pair in their_likely], rel=1e-4)
    assert [pair[1] for pair in likely] == [pair[1] for pair in their_likely]
    assert rolling == pytest.approx(their_rolling, rel=1e-4)
    assert texts == their_texts


TASK = """\
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@needs_harness
def test_the_command_line_runs_a_local_task(saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, words = tmp_path / "items.jsonl", " ".join(SAMPLES).split()
    items = [
        {"context": " ".join(words[n : n + 3]), "choices": words[n + 3 : n + 6], "gold": n % 3} for n in range(0, 24, 2)
    ]
    data.write_text("\n".join(map(json.dumps, items)))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    results, threads = [], torch.get_num_threads()
    for name, model, arguments in (
        ("ours", "megatron", f"load={saved.native},max_length=32"),
        ("theirs", "hf", f"pretrained={saved.folder},dtype=float32,max_length=32"),
    ):
        out = tmp_path / name
        given = ["--model", model, "--model_args", arguments, "--tasks", "tiny", "--include_path", str(tmp_path)]
        assert main([*given, "--device", "cpu", "--output_path", str(out)]) == 0
        torch.set_num_threads(threads)
        (file,) = out.rglob("results_*.json")
        found = json.loads(file.read_text())["results"]["tiny"]
        results.append({key: value for key, value in found.items() if key.startswith("acc")})
    assert results[0] == results[1] and results[0]


# ---------------------------------------------------------------- without the package


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for what our model needs of the package to score pairs: a base class and a registry."""

    class TemplateLM:
        def __init__(self) -> None:
            self.cache_hook = types.SimpleNamespace(add_partial=lambda *given: None)

    class Refusing(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return TemplateLM if name == "TemplateLM" else lambda *given: lambda one: one

    monkeypatch.delitem(sys.modules, "megatron.evaluation.harness", raising=False)
    for name in ("", ".__main__", ".api", ".api.model", ".api.registry", ".models", ".models.utils", ".utils"):
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", Refusing(f"lm_eval{name}"))


def test_sums_and_likeliest_tokens_are_those_of_transformers(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests the parts of the harness's tasks without the package. In pairs longer than the window the last tokens
    count."""
    stand_in(monkeypatch)
    from megatron.evaluation.harness import MegatronLM

    threads, window = torch.get_num_threads(), 32
    ours = MegatronLM(load=str(saved.native), max_length=window, batch_size=4, device="cpu")
    torch.set_num_threads(threads)
    model, tokenizer = saved.theirs()
    pairs = [
        (tokenizer.encode(a), tokenizer.encode(b))
        for a in (*SAMPLES[:4], "x")
        for b in (" range", "values[i]", TEXTS[-1])
    ]
    assert any(len(a) + len(b) > window + 1 for a, b in pairs) and any(len(b) > window for _, b in pairs)
    requests = [(("", ""), a, b) for a, b in pairs]
    for (context, target), (total, greedy) in zip(pairs, ours._loglikelihood_tokens(requests), strict=True):
        tokens = [*context, *target][-(window + 1) :]
        count = min(len(target), len(tokens) - 1)
        with torch.no_grad():
            found = model(torch.tensor([tokens[:-1]])).logits[0, -count:].log_softmax(-1)
        right = torch.tensor(tokens[-count:])
        assert total == pytest.approx(found.gather(1, right[:, None]).sum().item(), rel=1e-4)
        assert greedy == bool((found.argmax(-1) == right).all())
    with pytest.raises(
        ConfigError, match="--apply_chat_template: special tokens in the harness's text would be read as plain text"
    ):
        ours.apply_chat_template([{"role": "user", "content": "x"}])
    monkeypatch.delitem(sys.modules, "megatron.evaluation.harness")
