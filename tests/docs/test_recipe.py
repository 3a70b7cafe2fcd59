"""The 8-device recipe in `examples/gpt2_8p` of a fresh copy, by the lines of its page, without a network."""

from __future__ import annotations

import json
import re
import sys
from statistics import median

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.docs.test_pages import missing
from tests.helpers.checkout import Checkout, copy_checkout

PAGE = (ROOT / "examples" / "gpt2_8p" / "README.md").read_text(encoding="utf-8")
(BLOCK,) = [block for block in blocks_of(PAGE, "README.md") if block.language == "bash"]
PREPROCESS, FULL, PERFORMANCE = BLOCK.text.splitlines()
SMALL = "export OWN_CORPUS_MEGABYTES=0.3 OWN_VOCAB_SIZE=300; "
PUBLISHED = {  # reference: the recipe's own page
    "345M": ("37.8", "59.7", "26.375", "26.485", "500000"),
    "345M_without_mp": ("235", "227", "28.67", "28.71", "100000"),
    "1.3B": ("15.71", "21.47"),
    "2.7B": ("4.125", "5.28"),
    "3.7B": ("3.12", "4.558"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The folder in which the recipe is run, with a dataset."""
    checkout = copy_checkout(tmp_path_factory.mktemp("recipe"))
    folder = Checkout(checkout.root / "examples" / "gpt2_8p", warm=True)
    folder.must_run(SMALL + PREPROCESS)
    return folder


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of the text's last table."""
    table = text[text.rindex("size  ") :].splitlines()[2:]
    return [re.split(r"  +", line) for line in table if line.endswith(("here", "published"))]


def test_preprocessing_splits_sentences_offline(recipe: Checkout) -> None:
    data = recipe.root / "data"
    names = ("gpt2-vocab.json", "gpt2-merges.txt", "my-gpt_text_sentence.bin", "my-gpt_text_sentence.idx")
    assert all((data / name).stat().st_size for name in names)
    assert not [path for path in data.iterdir() if path.is_dir()], "the vocabulary's folder is gone"
    again = recipe.run(PREPROCESS)
    assert again.returncode == 2 and len(again.stdout.splitlines()) == 1 and "--overwrite" in again.stdout


@pytest.fixture(scope="module")
def runs(recipe: Checkout) -> tuple[str, str, str]:
    """Runs half of the training on four CPU ranks, then the page's command, then one with the python3 on the PATH."""
    first = recipe.must_run(f"{FULL} --devices=4 --exit-interval 10")
    return first, recipe.must_run(FULL), recipe.must_run(f"unset PYTHON; {PERFORMANCE}")


def test_the_layout_is_the_recipes_or_says_what_fits(runs: tuple[str, str, str]) -> None:
    assert "tiny on 4 x cpu: tensor parallel 1, pipeline parallel 2, micro batch 4\n" in runs[0]
    assert (
        "tiny on 1 x cpu: tensor parallel 1, pipeline parallel 1, micro batch 4 (the recipe's does not fit" in runs[1]
    )


def test_the_same_line_resumes_also_on_fewer_devices(recipe: Checkout, runs: tuple[str, str, str]) -> None:
    assert "fresh start" in runs[0] and "continuing at iteration 10" in runs[1]
    assert (recipe.root / "ckpts/ckpts_tmp/latest_checkpointed_iteration.txt").read_text().strip() == "20"
    assert runs[1].count("sequences are shuffled, not documents") == 1


def test_the_table_has_our_row_and_the_published(recipe: Checkout, runs: tuple[str, str, str]) -> None:
    logs = recipe.root / "logs"
    records = [json.loads(line) for line in (logs / "full_tiny_1_cpu.jsonl").read_text().splitlines()]
    (ours,) = [row for row in rows(runs[1]) if row[:2] == ["tiny", "1 cpu"]]
    speed = median([record["samples_per_second"] for record in records if record["split"] == "train"][1:])
    ppl = next(record["lm_loss_ppl"] for record in records if record["split"] == "valid")
    assert ours == ["tiny", "1 cpu", f"{speed:.4g}", f"{ppl:.5g}", "20", "here"]
    assert f"lm loss PPL: {ppl:.6E}" in (logs / "full_tiny_1_cpu.log").read_text(), "the log says the same"
    for size, numbers in PUBLISHED.items():
        published = [row for row in rows(runs[1]) if row[0] == size]
        cells = {cell for row in published for cell in row}
        assert [row[1] for row in published] == ["8 GPU", "8 NPU"] and set(numbers) <= cells
        assert {row[-1] for row in published} == {"published"} and len(cells - set(numbers) - {size, "-"}) == 3
    assert "by the authors of the recipe; not measured here" in runs[1]
    assert (logs / "results.png").read_bytes().startswith(b"\x89PNG") and "tiny" in (logs / "results.txt").read_text()


def test_performance_saves_and_evaluates_nothing(recipe: Checkout, runs: tuple[str, str, str]) -> None:
    found = rows(runs[2])
    assert [row[:2] + row[3:5] for row in found if row[0].startswith("tiny")] == [
        ["tiny+", "4 cpu", "-", "10"],
        ["tiny", "1 cpu", found[1][3], "20"],
        ["tiny", "1 cpu", "-", "20"],
    ], "a size with a + was run with a flag of one's own"
    assert "validation loss" not in runs[2] and "saved checkpoint" not in runs[2]


MISTAKES = {
    "--model_size=350M": "--model_size=350M: no such size; there are 345M, 1.3B, 2.7B, 3.7B and 345M_without_mp",
    "--train_iters=0": "--train_iters=0: a whole number of at least 1 is needed",
    "--train_iters=1e5": "--train_iters=1e5: a whole number",
    "--data_path=": "--data_path=: has no value",
    "--data_path=./nowhere": "/nowhere: gpt2-vocab.json is not there",
    "--train_itres=7": "--train_itres: unknown setting",
    "345M": "345M: not an option; train_full_8p.sh has --data_path=...",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(recipe: Checkout, runs: tuple[str, str, str], mistake: str) -> None:
    before = sorted(path for path in recipe.root.rglob("*"))
    done = recipe.run(f"bash ./test/train_full_8p.sh --model_size=tiny {mistake}")
    lines = done.stdout.splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done.stdout
    assert MISTAKES[mistake] in lines[0]
    assert sorted(path for path in recipe.root.rglob("*")) == before


def test_another_size_is_told_the_line_that_keeps_the_first(recipe: Checkout, runs: tuple[str, str, str]) -> None:
    done = recipe.run("bash ./test/train_full_8p.sh")
    folder = recipe.root / "ckpts" / "ckpts_tmp"
    assert done.returncode == 2 and len(done.stdout.splitlines()) == 2 and "has another model" in done.stdout
    assert f"{folder} holds the run of another line; to keep it and begin anew: mv {folder} " in done.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--input=none.json --data_path=empty", "--vocab_size=50257"),
        ("--vocab_size=many --data_path=empty", "--vocab_size=many: a whole number"),
        ("--vocab_size=300", "gpt2-vocab.json is there"),
        ("--inputs=a --overwrite", "--inputs: no such flag; did you mean --input?"),
    ],
)
def test_mistakes_of_preprocessing(recipe: Checkout, options: str, named: str) -> None:
    done = recipe.run(f"bash ./test/dataset_preprocess_gpt.sh {options}")
    assert done.returncode == 2 and named in done.stdout and len(done.stdout.splitlines()) == 1, done.stdout
    assert not (recipe.root / "empty").exists()


LAUNCHED = """
. ./test/recipe.sh
choose_devices() { DEVICE=KIND; }
plan() { echo "${SETTINGS[@]} "; exit; }
launched() { dry_run=1 train_iters=500000 data_path=none LOG_INTERVAL=100 PASSED_ON=(--dry-run); train full; }
"""  # what would be launched, without asking for the devices of this machine


def test_the_five_sizes_have_the_recipes_shapes_and_layouts(recipe: Checkout) -> None:
    """The launch prints commands for eight accelerators."""
    shapes = {
        "345M": "1 2 24 1024 16 1024 1024 4 16",
        "1.3B": "2 2 24 2048 16 1024 1024 8 32",
        "2.7B": "2 2 32 2560 32 2048 2048 8 32",
        "3.7B": "2 2 32 3072 32 2048 2048 4 16",
        "345M_without_mp": "1 1 24 1024 16 1024 1024 2 16",
    }
    script = f"for model_size in {' '.join(shapes)}; do (devices=8; launched); done"
    printed = recipe.must_run(LAUNCHED.replace("KIND", "npu") + script)
    commands = [line for line in printed.splitlines() if line.startswith("--")]
    flags = "tensor-model-parallel-size pipeline-model-parallel-size num-layers hidden-size num-attention-heads"
    flags += " seq-length max-position-embeddings micro-batch-size global-batch-size"
    for command, shape in zip(commands, shapes.values(), strict=True):
        for flag, value in zip(flags.split(), shape.split(), strict=True):
            assert f"--{flag} {value} " in command
        assert " --train-iters 500000 " in command and " --split 949,50,1 " in command
        assert " --hidden-dropout 0 " in command and " --fp16 " in command and "--zero" not in command
    assert "does not fit" not in printed


LAYOUTS = {  # size and devices: tensor and pipeline parallel, micro batch
    ("345M", 1): (1, 1, 4), ("345M", 2): (1, 2, 4), ("345M", 4): (1, 2, 4), ("345M", 16): (1, 2, 2),
    ("345M", 32): (1, 2, 1), ("1.3B", 1): (1, 1, 8), ("1.3B", 2): (2, 1, 8), ("1.3B", 4): (2, 2, 8),
    ("1.3B", 64): (2, 2, 2), ("345M_without_mp", 1): (1, 1, 2), ("345M_without_mp", 16): (1, 1, 1),
    ("3.7B", 2): (2, 1, 4),
}  # fmt: skip
FEWER = {("345M", 3): 2, ("345M", 6): 4, ("345M", 5): 4, ("1.3B", 6): 4, ("1.3B", 9): 8, ("345M_without_mp", 17): 16}


def test_a_layout_fits_its_devices_or_another_number_is_named(recipe: Checkout) -> None:
    both = [*LAYOUTS, *FEWER]
    script = "".join(f"(model_size={size} devices={devices}; launched) || true\n" for size, devices in both)
    lines = recipe.must_run(LAUNCHED.replace("KIND", "cpu") + script).splitlines()
    said = [line for line in lines if not line.startswith("--")]
    expected = [
        f"{size} on {devices} x cpu: tensor parallel {fit[0]}, pipeline parallel {fit[1]}, micro batch {fit[2]}"
        for (size, devices), fit in LAYOUTS.items()
    ]
    assert [line.partition(" (")[0] for line in said[: len(LAYOUTS)]] == expected
    assert all(f"--devices={devices}: " in line for (_, devices), line in zip(FEWER, said[len(LAYOUTS) :], strict=True))
    assert [line.rpartition("; type ")[2] for line in said[len(LAYOUTS) :]] == [
        f"--devices={n}" for n in FEWER.values()
    ]
    assert not any("--fp16" in line for line in lines)


MEMORY = """
. ./test/recipe.sh
python() { case " $* " in FITS) ;; *) echo "total memory  9 GiB for the ranks together: does not fit" ;; esac; }
PYTHON=python devices=2 MICRO=4 LAYOUT=here GIVEN="TYPED" SETTINGS=(--micro-batch-size 4 --seq-length 9)
fit_memory
echo "${SETTINGS[@]}; $LAYOUT"
"""  # a dry run that says what fits


@pytest.mark.parametrize(
    ("fits", "typed", "flags"),
    [
        ("*' --micro-batch-size 4 --dry-run'*", "", "--micro-batch-size 4 --seq-length 9; here"),
        ("*' --micro-batch-size 2 --dry-run'*", "", "--micro-batch-size 2 --seq-length 9; here; micro batch 2, to fit"),
        ("none", "", "--micro-batch-size 1 --seq-length 9 --recompute-granularity full --recompute-method uniform; h"),
        ("none", " --micro-batch-size ", "--micro-batch-size 4 --seq-length 9; here"),
    ],
)
def test_little_memory_takes_smaller_micro_batches(recipe: Checkout, fits: str, typed: str, flags: str) -> None:
    said = recipe.must_run(MEMORY.replace("FITS", fits).replace("TYPED", typed))
    assert said.splitlines()[-1].startswith(flags)


@pytest.mark.parametrize(
    ("code", "log", "told"), [(1, "exitcode  : -9 (pid: 7)", 137), (137, "", 137), (2, "exitcode  : 2 (pid: 7)", 2)]
)
def test_a_process_that_was_killed_is_explained(recipe: Checkout, code: int, log: str, told: int) -> None:
    ran = recipe.run(f". ./test/recipe.sh; echo '{log}' > some.log; explain_end {code} some.log")
    assert ran.returncode == told and ("too little memory" in ran.stdout) == (told == 137)


def test_dry_runs_print_the_commands(recipe: Checkout) -> None:
    """Dry runs work before any data exists, and for eight devices on one CPU."""
    printed = recipe.must_run("bash ./test/train_full_8p.sh --devices=8 --data_path=./none --dry-run")
    assert " -m torch.distributed.run --standalone --nproc_per_node 8 pretrain_gpt.py --tensor" in printed
    assert "345M on 8 x cpu: tensor parallel 1, pipeline parallel 2, micro batch 4\n" in printed
    preprocess = recipe.must_run(f"{PREPROCESS} --data_path=none --dry-run")
    assert "tools/preprocess_data.py --input" in preprocess and " --split-sentences " in preprocess
    assert not (recipe.root / "none").exists()


def test_its_requirements_are_those_of_the_tests() -> None:
    """`pip3 install -r requirements.txt` finds all of them installed here, so it does not contact an index."""
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    own = (ROOT / "examples/gpt2_8p/requirements.txt").read_text().splitlines()
    assert {"nltk", "matplotlib"} <= pinned.keys() and "-r ../../requirements.txt" in own
    install = f"{sys.executable} -m pip install --dry-run --no-index --disable-pip-version-check -r requirements.txt"
    output = Checkout(ROOT / "examples" / "gpt2_8p").must_run(install)
    assert "Would install" not in output and "nltk" in output and "matplotlib" in output


def test_its_page_says_what_it_is_for() -> None:
    assert missing(PAGE) == []
