"""Runs the public CodeParrot tutorial as its readers type it, in a fresh copy of the checkout.

The commands are the tutorial's own, word for word. Flags behind a launcher's own make the model, batch and run smaller,
and fewer processes are started. The training and mistakes start real interpreters; all else forks warm ones
(tests/helpers/warm).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.helpers.checkout import Checkout, copy_checkout
from tests.helpers.fake_hub import fake_hub

MODEL_PARALLEL = "pretrain_gpt_distributed_with_mp"

PREPROCESS = """
python tools/preprocess_data.py \\
       --input codeparrot_data.json \\
       --output-prefix codeparrot \\
       --vocab vocab.json \\
       --dataset-impl mmap \\
       --tokenizer-type GPT2BPETokenizer \\
       --merge-file merges.txt \\
       --json-keys content \\
       --workers 32 \\
       --chunk-size 25 \\
       --append-eod
"""

TRAIN = """
GPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=6001
NNODES=1
NODE_RANK=0
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
python3 -m torch.distributed.launch $DISTRIBUTED_ARGS \\
        pretrain_gpt.py \\
        --tensor-model-parallel-size 1 \\
        --pipeline-model-parallel-size 1 \\
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
        --seq-length 1024 --max-position-embeddings 1024 \\
        --micro-batch-size 12 --global-batch-size 192 \\
        --lr 0.0005 --train-iters 150000 --lr-decay-iters 150000 --lr-decay-style cosine --lr-warmup-iters 2000 \\
        --weight-decay .1 --adam-beta2 .999 \\
        --fp16 \\
        --log-interval 10 --save-interval 2000 --eval-interval 200 --eval-iters 10 \\
        --vocab-file vocab.json --merge-file merges.txt \\
        --save experiments/codeparrot-small --load experiments/codeparrot-small \\
        --data-path codeparrot_content_document \\
        --tensorboard-dir experiments/tensorboard
"""  # noqa: E501
SMALL = """--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr-decay-iters 6 --lr-warmup-iters 2
    --log-interval 1 --save-interval 2 --eval-interval 3 --eval-iters 1"""


def train(*more: str) -> str:
    command = TRAIN.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=2").rstrip()
    return " ".join([command, *SMALL.split(), *more])


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    copy = copy_checkout(tmp_path_factory.mktemp("tutorial"))
    warm(copy).must_run("""
        python tools/make_stdlib_corpus.py --output codeparrot_data.json --max-megabytes 0.5
        python tools/train_tokenizer.py --input codeparrot_data.json --json-key content --vocab-size 512 --output-dir .
    """)
    return copy


def warm(checkout: Checkout) -> Checkout:
    return Checkout(checkout.root, warm=True)


def test_preprocess(checkout: Checkout) -> None:
    warm(checkout).must_run(PREPROCESS)
    assert (checkout.root / "codeparrot_content_document.idx").is_file()
    assert (checkout.root / "codeparrot_content_document.bin").is_file()


def test_train_in_two_launches(checkout: Checkout) -> None:
    """Both launches are typed as in the tutorial, the first with `--exit-interval` added."""
    first = checkout.must_run(train("--exit-interval", "2"))
    saved = checkout.root / "experiments" / "codeparrot-small"
    assert "fresh start" in first and "fp16 products: " in first, "how fp16 is multiplied on a CPU is said"
    assert (saved / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt").is_file()
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "2"

    second = checkout.must_run(train())
    assert "continuing at iteration 2" in second
    iterations = [line.split("/")[0].split()[-1] for line in second.splitlines() if line.startswith(" iteration ")]
    assert iterations == ["3", "4", "5", "6"], "each logged once, by one rank, from where the first launch stopped"
    assert (saved / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    assert json.loads((saved / "exit_reason.json").read_text())
    assert list((checkout.root / "experiments" / "tensorboard").glob("events.out.tfevents.*"))


def test_open_with_transformers(checkout: Checkout) -> None:
    warm(checkout).must_run(
        "python tools/convert_checkpoint.py --load experiments/codeparrot-small --to hf --save codeparrot-small"
    )
    script = """
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
model = AutoModelForCausalLM.from_pretrained("codeparrot-small")
tokenizer = AutoTokenizer.from_pretrained("codeparrot-small")
assert model.config.vocab_size == len(tokenizer) == 512
assert tokenizer.decode(tokenizer("def hello_world():\\n    pass")["input_ids"]) == "def hello_world():\\n    pass"
generate = pipeline("text-generation", model="codeparrot-small")
print(generate("def hello_world():", max_new_tokens=8)[0]["generated_text"])
"""
    (checkout.root / "open.py").write_text(script)
    assert "def hello_world():" in warm(checkout).must_run("python open.py")


def test_a_typo_in_the_tutorials_command_is_one_line(checkout: Checkout) -> None:
    done = checkout.run(
        TRAIN.replace("python3 -m torch.distributed.launch $DISTRIBUTED_ARGS", "python3").replace(
            "--lr ", "--learning-rte "
        )
    )
    assert done.returncode == 2 and len(done.stdout.strip().splitlines()) == 1, done.stdout
    assert "--learning-rte: unknown setting (use --lr instead)" in done.stdout


@pytest.fixture(scope="module")
def launched(checkout: Checkout) -> Callable[[str], str]:
    """Runs a launcher once with its own settings; flags behind its name shrink them."""

    @cache
    def run(launcher: str) -> str:
        ranks = 4 if launcher.endswith("mp") else 2
        script = f"""
            export DATA_PATH=codeparrot_content_document VOCAB_FILE=vocab.json MERGE_FILE=merges.txt
            export CHECKPOINT_PATH=experiments/{launcher} GPUS_PER_NODE={ranks} MASTER_PORT=6001
            bash examples/{launcher}.sh --num-layers 2 --hidden-size 32 --num-attention-heads 4 \\
                --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 \\
                --train-iters 4 --lr-decay-iters 4 --save-interval 4 --log-interval 2 --eval-iters 1
        """
        warmup = " --lr-warmup-iters 2" if launcher == "codeparrot_small" else ""
        return warm(checkout).must_run(script.rstrip() + warmup)

    return run


@pytest.mark.parametrize("launcher", ["pretrain_gpt", "pretrain_gpt_distributed", MODEL_PARALLEL, "codeparrot_small"])
def test_launchers(checkout: Checkout, launched: Callable[[str], str], launcher: str) -> None:
    output = launched(launcher)
    assert output.count(" iteration        4/       4") == 1, output
    assert (checkout.root / "experiments" / launcher / "iter_0000004" / "manifest.json").is_file()


SHARE = """
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
model = AutoModelForCausalLM.from_pretrained("parallel", device_map="auto")
model.push_to_hub("me/codeparrot-small")
AutoTokenizer.from_pretrained("parallel").push_to_hub("me/codeparrot-small")
again = AutoModelForCausalLM.from_pretrained("me/codeparrot-small", device_map="auto")
weights = dict(model.state_dict())
assert weights and all(weights[name].equal(tensor) for name, tensor in again.state_dict().items())
generate = pipeline("text-generation", model="me/codeparrot-small")
print(generate("def hello_world():", max_new_tokens=8)[0]["generated_text"])
"""


def test_a_model_of_tensor_and_pipeline_parallel_ranks_is_shared(
    checkout: Checkout, launched: Callable[[str], str]
) -> None:
    """The end of the tutorial, against a Hub on this machine."""
    launched(MODEL_PARALLEL)
    (checkout.root / "share.py").write_text(SHARE)
    with fake_hub() as hub:
        known = " ".join(f"{name}={value}" for name, value in hub.environment(checkout.root / "hub-cache").items())
        said = warm(checkout).must_run(f"""
            python tools/convert_checkpoint.py --load experiments/{MODEL_PARALLEL} --to hf --save parallel
            env {known} python share.py
        """)
    assert "def hello_world():" in said and "config.json" in hub.repos["me/codeparrot-small"]


DATA_OF_THE_LAUNCHERS = "gpt2-vocab.json gpt2-merges.txt my-gpt2_text_document.bin my-gpt2_text_document.idx"


@pytest.fixture
def with_data(checkout: Checkout) -> Iterator[Checkout]:
    """Creates the files that the launchers name; nothing reads them before the settings are right."""
    checkout.must_run(f"touch {DATA_OF_THE_LAUNCHERS}")
    yield checkout
    checkout.must_run(f"rm {DATA_OF_THE_LAUNCHERS}")


def test_the_model_parallel_launcher_counts_its_ranks_before_it_starts(with_data: Checkout) -> None:
    done = with_data.run("GPUS_PER_NODE=2 bash examples/pretrain_gpt_distributed_with_mp.sh")
    assert done.returncode == 2 and len(done.stdout.strip().splitlines()) == 1, done.stdout
    sizes = "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4"
    assert f"{sizes}: the number of processes, 2, is not divisible by 4" in done.stdout


def test_a_launcher_with_a_mistake_is_one_line(with_data: Checkout) -> None:
    for mistake, named in (
        ("--hidden-size 1000", "--hidden-size 1000"),
        ("--micro-batch-size 7", "--global-batch-size 64"),
    ):
        done = with_data.run(f"bash examples/pretrain_gpt_distributed.sh {mistake}")
        assert done.returncode == 2 and len(done.stdout.strip().splitlines()) == 1, done.stdout
        assert named in done.stdout


def test_all_mistakes_of_a_launcher_are_told_a_line_each(checkout: Checkout) -> None:
    """The launch lacks its data and has a wrong size."""
    done = checkout.run("bash examples/pretrain_gpt_distributed.sh --hidden-size 1000")
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 2 and all(line.startswith("error: ") for line in lines), done.stdout
    named = ("--hidden-size 1000", "--vocab-file", "--merge-file", "--data-path")
    assert [line.split("error: ")[1].startswith(name) for line, name in zip(lines, named, strict=True)] == [True] * 4


def test_files_of_the_tutorial_are_ignored_by_git(checkout: Checkout) -> None:
    """Users run in their clone: files of the tutorial must not show up in `git status`."""
    listed = checkout.must_run("git init -q . && git add -A && git ls-files").splitlines()
    named = ("codeparrot_", "vocab.json", "merges.txt", "experiments/", "index-cache/")
    left = [name for name in listed if name.startswith(named) or name.endswith((".safetensors", ".pt"))]
    assert not [name for name in left if not name.startswith("tests/golden/")]
