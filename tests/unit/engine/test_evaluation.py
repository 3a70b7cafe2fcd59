"""The loss of an evaluation depends on the model and the data only; dropout differs where the samples differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import parse_args
from megatron.data.indexed.builder import IndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from megatron.training.batches import check_evaluation
from megatron.training.dry_run import check_launch_files
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import flags, make_parts, make_run, samples_of_evaluations

LAYOUTS = [(1, 1), (1, 8), (2, 2), (2, 4), (4, 1)]  # ranks, micro-batch size


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    random = np.random.RandomState(7)
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus"), np.uint16)
    for _ in range(60):
        ids = random.randint(0, 96, size=random.randint(8, 40))
        builder.add_document(np.append(ids, 96).astype(np.uint16), None)  # the NullTokenizer's end of document
    builder.finalize()
    return str(tmp_path / "corpus")


def evaluate(rank: int, size: int, argv: list[str]) -> tuple[float, int, float]:
    torch.set_num_threads(1)
    _, parts = make_parts(argv, rank=rank, world_size=size, dtype=torch.float64)
    valid = parts.evaluator.valid(parts.progress, "here")
    test = parts.evaluator.test(parts.progress, "here")
    assert valid is not None and test is not None
    return valid.lm_loss, valid.counted_tokens, test.lm_loss


@pytest.mark.parametrize("full", [False, True])
def test_it_moves_neither_with_the_micro_batch_nor_with_the_ranks(corpus: str, full: bool) -> None:
    def argv(micro_batch: int) -> list[str]:
        return flags(
            mock_data=None,
            data_path=corpus,
            tokenizer_type="NullTokenizer",
            vocab_size=96,
            split="40,40,20",
            eod_mask_loss=True,
            eval_iters=2,
            full_validation=full,
            micro_batch_size=micro_batch,
        )

    expected = evaluate(0, 1, argv(2))
    if full:
        assert expected[1] % (8 * 16), "the set is to end within a block, so that there is a rest"
    for ranks, micro_batch in LAYOUTS:
        for found in run_ranks(ranks, evaluate, ranks, argv(micro_batch)):
            assert found[1] == expected[1]
            assert found == pytest.approx(expected, rel=1e-12)


def test_a_resumed_run_evaluates_on_what_is_next(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"eval_iters": 2, "eval_interval": 2, "save": tmp_path, "save_interval": 100}
    _, parts = make_parts(flags(**settings, exit_interval=2))
    before = samples_of_evaluations(parts)
    with parts:
        parts.trainer.fit()
    _, parts = make_parts(flags(**settings, load=tmp_path))
    after = samples_of_evaluations(parts)
    with parts:
        parts.trainer.fit()
    assert [*before, *after] == [list(range(16)), list(range(16, 32)), list(range(32, 48))]


def test_a_set_that_is_used_up_begins_again() -> None:
    """A resume with another --eval-interval can use up the set."""
    _, parts = make_parts(flags(eval_iters=2, eval_interval=6))
    assert len(parts.evaluator._validated["valid"]) == 32
    seen = samples_of_evaluations(parts)
    for _ in range(3):
        parts.evaluator.valid(parts.progress, "here")
    assert seen == [list(range(16)), list(range(16, 32)), list(range(16))]


def test_a_set_smaller_than_a_global_batch_is_refused_before_training(corpus: str) -> None:
    run, _ = make_parts(flags(eval_iters=1))

    class Few:
        seq_length = 16

        def __len__(self) -> int:
            return 7

    with pytest.raises(DataError, match=r"the validation set has 7 samples.*--full-validation"):
        check_evaluation(run, Few(), "validation set")


def test_an_empty_split_is_no_evaluation(corpus: str) -> None:
    data = {"mock_data": None, "data_path": corpus, "tokenizer_type": "NullTokenizer", "vocab_size": 96}
    _, parts = make_parts(flags(**data, split="100,0,0", eval_iters=2))
    assert parts.evaluator.valid(parts.progress, "here") is None
    assert parts.evaluator.test(parts.progress, "here") is None


def losses_of_one_batch(rank: int, size: int, argv: list[str]) -> list[float]:
    """Losses of the same samples on each rank, in training and in evaluation."""
    _, parts = make_parts(argv, rank=rank, world_size=size)
    batch = {
        "tokens": torch.arange(16)[None],
        "labels": torch.arange(1, 17)[None],
        "loss_mask": torch.ones(1, 16),
        "position_ids": torch.arange(16)[None],
    }
    engine = parts.engine
    found = []
    for training in (True, False):
        engine.model.train(training)
        found.append(engine.passes.forward(batch)[0].item())
    return found


def test_data_parallel_ranks_drop_out_differently() -> None:
    first, second = run_ranks(2, losses_of_one_batch, 2, flags())
    assert first[0] != second[0], "one mask on all ranks would correlate their dropout"
    assert first[1] == second[1]


# ---------------------------------------------------------------- several validation sets


def separate(tmp_path: Path, **changes: Any) -> list[str]:
    """Command with separate data: training and one validation set have ids below 48, the other has ids above."""
    for name, low in (("train", 0), ("wiki", 0), ("code", 48)):
        if (tmp_path / f"{name}.idx").exists():
            continue
        random = np.random.RandomState(low)
        with IndexedDatasetBuilder(str(tmp_path / name), np.uint16) as builder:
            for _ in range(40):
                builder.add_document(np.append(random.randint(low, low + 48, size=30), 96).astype(np.uint16), None)
    data = {"train_data_path": tmp_path / "train", "valid_data_path": [tmp_path / "wiki", tmp_path / "code"]}
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": 96}
    return flags(
        **{"mock_data": None, "eval_iters": 2, "eval_interval": 2, "train_iters": 4, **data, **tokenizer, **changes}
    )


@pytest.mark.parametrize("full", [None, True])
def test_each_validation_set_has_a_loss_of_its_own(full: bool | None, tmp_path: Path) -> None:
    """The loss at each evaluation equals that of a run with only this validation set."""
    common = {"full_validation": full}

    def losses(name: str, **changes: Any) -> dict[str, list[float]]:
        metrics = tmp_path / f"{name}.jsonl"
        _, parts = make_parts(separate(tmp_path, **common, **changes, metrics_jsonl=metrics))
        with parts:
            parts.trainer.fit()
            assert parts.progress.consumed_valid_samples == 0
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        splits = {record["split"] for record in records} - {"train"}
        return {split: [record["lm_loss"] for record in records if record["split"] == split] for split in splits}

    both = losses("both", multiple_validation_sets=True, validation_set_names=["wiki", "code"])
    assert both.keys() == {"validation-wiki", "validation-code"}
    for name in ("wiki", "code"):
        samples = None if full else 2 * 8
        alone = losses(name, valid_data_path=tmp_path / name, validation_samples=samples)["valid"]
        assert both[f"validation-{name}"] == alone and len(alone) == 2
    assert both["validation-wiki"] != both["validation-code"]
    assert losses("numbered", multiple_validation_sets=True).keys() == {"validation-0", "validation-1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valid_data_path": [0.3, "a", 0.7, "b"]}, "--multiple-validation-sets: --valid-data-path has weights"),
        ({"valid_data_path": None}, "--multiple-validation-sets: needs --valid-data-path"),
        ({"validation_set_names": ["one"]}, "--validation-set-names one: 1 names, but --valid-data-path has 2 sets"),
        ({"validation_set_names": ["a=", "b"]}, "--validation-set-names a= b: a= contains ="),
        ({"validation_samples": ["wiki=3"]}, "--validation-samples wiki=3: no validation set is called 'wiki'"),
        ({"validation_samples": ["0=3"]}, "--validation-samples 0=3: no number for 1; add 1=N, or --full-validation"),
        ({"validation_samples": ["0=3", "0=4"]}, "--validation-samples 0=3 0=4: the set '0' is given twice"),
        ({"validation_samples": ["0=3", "4"]}, "--validation-samples 0=3 4: '4' is not NAME=N"),
        ({"validation_samples": ["0"]}, "--validation-samples 0: '0' is not a number of samples"),
        ({"validation_samples": ["0=x"]}, "--validation-samples 0=x: 'x' is not a number of samples"),
        (
            {"validation_samples": ["3"], "full_validation": True},
            "--validation-samples 3 and --full-validation exclude each other",
        ),
        ({"validation_set_names": ["a", "a"]}, "--validation-set-names a a: two sets are called a; give each"),
    ],
)
def test_validation_sets_that_cannot_be_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args(separate(tmp_path, multiple_validation_sets=True, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mock_data": True, "validation_samples": 3}, "--mock-data and --validation-samples 3 exclude each other"),
        ({"mock_data": True, "full_validation": True}, "--mock-data and --full-validation exclude each other"),
        ({"data_path": "a", "mock_data": None, "validation_samples": "a=3"}, "a=3: there is one validation set"),
    ],
)
def test_samples_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_args(flags(**{"eval_iters": 2, "tokenizer_type": "NullTokenizer", "vocab_size": 96, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"validation_samples": ["wiki=70", "code=78"]},
            "set validation-code has 77 samples, but --validation-samples",
        ),
        ({"eval_iters": 10}, "set validation-wiki has 77 samples, but --eval-iters 10 needs 80; lower it, or"),
        (
            {"valid_data_path": ["wiki", "empty"]},
            r"--valid-data-path empty: the validation set code is empty \(0 tokens",
        ),
        (
            {"valid_data_path": ["wiki", "short"]},
            r"short: the validation set code is empty \(9 tokens, but one .* 17\)",
        ),
        (
            {"valid_data_path": ["empty"], "multiple_validation_sets": None, "validation_set_names": None},
            r"--valid-data-path empty: the validation set is empty \(0 tokens",
        ),
    ],
)
@pytest.mark.parametrize("dry", [False, True])
def test_sets_without_what_is_asked_of_them_are_refused(
    dry: bool, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stops before a step; --dry-run rejects them as well."""
    monkeypatch.chdir(tmp_path)
    named = {"multiple_validation_sets": True, "validation_set_names": ["wiki", "code"]}
    argv = separate(tmp_path, **{**named, **changes})
    for name, length in (("empty", 0), ("short", 9)):
        with IndexedDatasetBuilder(str(tmp_path / name), np.uint16) as builder:
            builder.add_document(np.arange(length, dtype=np.uint16), None)
    with pytest.raises(DataError, match=message):
        if dry:
            check_launch_files(make_run(parse_args(argv)), needs_data=True)
        else:
            make_parts(argv)
