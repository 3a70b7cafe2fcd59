"""Generation compared with transformers: equal greedy tokens and filters, and no dependence on the batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import ConfigError
from megatron.inference.beams import beam_search
from megatron.inference.generate import generate
from megatron.inference.sampling import Sampling, keep_top_k, keep_top_p
from megatron.interop.hf.export import plan_export, write_export
from megatron.model import GPT
from tests.equivalence.test_hf_export import CASES, model, plan, save_random

transformers = pytest.importorskip("transformers")


def our_model(directory: Path, case: str, **changes: Any) -> GPT:
    from megatron.inference.restore import restore_model

    save_random(directory, model(**CASES[case][1] | changes))
    return restore_model(plan(directory).reader, dtype=torch.float64, device=torch.device("cpu"))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 61, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("case", ["gpt2", "llama llama3 scaling", "mistral", "qwen3"])
def test_greedy_equals_transformers_token_for_token(tmp_path: Path, case: str) -> None:
    ours = our_model(tmp_path / "native", case)
    write_export(plan_export(_found(tmp_path / "native")), tmp_path / "hf", log=lambda text: None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    prompt = prompts(7)[0]
    expected = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, 7:]
    assert list(generate(ours, [prompt], max_new_tokens=40)[0].tokens) == expected.tolist()


def _found(directory: Path) -> Any:
    from megatron.distributed.parallel_state import ParallelState
    from megatron.layout import Layout
    from tests.helpers.other_programs import find_checkpoint

    return find_checkpoint(directory, parallel=ParallelState.build(Layout(1), 0))


@pytest.mark.parametrize("case", ["gpt2", "mistral"])
def test_cache_and_full_forward_agree(tmp_path: Path, case: str) -> None:
    ours = our_model(tmp_path, case)
    prompt = prompts(5)[0]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(30):
            tokens.append(int(ours(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(generate(ours, [prompt], max_new_tokens=30)[0].tokens) == tokens[5:]


@pytest.mark.parametrize("sampling", [Sampling(greedy=True), Sampling(top_k=20, top_p=0.9, temperature=0.8, seed=5)])
def test_a_prompt_gives_the_same_beside_others(tmp_path: Path, sampling: Sampling) -> None:
    ours = our_model(tmp_path, "llama gqa")
    first, *others = prompts(9, 3, 14)
    alone = generate(ours, [first], max_new_tokens=12, sampling=sampling)[0]
    together = generate(ours, [first, *others], max_new_tokens=12, sampling=sampling)
    assert together[0] == alone
    assert [len(found.tokens) for found in together] == [12, 12, 12]


def test_seed_decides_and_another_seed_differs(tmp_path: Path) -> None:
    ours = our_model(tmp_path, "llama")
    prompt = prompts(4)
    draws = [
        generate(ours, prompt, max_new_tokens=20, sampling=Sampling(seed=seed, temperature=2.0)) for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_stops_at_the_end_of_the_document(tmp_path: Path) -> None:
    ours = our_model(tmp_path, "llama")
    prompt = prompts(4)
    free = generate(ours, prompt, max_new_tokens=20)[0].tokens
    eod = free[6]
    stopped = generate(ours, prompt, max_new_tokens=20, eod_id=eod)[0]
    assert stopped.finish == "eos" and stopped.tokens == free[: free.index(eod)]


def test_every_token_is_told_as_soon_as_it_is_known(tmp_path: Path) -> None:
    """The end of document is not passed to the callback; an exception from the callback ends the generation."""
    ours, rows = our_model(tmp_path, "llama").train(), prompts(4, 7)
    told: list[tuple[int, int]] = []

    def of_row(row: int) -> tuple[int, ...]:
        return tuple(token for told_row, token in told if told_row == row)

    free = generate(ours, rows, max_new_tokens=9, on_token=lambda row, token: told.append((row, token)))
    assert [of_row(0), of_row(1)] == [one.tokens for one in free]
    assert sorted(row for row, _ in told[:2]) == [0, 1], "both from the first step on"
    told.clear()
    eod = free[1].tokens[3]
    cut = generate(ours, rows, max_new_tokens=9, eod_id=eod, on_token=lambda row, token: told.append((row, token)))
    assert cut[1].finish == "eos" and [of_row(0), of_row(1)] == [one.tokens for one in cut]

    def enough(row: int, token: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(ours, rows, on_token=enough)
    assert ours.training


def test_generation_leaves_the_model_in_its_mode(tmp_path: Path) -> None:
    ours = our_model(tmp_path, "gpt2", hidden_dropout=0.5).train()
    first = generate(ours, prompts(4), max_new_tokens=5)
    assert ours.training and first == generate(ours, prompts(4), max_new_tokens=5)


def test_a_prompt_has_its_own_room_beside_a_longer_one(tmp_path: Path) -> None:
    ours, rows = our_model(tmp_path, "gpt2"), prompts(3, 90, 50)
    for continued in (generate, partial(beam_search, num_beams=2)):
        alone = [continued(ours, [row])[0].tokens for row in rows]
        assert [len(tokens) for tokens in alone] == [64, 6, 46]
        assert [one.tokens for one in continued(ours, rows)] == alone


def test_a_search_that_is_done_leaves_no_row_behind(tmp_path: Path) -> None:
    """Uses one beam, where the shape of an extra row would silently broadcast."""
    ours, rows = our_model(tmp_path, "llama"), prompts(9, 3, 14)
    ends = {generate(ours, [row], max_new_tokens=9)[0].tokens[at] for row, at in zip(rows, (2, 6, 8), strict=True)}
    searched = partial(beam_search, ours, num_beams=1, max_new_tokens=12, eod_id=ends)
    alone = [searched([row])[0] for row in rows]
    assert len({len(one.tokens) for one in alone}) > 1, "some go on while others are done"
    assert searched(rows) == alone


def test_too_long_is_refused_and_the_default_fits(tmp_path: Path) -> None:
    ours = our_model(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match=r"--prompt: 96 tokens, but the model has 96 positions"):
        generate(ours, prompts(96))
    with pytest.raises(ConfigError, match=r"--max-new-tokens 20: .* leave room for 6"):
        generate(ours, prompts(90), max_new_tokens=20)
    with pytest.raises(ConfigError, match="--max-new-tokens 0"):
        generate(ours, prompts(4), max_new_tokens=0)
    with pytest.raises(ConfigError, match="empty prompt"):
        generate(ours, [[]])


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"temperature": 0.0}, "--temperature 0.0"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 1.5}, "--top-p 1.5"),
    ],
)
def test_impossible_sampling_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Sampling(**settings)


@pytest.mark.parametrize("count", [1, 5, 40, 100])
def test_top_k_equals_transformers(count: int) -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(count)).double()
    expected = transformers.TopKLogitsWarper(count)(None, logits.clone())
    assert torch.equal(keep_top_k(logits, count), expected)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999])
def test_top_p_equals_transformers(share: float) -> None:
    logits = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).double()
    expected = transformers.TopPLogitsWarper(share)(None, logits.clone())
    assert torch.equal(keep_top_p(logits, share), expected)


def test_filters_together_in_the_order_of_transformers() -> None:
    logits = 3 * torch.randn(6, 40, generator=torch.Generator().manual_seed(2))
    expected = logits.clone()
    for warper in (
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(12),
        transformers.TopPLogitsWarper(0.8),
    ):
        expected = warper(None, expected)
    assert torch.equal(Sampling(temperature=0.7, top_k=12, top_p=0.8).filtered(logits), expected)
