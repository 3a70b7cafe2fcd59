"""Generated texts equal those of the exported model in `transformers`, token for token: every family and layout, beams,
batches of prompts of different lengths. Planted mistakes in caches and ranks are found."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError, MegatronError
from megatron.inference import decoder as decoders
from megatron.inference import packed
from megatron.inference.answers import Answers, Prompt, Wanted
from megatron.inference.beams import beam_search
from megatron.inference.decoder import Decoder
from megatron.inference.generate import generate
from megatron.inference.model import ModelOptions
from megatron.inference.restore import restore_model
from megatron.inference.sampling import Sampling
from megatron.interop.hf.export import write_export
from megatron.model import GPT
from megatron.model.kv_cache import SPARE, KVCache
from megatron.model.linear import Linear
from tests.equivalence.test_evaluate import FAMILIES, Saved, make_model
from tests.equivalence.test_hf_export import CASES, model, plan, save_random
from tests.helpers.distributed import run_ranks
from tests.helpers.other_programs import subject_of
from tests.helpers.runs import generate_here, make_run

transformers = pytest.importorskip("transformers")

EOD = 5
LENGTHS = (7, 30, 1, 7, 18)  # the longest is more than a window of 20
COUNT = 40
"""Length beyond the window, and beyond the point where a window's cache first drops something."""


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(6, 61, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[GPT, Any]]:
    """Our model and theirs, in fp64, with weights of std 0.2."""
    made: dict[str, tuple[GPT, Any]] = {}

    def make(case: str) -> tuple[GPT, Any]:
        if case not in made:
            place = tmp_path_factory.mktemp("model")
            save_random(place / "native", model(**CASES[case][1] | {"max_position_embeddings": 128}))
            export = plan(place / "native")
            write_export(export, place / "hf", log=lambda text: None)
            load = transformers.AutoModelForCausalLM.from_pretrained
            ours = restore_model(export.reader, dtype=torch.float64, device=torch.device("cpu"))
            made[case] = ours, load(place / "hf", dtype=torch.float64)
        return made[case]

    return make


def theirs_of(model: Any, prompt: Sequence[int], **how: Any) -> tuple[list[int], Any]:
    how = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | how
    found = model.generate(torch.tensor([prompt]), return_dict_in_generate=True, output_logits=True, **how)
    return found.sequences[0, len(prompt) :].tolist(), found


CASES_HERE = ("gpt2", "neox", "llama gqa", "llama mqa tied", "mistral", "qwen3", "olmo2 gqa", "gpt2 qk layer scaling")


@pytest.mark.parametrize("case", CASES_HERE)
def test_a_batch_of_different_lengths_is_that_of_transformers(case: str, pair: Any) -> None:
    ours, theirs = pair(case)
    asked = prompts(*LENGTHS)
    found = generate(ours, asked, max_new_tokens=COUNT, logprobs=True)
    for prompt, one in zip(asked, found, strict=True):
        tokens, full = theirs_of(theirs, prompt)
        assert list(one.tokens) == tokens
        expected = [float(step[0].log_softmax(-1)[token]) for step, token in zip(full.logits, tokens, strict=True)]
        assert one.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("case", "beams", "penalty"), [("gpt2", 2, 1.0), ("gpt2", 4, 0.0), ("mistral", 3, 2.0), ("mistral", 3, -1.0)]
)
def test_beams_are_those_of_transformers(case: str, beams: int, penalty: float, pair: Any) -> None:
    ours, theirs = pair(case)
    asked = prompts(7, 30, 1)
    for eod in (None, EOD, [EOD, 9]):
        found = beam_search(ours, asked, num_beams=beams, length_penalty=penalty, max_new_tokens=25, eod_id=eod)
        for prompt, one in zip(asked, found, strict=True):
            how = {"num_beams": beams, "length_penalty": penalty, "max_new_tokens": 25, "eos_token_id": eod}
            tokens, full = theirs_of(theirs, prompt, output_scores=True, **how)
            ends = [] if eod is None else [eod] if isinstance(eod, int) else eod
            cut = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
            assert list(one.tokens) == tokens[:cut]
            assert one.score == pytest.approx(float(full.sequences_scores[0]), rel=1e-5)


# ---------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    return {family: make_model(tmp_path_factory.mktemp(family), FAMILIES[family]) for family in FAMILIES}


TEXTS = ("for i in range", "x", "The quick", "return total")
WAYS = {
    "greedy": Wanted(sampling=Sampling(greedy=True), max_new_tokens=9, logprobs=True),
    "drawn": Wanted(sampling=Sampling(temperature=1.5, top_k=50, top_p=0.95), max_new_tokens=9, logprobs=True),
    "beams": Wanted(sampling=Sampling(greedy=True), max_new_tokens=6, num_beams=3),
}
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "tp2": ("gpt2", {"tensor_model_parallel_size": 2}),
    "pp2": ("llama", {"pipeline_model_parallel_size": 2}),
    "tp2 pp2": ("llama", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "ep2 tp2": ("moe", {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}),
}


def texts_of(rank: int, ranks: int, saved: dict[str, Saved], names: Sequence[str]) -> dict[str, list[Any]]:
    torch.set_num_threads(1)
    found = {}
    for name in names:
        family, axes = LAYOUTS[name]
        options = ModelOptions(
            load=str(saved[family].native), device="cpu", batch_size=3, **(axes if ranks > 1 else {})
        )
        subject = subject_of(options, lambda c: make_run(c, rank=rank, world_size=ranks, dtype=torch.float64))
        asked = [Prompt(text, tuple(subject.tokenizer.tokenize(text))) for text in TEXTS]
        answers = Answers(subject)
        for way, wanted in WAYS.items():
            found[f"{name} {way}"] = [
                (one.text, one.tokens, one.finish, one.logprobs or (), one.score) for one in answers.to(asked, wanted)
            ]
    return found


def assert_same(found: dict[str, list[Any]], alone: dict[str, list[Any]]) -> None:
    for name, answers in found.items():
        for one, other in zip(answers, alone[name], strict=True):
            assert one[:3] == other[:3], name
            assert one[3] == pytest.approx(other[3], abs=1e-9) and one[4] == pytest.approx(other[4], abs=1e-9), name


def test_every_layout_equals_one_process(saved: dict[str, Saved]) -> None:
    alone = texts_of(0, 1, saved, list(LAYOUTS))
    for found in run_ranks(4, lambda rank: texts_of(rank, 4, saved, list(LAYOUTS)), timeout=240):
        assert_same(found, alone)


# ---------------------------------------------------------------- the command line


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_command_line_is_transformers_for_every_form(
    saved: dict[str, Saved], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = saved["llama"]
    theirs, tokenizer = one.theirs()
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"ask": text}) + "\n" for text in TEXTS))
    words = ["--prompts", file, "--json-key", "ask", "--max-new-tokens", 12, "--greedy", "--batch-size", 3]
    assert generate_here("--load", one.folder, *words, "--output", out, "--logprobs", "--dtype", "float32") == 0
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    for text, entry in zip(TEXTS, entries, strict=True):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        expected, _ = theirs_of(theirs, tokens, max_new_tokens=12, eos_token_id=tokenizer.eos_token_id)
        assert entry["tokens"] == [token for token in expected if token != tokenizer.eos_token_id]
        assert entry["prompt"] == text and entry["text"] == tokenizer.decode(entry["tokens"])
        assert len(entry["logprobs"]) == len(entry["tokens"])
    vocab, merges = one.tokenizer
    shown = [f"{entry['prompt']}{entry['text']}".split("\n") for entry in entries]
    for load in ((one.native,), (one.megatron, "--vocab-file", vocab, "--merge-file", merges)):
        capsys.readouterr()
        assert generate_here("--load", *load, *words) == 0
        assert lines_of(capsys) == [line for text in shown for line in "\n".join(text).splitlines()]


def test_a_hugging_face_model_begins_and_ends_as_in_transformers(saved: dict[str, Saved], tmp_path: Path) -> None:
    """Generation begins with the tokenizer's prefix and stops at any end that the model's files name."""
    folder, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(saved["llama"].folder, folder)
    redraw(folder, std=0.2)
    begin = json.loads((folder / "tokenizer.json").read_text())
    tokens = {"B": {"id": "B", "ids": [7], "tokens": ["B"]}}
    single = [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    begin["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(begin))
    words = ["--load", folder, "--max-new-tokens", 20, "--greedy", "--output", out]

    def ours(*more: str) -> list[int]:
        assert generate_here(*words, *more, "--dtype", "float32") == 0
        return list(json.loads(out.read_text())["tokens"])

    def theirs(special: bool = True, text: str = TEXTS[0]) -> list[int]:
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids
        assert (ids[0, 0] == 7) == special
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return list(model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist())

    assert ours("--prompt", "") == theirs(text=""), "an empty prompt begins at the first token"
    words += ["--prompt", TEXTS[0]]
    free = theirs()
    assert ours() == free != theirs(special=False), "the beginning shows in what follows"
    early = free[6]
    late = next(token for token in free[7:] if token not in free[:7])
    for ends in ([early, late], [late, early]):  # a single end would stop it elsewhere
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        cut = theirs()
        assert cut[-1] == early and len(cut) < 20 and ours() == cut[:-1]


def redraw(folder: Path, *, std: float) -> None:
    """Redraws the weights so that every prompt token counts; with those of `saved` only the last one or two do."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * std + (weight.dim() == 1))
    model.save_pretrained(folder)


def test_a_single_text_is_streamed_and_stops(saved: dict[str, Saved], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--load", saved["llama"].native, "--prompt", TEXTS[0], "--greedy", "--max-new-tokens", 30, "--ignore-eod"]
    assert generate_here(*words) == 0
    whole = capsys.readouterr().out.removesuffix("\n").removeprefix(TEXTS[0])
    stop = whole[6:10]  # over the border of tokens, wherever it is
    capsys.readouterr()
    assert generate_here(*words, "--stop", "never said", "--stop", stop) == 0
    assert capsys.readouterr().out == f"{TEXTS[0]}{whole[: whole.index(stop)]}\n"


# ---------------------------------------------------------------- planted


def one_off(cache: KVCache, kept: Tensor, new: Tensor) -> Tensor:
    """Planted bug: writes over the last token."""
    cache._used -= (shift := int(cache._used > 0))
    try:
        return EXTEND(cache, kept, new)
    finally:
        cache._used += shift


def padding_attended(cache: KVCache, lengths: Sequence[int]) -> Any:
    parts = PROMPTS(cache, lengths)
    cache._own = None
    return parts


def positions_of_the_longest(self: Decoder, asked: Sequence[Sequence[int]], count: int) -> Tensor | None:
    logits = READ(self, asked, count)
    self._positions.fill_(max(map(len, asked)))
    return logits


def kept_short(cache: KVCache) -> int:
    """Planted bug: the window begins a token late."""
    return FIRST(cache) + 1 if FIRST(cache) else 0


EXTEND, PROMPTS, READ, FIRST = KVCache._extend, KVCache.prompts, Decoder.read, KVCache._first
PLANTED: dict[str, tuple[str, type[Any], str, Any]] = {
    "a cache written one position off": ("llama gqa", KVCache, "_extend", one_off),
    "padding attended": ("llama gqa", KVCache, "prompts", padding_attended),
    "positions of the longest prompt": ("gpt2", Decoder, "read", positions_of_the_longest),
    "a window begun late": ("mistral", KVCache, "_first", kept_short),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_mistake_of_the_cache_is_seen(name: str, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, owner, attribute, mistake = PLANTED[name]
    monkeypatch.setattr(owner, attribute, mistake)
    with pytest.raises((AssertionError, RuntimeError)):
        test_a_batch_of_different_lengths_is_that_of_transformers(case, pair)


def test_memory_that_nobody_wrote_is_never_read(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in unwritten memory would show, because zero times NaN is NaN."""
    ours, _ = pair("llama gqa")
    expected = generate(ours, prompts(*LENGTHS), max_new_tokens=5)
    make = GPT.make_cache

    def poisoned(self: GPT, *how: Any) -> KVCache:
        cache = make(self, *how)
        for kept in (*cache.keys.values(), *cache.values.values()):
            kept.fill_(torch.nan)
        return cache

    monkeypatch.setattr(GPT, "make_cache", poisoned)
    assert generate(ours, prompts(*LENGTHS), max_new_tokens=5) == expected


def test_a_cache_has_the_size_that_was_said_and_must_fit(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for case, slots in (("llama gqa", 1000), ("mistral", 19 + SPARE)):
        ours, _ = pair(case)
        cache = ours.make_cache(3, 1000)
        assert cache.nbytes == ours.cache_bytes(3, 1000) == 2 * 2 * 3 * slots * 2 * 8 * 8
    monkeypatch.setattr(decoders, "available_memory", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"--batch-size 1: keys and values of 1 x 100 tokens take 0 MiB"):
        generate(ours, [[1] * 91], max_new_tokens=10)


def test_a_rank_that_draws_for_itself_is_seen(saved: dict[str, Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = texts_of(0, 1, saved, ["tp2"])
    seeds = Sampling.seeds

    def planted(rank: int) -> dict[str, list[Any]]:
        monkeypatch.setattr(decoders, "broadcast", lambda tensor, axis, source: tensor)
        monkeypatch.setattr(Decoder, "decides", True)
        monkeypatch.setattr(Sampling, "seeds", lambda self, asked: [seed + rank for seed in seeds(self, asked)])
        return texts_of(rank, 2, saved, ["tp2"])

    results = run_ranks(2, planted)
    with pytest.raises(AssertionError):
        for found in results:
            assert_same(found, alone)


def test_an_error_of_the_rank_that_decides_is_one_of_all_ranks(saved: dict[str, Saved]) -> None:
    """The other ranks raise as well instead of waiting for tokens."""

    def planted(rank: int) -> str:
        torch.set_num_threads(1)
        options = ModelOptions(load=str(saved["gpt2"].native), device="cpu", tensor_model_parallel_size=2)
        subject = subject_of(options, lambda c: make_run(c, rank=rank, world_size=2))
        decoder = Decoder(subject.model, subject.passes, subject.run.parallel)

        def decide(logits: Tensor) -> Tensor:
            raise RuntimeError("a bug")

        with torch.inference_mode(), pytest.raises((RuntimeError, MegatronError)) as raised:
            decoder.decided(decoder.read([[7, 8]], 1), decide, (1, 1))
        return str(raised.value)

    assert run_ranks(2, planted) == ["a bug", "rank 0 chooses the tokens and failed; see its error"]


# ---------------------------------------------------------------- packed weights


def test_packed_weights_compute_the_same(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair("llama gqa")
    single, asked = copy.deepcopy(ours).float(), prompts(*LENGTHS)
    monkeypatch.setattr(packed, "_LARGE", 0)
    with torch.no_grad(), packed.packed_weights(single):
        assert all(module.packed is not None for module in single.modules() if isinstance(module, Linear))
        tokens = torch.tensor(asked[:1])
        torch.testing.assert_close(single(tokens), ours(tokens).float(), rtol=1e-4, atol=1e-4)
        beside = generate(single, asked, max_new_tokens=8)
    assert not any(module.packed is not None for module in single.modules() if isinstance(module, Linear))
    assert beside == generate(single, asked, max_new_tokens=8)


def test_packed_copies_that_do_not_fit_are_left_out(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(packed, "available_memory", lambda: 1000)
    single = copy.deepcopy(pair("gpt2")[0]).float()
    with packed.packed_weights(single, said.append):
        held = single.head_and_loss.packed
        assert held is None or held._copy is None, "the kernel for a few rows needs none"
    assert len(said) == 1 and "not enough for packed copies" in said[0]
