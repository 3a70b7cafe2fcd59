"""Validation during training: every layout reports the numbers of one process, every evaluation reads the same samples,
and training stays the same bit for bit."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.cli.evaluate import main
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.distributed.rng import get_rng_state
from megatron.tokenizer import Tokenizer, TokenizerSettings, build_tokenizer
from megatron.training.batches import BatchMaker
from megatron.training.hooks import Hook
from megatron.training.metrics import EvalRecord, TrainRecord
from tests.equivalence.test_model_parallel import GPT2, LLAMA, SP, layout
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, samples_of_evaluations
from tests.unit.tokenizer.support import SAMPLES, write_small_bpe

LENGTH = 16
MOE = {**LLAMA, "num_experts": 4, "moe_ffn_hidden_size": 24}
SETS = {"wiki": 7, "code": 5}
"""Number of samples of each, which neither a batch of 4 nor the ranks divide."""
PART = ("wiki=5", "code=3")


def tokenizer_in(place: Path) -> Tokenizer:
    files = TokenizerSettings(vocab_file=str(place / "vocab.json"), merge_file=str(place / "merges.txt"))
    return build_tokenizer(files, announce=False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of text with ends of documents: a training set and two validation sets."""
    place = tmp_path_factory.mktemp("corpus")
    write_small_bpe(place)
    tokenizer = tokenizer_in(place)
    documents = [tokenizer.tokenize(text) for text in SAMPLES]
    stream = np.array([index for ids in documents * 20 for index in (*ids, tokenizer.eod)])
    begin = 0
    for name, samples in (("train", 40), *SETS.items()):
        with IndexedDatasetBuilder(str(place / name), np.uint16) as builder:
            ids = stream[begin : begin + samples * LENGTH + 9]  # the last tokens fill no sample
            for document in np.split(ids, np.flatnonzero(ids == tokenizer.eod) + 1):
                if len(document):
                    builder.add_document(document.astype(np.uint16), None)
        begin += len(ids)
    return place


def command(corpus: Path, **changes: Any) -> list[str]:
    data = {
        "mock_data": None,
        "vocab_size": None,
        "vocab_file": corpus / "vocab.json",
        "merge_file": corpus / "merges.txt",
        "train_data_path": corpus / "train",
        "valid_data_path": [corpus / name for name in SETS],
        "multiple_validation_sets": True,
        "validation_set_names": list(SETS),
        "eval_iters": 1,
        "eval_interval": 2,
        "global_batch_size": 8,
        "train_iters": 4,
        "make_vocab_size_divisible_by": 8,
    }
    return flags(**{**data, **changes})


class Watch(Hook):
    """Keeps reported numbers in all digits."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.evaluations: list[tuple[int, str, float, int, int | None]] = []

    def on_step(self, record: TrainRecord, times: Any) -> None:
        self.steps.append((record.lm_loss, record.grad_norm))

    def on_evaluate(self, record: EvalRecord) -> None:
        found = record.lm_loss, record.counted_tokens, record.counted_bytes
        self.evaluations.append((record.iteration, record.split, *found))


# ---------------------------------------------------------------- any layout


def validated(rank: int, ranks: int, commands: list[list[str]]) -> list[list[tuple[Any, ...]]]:
    torch.set_num_threads(1)
    found = []
    for argv in commands:
        watch = Watch()
        _, parts = make_parts(argv, [watch], rank=rank, world_size=ranks, dtype=torch.float64)
        with parts:
            parts.evaluator.valid(parts.progress, "here")
        found.append(watch.evaluations)
    return found


LAYOUTS: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    2: [(LLAMA, {"zero_stage": 3}), (MOE, {"expert_model_parallel_size": 2})],
    4: [
        (GPT2, {}),
        (GPT2, layout(tp=2, **SP)),
        (GPT2, layout(pp=2)),
        (LLAMA, {"context_parallel_size": 2}),
        (LLAMA, layout(tp=2, pp=2)),
        (MOE, layout(pp=2, expert_model_parallel_size=2)),
    ],
}
WAYS: tuple[dict[str, Any], ...] = (
    {"full_validation": True, "micro_batch_size": 2},
    {"validation_samples": PART},
    {"validation_samples": ["wiki=1"], "full_validation": True},  # fewer than there are ranks
)


def cases(ranks: int, corpus: Path, *, split: bool) -> list[list[str]]:
    ways = [(family, axes if split else {}, way) for family, axes in LAYOUTS[ranks] for way in WAYS]
    return [command(corpus, **{**family, "num_layers": 2, **axes, **way}) for family, axes, way in ways]


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_gives_the_numbers_of_one_process(ranks: int, corpus: Path) -> None:
    """Counts tokens and bytes as well: none twice, and none of a padding sample."""
    alone = validated(0, 1, cases(ranks, corpus, split=False))
    for number, (wiki, code) in enumerate(alone):
        assert (wiki[3] // LENGTH, code[3] // LENGTH) == [(7, 5), (5, 3), (1, 5)][number % len(WAYS)]
        assert wiki[4] and code[4]
    for found in run_ranks(ranks, validated, ranks, cases(ranks, corpus, split=True), timeout=120):
        for ours, expected in zip(found, alone, strict=True):
            for (_, split, loss, *counted), (_, name, right, *count) in zip(ours, expected, strict=True):
                assert (split, counted) == (name, count)
                assert abs(loss - right) < 1e-10 * right


# ---------------------------------------------------------------- training goes on as without it

MIXTURE: dict[str, Any] = {
    **MOE,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "optimizer": "adam",
    "lr_decay_style": "cosine",
}
NONE = {"eval_iters": 0, "multiple_validation_sets": None, "validation_set_names": None}


class Draws(Hook):
    """Planted bug: validation draws a random number."""

    def on_evaluate(self, record: EvalRecord) -> None:
        torch.rand(1)


def flat(state: dict[str, Any]) -> Iterator[Any]:
    for value in state.values():
        yield from flat(value) if isinstance(value, dict) else (value,)


def trained(rank: int, argv: list[str], plant: str | None) -> str:
    """Digest of all training state: losses, samples, weights, moments, routers, random states, progress."""
    watch = Watch()
    _, parts = make_parts(argv, [watch, *([Draws()] if plant == "draws" else [])], rank=rank, world_size=4)
    seen: list[list[int]] = []
    with parts:
        step = parts.engine.train_step

        def watched(batches: Any, **options: Any) -> Any:
            seen.extend(batch["sample_ids"].tolist() for batch in batches)
            return step(batches, **options)

        parts.engine.train_step = watched
        if plant == "dropout":
            parts.engine.model.eval = lambda: parts.engine.model
        if plant == "data":
            valid = parts.evaluator.valid
            parts.evaluator.valid = lambda *given: (next(parts.trainer.train_batches), valid(*given))[1]
        parts.trainer.fit()
        progress = parts.progress
        random = [value.tolist() if torch.is_tensor(value) else value for value in flat(get_rng_state())]
        content = [watch.steps, seen, progress.consumed_train_samples, progress.schedule_samples, random]
        tensors = [*parts.engine.model.named_parameters(), *parts.engine.model.named_buffers()]
        state = [tensor for kinds in parts.engine.optimizer.state().values() for tensor in kinds.values()]
        content += [tensor.detach().tolist() for tensor in (*(tensor for _, tensor in tensors), *state)]
        assert bool(watch.evaluations) == ("--multiple-validation-sets" in argv)
    return hashlib.sha256(pickle.dumps(content)).hexdigest()


PLANTS = ("draws", "dropout", "data")


def with_and_without(rank: int, plain: list[str], argv: list[str]) -> list[str]:
    torch.set_num_threads(1)
    return [trained(rank, plain, None), trained(rank, argv, None), *(trained(rank, argv, plant) for plant in PLANTS)]


def test_training_is_bit_equal_with_and_without(corpus: Path) -> None:
    """Dropout, experts with router biases that steps move, TP 2 x PP 2. Planted bugs in validation are found: a random
    number that it draws, dropout left on, a batch taken from training."""
    run = {**MIXTURE, **layout(tp=2, pp=2), "eval_interval": 1, "train_iters": 2, "num_layers": 2}
    argv = command(corpus, **{**run, "full_validation": True})
    plain = command(corpus, **{**run, **NONE})
    for rank, (without, validated, *planted) in enumerate(run_ranks(4, with_and_without, plain, argv, timeout=120)):
        assert without == validated, f"rank {rank}"
        assert without not in planted, f"rank {rank}"


# ---------------------------------------------------------------- the same samples every time


def run_through(argv: list[str]) -> tuple[list[list[int]], list[tuple[Any, ...]]]:
    watch = Watch()
    _, parts = make_parts(argv, [watch])
    seen = samples_of_evaluations(parts)
    with parts:
        parts.trainer.fit()
    return seen, watch.evaluations


WAYS_TO_READ = {
    "some": ({"validation_samples": PART}, [5, 3]),
    "all": ({"full_validation": True}, [7, 5]),
    "iterations": ({"eval_iters": 1, "eval_global_batch_size": 4}, [4, 4]),
}


@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_every_evaluation_reads_the_same_samples(way: str, corpus: Path, tmp_path: Path) -> None:
    """Holds after a resume between two evaluations, and for any length of the run."""
    settings, counts = WAYS_TO_READ[way]
    common = {**settings, "train_iters": 6}
    samples, evaluations = run_through(command(corpus, **common))
    assert samples == [list(range(counts[number % 2])) for number in range(6)]
    saved = {**common, "save": tmp_path, "save_interval": 100}
    _, first = run_through(command(corpus, **saved, exit_interval=3))
    again, second = run_through(command(corpus, **common, load=tmp_path))
    assert [*first, *second] == evaluations and again == samples[2:]
    short, long = validated(0, 1, [command(corpus, **{**common, "train_iters": length}) for length in (2, 6)])
    assert short == long


def test_samples_that_move_on_are_seen(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = iter(range(100))

    def moving(self: BatchMaker, dataset: Any, samples: int | None = None) -> Iterator[Any]:
        return (batch for batch, _ in zip(self.evaluation(dataset, 2 * next(moved)), range(1)))

    monkeypatch.setattr(BatchMaker, "once", moving)
    samples, _ = run_through(command(corpus, validation_samples=["2"], eval_global_batch_size=2))
    assert samples[:2] != samples[2:]


# ---------------------------------------------------------------- bits per byte


def test_bits_per_byte_are_those_of_the_evaluation_tool(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a document that fills its samples: equal sums of losses and bytes. The tool also counts the bytes of the
    first token, which is never predicted. Every logger has the numbers, under the set's name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged: list[dict[str, Any]] = []
    wandb = types.SimpleNamespace(log=lambda values, step: logged.append(values), finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: wandb))
    tokenizer = tokenizer_in(corpus)
    ids = tokenizer.tokenize("".join(SAMPLES))
    ids = ids[: (len(ids) - 1) // LENGTH * LENGTH + 1]
    with IndexedDatasetBuilder(str(tmp_path / "text"), np.uint16) as builder:
        builder.add_document(np.array(ids, dtype=np.uint16), None)
    argv = command(
        corpus,
        **GPT2,
        valid_data_path=[tmp_path / "text", corpus / "code"],
        full_validation=True,
        train_iters=2,
        save=tmp_path / "run",
        metrics_jsonl=tmp_path / "metrics.jsonl",
        tensorboard_dir=tmp_path / "tb",
        log_validation_ppl_to_tensorboard=True,
        wandb_project="p",
    )
    run_through(argv)
    told = capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (ours,) = [record for record in records if record["split"] == "validation-wiki"]
    assert (
        main(["--load", str(tmp_path / "run"), "--data", str(tmp_path / "text"), "--output", str(tmp_path / "o")]) == 0
    )
    theirs = json.loads((tmp_path / "o").read_text())
    first = len(tokenizer.detokenize(ids[:1]).encode())
    assert ours["counted_tokens"] == theirs["counted_tokens"] == len(ids) - 1
    assert ours["counted_bytes"] == theirs["bytes"] - first == len(tokenizer.detokenize(ids).encode()) - first
    assert ours["lm_loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert ours["bits_per_byte"] * ours["counted_bytes"] == pytest.approx(
        theirs["bits_per_byte"] * theirs["bytes"], rel=1e-6
    )

    line = r"at iteration 2 \(validation-wiki\) \| lm loss value: \S+ \| lm loss PPL: \S+ \| bits per byte: (\S+) \|"
    assert float(re.search(line, told)[1]) == pytest.approx(ours["bits_per_byte"], abs=1e-6)  # type: ignore[index]
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    for name, value in (
        ("lm loss validation-wiki", ours["lm_loss"]),
        ("lm loss validation-wiki ppl", ours["lm_loss_ppl"]),
        ("bits per byte validation-wiki", ours["bits_per_byte"]),
    ):
        assert [event.value for event in events.Scalars(name)] == pytest.approx([value])
        assert [event.value for event in events.Scalars(f"{name} vs samples")] == pytest.approx([value])
        assert [values[name] for values in logged if name in values] == [value]
