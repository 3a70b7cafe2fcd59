"""An evaluation equals that of the exported model in `transformers`, for every form that --load takes and every layout:
sums of log-probabilities, top predictions and the number of counted tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.convert_checkpoint import main as convert
from megatron.cli.evaluate import main
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.distributed.rng import stream_seed
from megatron.evaluation import perplexity, scorer
from megatron.evaluation.run import TaskOptions, measure
from megatron.evaluation.scorer import Scorer
from megatron.evaluation.sequences import Scored
from megatron.inference.model import ModelOptions
from megatron.tokenizer.export import bpe_file_texts, write_files
from megatron.tokenizer.train import train_bpe
from tests.equivalence.test_export_from_layouts import MOE
from tests.equivalence.test_model_parallel import GPT2, LLAMA
from tests.helpers.distributed import run_ranks
from tests.helpers.other_programs import subject_of
from tests.helpers.runs import flags, make_parts, make_run
from tests.unit.tokenizer.support import SAMPLES, write_small_bpe

transformers = pytest.importorskip("transformers")

WINDOW, EQUAL = 16, 1e-5
TEXTS = (*SAMPLES, "x", "for i in range", " ".join(SAMPLES))
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "moe": MOE}


@dataclass(frozen=True)
class Saved:
    """One model in all the forms that --load takes."""

    native: Path
    folder: Path
    megatron: Path
    tokenizer: tuple[Path, Path]

    def theirs(self) -> tuple[Any, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        return model, transformers.AutoTokenizer.from_pretrained(self.folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def make(family: str) -> Saved:
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp(family), FAMILIES[family])
        return made[family]

    return make


def save_sharp(argv: list[str]) -> None:
    """Saves random weights with some words much likelier than others, so that one token more or less shows."""
    _, parts = make_parts(argv)
    with parts, torch.no_grad():
        for name, parameter in parts.engine.model.named_parameters():
            vocabulary = "word_embeddings" in name or "output_layer" in name
            generator = torch.Generator().manual_seed(stream_seed(1, name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (3.0 if vocabulary else 0.2))
        parts.checkpoints.save(parts.progress)


def make_model(place: Path, family: dict[str, Any]) -> Saved:
    vocab, merges = write_small_bpe(place)
    named = {"vocab_size": None, "vocab_file": vocab, "merge_file": merges, "make_vocab_size_divisible_by": 8}
    named["max_position_embeddings"] = 3 * WINDOW
    save_sharp(flags(**family, **named, save=place / "native", save_interval=1))
    for form in ("hf", "megatron"):
        if form == "hf" or "num_experts" not in family:
            assert convert(["--load", str(place / "native"), "--to", form, "--save", str(place / form)]) == 0
    return Saved(place / "native", place / "hf", place / "megatron", (vocab, merges))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "text.txt").write_text("\n".join(SAMPLES), encoding="utf-8")
    return tmp_path


def evaluated(load: Path, *words: Any) -> dict[str, Any]:
    """Runs the command line in this process."""
    output, threads = load.parent / "out.json", torch.get_num_threads()
    try:
        assert main(["--load", str(load), "--output", str(output), *map(str, words)]) == 0
    finally:
        torch.set_num_threads(threads)
    return json.loads(output.read_text())


@torch.no_grad()
def log_probabilities(model: Any, tokens: list[int], stride: int) -> Iterator[float]:
    """Log-probabilities of all tokens but the first. The context starts at the earliest of 0, stride, 2 stride, ...
    that leaves at most a window of tokens before the target."""
    read: dict[int, torch.Tensor] = {}
    for target in range(1, len(tokens)):
        start = ceil(max(target - WINDOW, 0) / stride) * stride
        if start not in read:
            read[start] = model(torch.tensor([tokens[start : start + WINDOW]])).logits[0].log_softmax(-1)
        yield float(read[start][target - 1 - start, tokens[target]])


@cache
def expected_perplexity(saved: Saved, texts: tuple[str, ...], stride: int, prefix: bool = False) -> dict[str, Any]:
    model, tokenizer = saved.theirs()
    total, count, words, size = 0.0, 0, 0, 0
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        tokens = [tokenizer.eos_token_id, *tokens] if prefix else tokens
        found = list(log_probabilities(model, tokens, stride))
        total, count = total - sum(found), count + len(found)
        if found:
            words, size = words + len(text.split()) - (not prefix), size + len(text.encode())
    return {
        "counted_tokens": count,
        "perplexity": exp(total / count),
        "word_perplexity": exp(total / words),
        "bits_per_byte": total / log(2) / size,
    }


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: found[name] for name in expected} == {
        name: value if isinstance(value, int) else pytest.approx(value, rel=EQUAL) for name, value in expected.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_is_that_of_transformers(family: str, models: Callable[[str], Saved], data: Path) -> None:
    saved = models(family)
    text = (data / "text.txt").read_text(encoding="utf-8")
    check(evaluated(saved.native, "--data", data / "text.txt"), expected_perplexity(saved, (text,), WINDOW))


@pytest.mark.parametrize(("stride", "prefix"), [(5, False), (WINDOW, True)])
def test_overlapping_windows_of_many_documents(
    stride: int, prefix: bool, models: Callable[[str], Saved], data: Path
) -> None:
    saved = models("llama")
    words = ["--overlapping-eval", stride, *(["--score-first-token"] if prefix else [])]
    found = evaluated(saved.folder, "--seq-length", WINDOW, "--data", data / "lines.jsonl", *words)
    check(found, expected_perplexity(saved, TEXTS, stride, prefix))


def test_every_form_of_a_checkpoint_is_the_same(models: Callable[[str], Saved], data: Path) -> None:
    saved = models("gpt2")
    vocab, merges = saved.tokenizer
    words = ["--data", data / "lines.jsonl", "--seq-length", WINDOW]
    forms = [
        evaluated(saved.native, *words),
        evaluated(saved.folder, *words),
        evaluated(saved.megatron, *words, "--vocab-file", vocab, "--merge-file", merges),
    ]
    losses = [form["loss"] for form in forms]
    assert losses[1:] == losses[:1] * 2 and len({form["counted_tokens"] for form in forms}) == 1


def test_a_tokenizer_of_another_size_is_named(
    models: Callable[[str], Saved], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint has no tokenizer of its own. More entries than the embedding has rows are rejected; fewer than
    padding explains get a warning."""
    for size, said in ((700, "700 entries; give the model's tokenizer"), (260, "260 entries; unless it is")):
        write_files(tmp_path, bpe_file_texts(train_bpe([Path(__file__).read_text()], size)))
        files = ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
        load = models("gpt2").megatron
        ended = main_code(["--load", str(load), "--data", str(data / "text.txt"), *files])
        lines = capsys.readouterr().err
        (told,) = [line for line in lines.splitlines() if str(load) in line and "rows" in line]
        assert "continuing at iteration" not in lines, "nothing goes on"
        assert ended == (2 if size == 700 else 0)
        assert re.search(rf"embedding has 486 rows, but .*fingerprint [0-9a-f]{{12}}\) has {said}", told), told


def main_code(argv: list[str]) -> int:
    threads = torch.get_num_threads()
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)
    finally:
        torch.set_num_threads(threads)


def test_tokens_on_disk_are_those_of_their_text(models: Callable[[str], Saved], data: Path) -> None:
    saved = models("gpt2")
    encode = saved.theirs()[1]
    with IndexedDatasetBuilder(str(data / "tokens"), "uint16") as builder:
        for text in TEXTS:
            builder.add_document(encode(text, add_special_tokens=False).input_ids)
    kept = ("loss", "counted_tokens", "word_perplexity", "bits_per_byte", "documents")
    of_text, of_tokens = (evaluated(saved.native, "--data", data / name) for name in ("lines.jsonl", "tokens"))
    assert [of_tokens[name] for name in kept] == [of_text[name] for name in kept]


def passages(tokenizer: Any, model: Any) -> list[str]:
    """Every second passage ends with the model's top prediction."""
    found = []
    for text in SAMPLES[:4]:
        tokens = tokenizer(text, add_special_tokens=False).input_ids[:10]
        with torch.no_grad():
            likeliest = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        found += [tokenizer.decode(tokens), tokenizer.decode([*tokens, likeliest])]
    return [text for text in found if len(text.split()) > 1]


@pytest.mark.parametrize("strict", [False, True])
def test_lambada_is_that_of_transformers(strict: bool, models: Callable[[str], Saved], tmp_path: Path) -> None:
    saved = models("llama")
    model, tokenizer = saved.theirs()
    encode = partial(tokenizer, add_special_tokens=False)
    texts = passages(tokenizer, model)
    (tmp_path / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    right, total, count = 0, 0.0, 0
    for text in texts:
        if strict:
            last = text.split()[-1]
            context = encode(text[: text.rfind(last)].strip()).input_ids
            target = encode(f" {last}").input_ids
        else:
            *context, last_token = encode(text).input_ids
            target = [last_token]
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *target[:-1]]])).logits[0, len(context) - 1 :].log_softmax(-1)
        right += logits.argmax(-1).tolist() == target
        total -= sum(float(row[token]) for row, token in zip(logits, target, strict=True))
        count += len(target)
    words = ["--task", "lambada", "--data", tmp_path / "lambada.jsonl", *(["--strict-lambada"] if strict else [])]
    found = evaluated(saved.native, "--seq-length", 32, *words)
    check(found, {"correct": right, "counted_tokens": count, "perplexity": exp(total / len(texts))})
    assert strict or right > 0, "no passage that the model ends itself"


ITEMS = [
    {"context": "The quick brown", "choices": ["fox", "fox didn't jump", "values"], "gold": 1},
    {"context": "for i in range(100):", "choices": ["\n    total", " print", "import x"], "gold": 0},
    {"context": "東京は", "choices": ["日本の首都です", "x"], "gold": 0},
    {"context": "", "choices": ["return total", "naïve façade"], "gold": 1},
]


def test_choices_are_those_of_transformers(models: Callable[[str], Saved], tmp_path: Path) -> None:
    saved = models("gpt2")
    model, tokenizer = saved.theirs()
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    plain = normalised = 0
    for item in ITEMS:
        sums = []
        for choice in item["choices"]:
            space = "" if choice[0].isspace() or not item["context"] else " "
            context = tokenizer(item["context"]).input_ids or [tokenizer.eos_token_id]
            whole = tokenizer(item["context"] + space + choice).input_ids
            target = whole[len(context) if item["context"] else 0 :]
            with torch.no_grad():
                logits = model(torch.tensor([[*context, *target]])).logits[0].log_softmax(-1)
            sums.append(sum(float(logits[len(context) - 1 + i, t]) for i, t in enumerate(target)))
        plain += sums.index(max(sums)) == item["gold"]
        means = [total / len(choice) for total, choice in zip(sums, item["choices"], strict=True)]
        normalised += means.index(max(means)) == item["gold"]
    words = ["--task", "choices", "--data", tmp_path / "items.jsonl", "--seq-length", 16, "--truncate-prompts"]
    check(evaluated(saved.native, *words), {"correct": plain, "correct_normalised": normalised, "items": 4})


# ---------------------------------------------------------------- layouts

LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "tp2 pp2": ("llama", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "pp2 dp2": ("gpt2", {"pipeline_model_parallel_size": 2}),
    "cp2 tp2": ("llama", {"context_parallel_size": 2, "tensor_model_parallel_size": 2}),
    "ep2 tp2": ("moe", {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
}


def measured(rank: int, ranks: int, models: dict[str, Saved], data: Path) -> dict[str, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    found = {}
    for name, (family, axes) in LAYOUTS.items():
        options = ModelOptions(
            load=str(models[family].native), device="cpu", batch_size=3, **(axes if ranks > 1 else {})
        )
        subject = subject_of(options, lambda c: make_run(c, rank=rank, world_size=ranks, dtype=torch.float64))
        found[name] = [measure(subject, task) for task in tasks(data)]
    return found


def tasks(data: Path) -> list[TaskOptions]:
    return [
        TaskOptions(task="perplexity", data=str(data / "lines.jsonl"), overlapping_eval=5),
        TaskOptions(task="lambada", data=str(data / "lines.jsonl"), strict_lambada=True, truncate_prompts=True),
    ]


def numbers(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[Any]]:
    kept = ("loss", "bits_per_byte", "counted_tokens", "accuracy", "perplexity")
    return {name: [one[key] for one in results for key in kept if key in one] for name, results in found.items()}


@pytest.fixture
def several(models: Callable[[str], Saved], tmp_path: Path) -> tuple[dict[str, Saved], Path]:
    texts = [text for text in TEXTS if len(text.split()) > 1]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {family: models(family) for family in FAMILIES}, tmp_path


def test_every_layout_equals_one_process(several: tuple[dict[str, Saved], Path]) -> None:
    saved, data = several
    alone = numbers(measured(0, 1, saved, data))
    for found in run_ranks(4, lambda rank: measured(rank, 4, saved, data), timeout=120):
        for name, values in numbers(found).items():
            assert values == pytest.approx(alone[name], rel=1e-10), name


# ---------------------------------------------------------------- planted


def one_token_more(rows: Any) -> Any:
    """Planted bug: scores the last token of the context, too."""
    return [Scored(row.tokens, max(row.first - 1, 1)) for row in rows]


def without_the_last(rows: Any) -> Any:
    return [Scored(row.tokens[:-1], row.first) if row.count > 1 else row for row in rows]


def without_context(rows: Any) -> Any:
    return [Scored(row.tokens[row.first - 1 :], 1) for row in rows]


@pytest.mark.parametrize("mistake", [one_token_more, without_the_last, without_context])
def test_a_wrong_window_is_seen(
    mistake: Any, models: Callable[[str], Saved], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = models("llama")
    cut = perplexity.windows
    monkeypatch.setattr(perplexity, "windows", lambda *how: mistake(list(cut(*how))))
    with pytest.raises(AssertionError):
        found = evaluated(saved.native, "--data", data / "lines.jsonl", "--overlapping-eval", 5)
        check(found, expected_perplexity(saved, TEXTS, 5))


def shifted(batch_of: Callable[..., Any], self: Any, *how: Any) -> Any:
    batch = batch_of(self, *how)
    return {**batch, "wanted": batch["wanted"].roll(1, 1)}


def read_by_another_row(batch_of: Callable[..., Any], self: Any, *how: Any) -> Any:
    batch = batch_of(self, *how)
    return {**batch, "tokens": batch["tokens"].roll(1, 0)}


@pytest.mark.parametrize("mistake", [shifted, read_by_another_row])
def test_a_wrong_batch_is_seen(
    mistake: Any, models: Callable[[str], Saved], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, right = models("gpt2"), Scorer._batch
    monkeypatch.setattr(Scorer, "_batch", lambda self, *how: mistake(right, self, *how))
    with pytest.raises(AssertionError):
        found = evaluated(saved.native, "--data", data / "lines.jsonl")
        check(found, expected_perplexity(saved, TEXTS, WINDOW))


@pytest.mark.parametrize("mistake", ["no sum", "fillers count"])
def test_a_wrong_sum_over_ranks_is_seen(
    mistake: str, several: tuple[dict[str, Saved], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, data = several
    monkeypatch.setattr("tests.equivalence.test_evaluate.LAYOUTS", {"dp2": ("gpt2", {})})
    alone = numbers(measured(0, 1, saved, data))
    if mistake == "no sum":
        monkeypatch.setattr(scorer, "all_reduce", lambda totals, axis: totals)
    else:
        turns = Scorer._turns
        monkeypatch.setattr(Scorer, "_turns", lambda self, rows: [(turn * 2)[:2] for turn in turns(self, rows)])
    results = run_ranks(2, lambda rank: measured(rank, 2, saved, data))
    assert any(numbers(found)["dp2"] != pytest.approx(alone["dp2"], rel=1e-10) for found in results)
