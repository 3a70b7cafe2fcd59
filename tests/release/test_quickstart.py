"""`bash examples/quickstart.sh` from a fresh checkout with few iterations; then again, and with mistakes."""

from __future__ import annotations

import json

import pytest

from tests.helpers.checkout import Checkout, copy_checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return copy_checkout(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture(scope="module")
def first_run(checkout: Checkout) -> str:
    """The tests' Python has torch, so the set-up takes the path for a vendor's torch: nothing is downloaded."""
    return checkout.must_run("bash examples/quickstart.sh --train-iters 12", timeout=600)


def test_it_does_everything(checkout: Checkout, first_run: str) -> None:
    run = checkout.root / "quickstart" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row["iteration"] for row in rows if row["split"] == "train"]
    assert trained == sorted(set(trained)) and trained[-1] == 10
    assert "fresh start" in first_run and "continuing at iteration 6" in first_run, "it stops and resumes once"
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert "lm_loss" in first_run and "• train" in first_run, "the loss is drawn"
    assert (run / "hf" / "config.json").is_file() and "def hello_world():" in first_run.partition("=== 8/8")[2]
    assert not (checkout.root / "experiments").exists() and not list(checkout.root.glob("*.json*")), "only quickstart/"


def test_the_second_run_repeats_neither_set_up_nor_preprocessing(checkout: Checkout, first_run: str) -> None:
    data = checkout.root / "quickstart" / "corpus_content_document.bin"
    written = data.stat().st_mtime_ns
    (checkout.root / "quickstart" / "run").rename(checkout.root / "quickstart" / "first")
    (checkout.root / "quickstart" / "run").touch()  # the training stops here: its repetition is not the subject
    second = checkout.run("bash examples/quickstart.sh --train-iters 2").stdout
    assert ".venv is up to date" in second and "installing" not in second
    assert second.count("already there") == 3 and data.stat().st_mtime_ns == written
    assert "=== 5/8" in second and "quickstart/run" in second.partition("=== 5/8")[2], second


@pytest.mark.parametrize(
    ("arguments", "named"),
    [("--iters 3", "--iters"), ("--train-iters many", "--train-iters many"), ("--train-iters 1", "--train-iters 1")],
)
def test_mistakes_are_one_line(checkout: Checkout, arguments: str, named: str) -> None:
    done = checkout.run(f"bash examples/quickstart.sh {arguments}")
    assert done.returncode == 2 and named in done.stdout and len(done.stdout.strip().splitlines()) == 1, done.stdout


def test_a_failing_step_is_named(checkout: Checkout, first_run: str) -> None:
    done = checkout.run(
        "mkdir -p broken && echo '{not json' > broken/corpus.json && bash examples/quickstart.sh --dir broken"
    )
    assert done.returncode != 0 and 'stopped in step "3/8 tokenizer"' in done.stdout, done.stdout
