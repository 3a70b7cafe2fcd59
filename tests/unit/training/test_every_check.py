"""Rejections of a launch are the same lines with --print-config and --dry-run."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import flags, pretrain_here, train_here
from tests.unit.config.commands import SMALL, argv, without
from tests.unit.config.test_mistakes import ADDED, CHANGED, REQUIRED
from tests.unit.training.test_data_order import make_corpus

WAYS = ([], ["--print-config"], ["--dry-run"])


def refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines of the three ways; asserts that they are equal."""
    capsys.readouterr()
    told = []
    for way in WAYS:
        code = pretrain_here([*command, *way, "--cpu-threads", "1"])
        told.append((code, [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]))
    assert told[0][0] != 0 and told[0][1], "a launch refuses it"
    assert told[1] == told[0] and told[2] == told[0]
    return told[0][1]


@pytest.mark.parametrize("mistake", ADDED)
def test_mistakes_of_the_command_line(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(argv(SMALL, mistake), capsys)


@pytest.mark.parametrize("missing", REQUIRED)
def test_what_is_required(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(argv(without(SMALL, missing)), capsys)


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new, _, _ in CHANGED])
def test_wrong_values(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(argv(SMALL.replace(old, new)), capsys)


NULL = "--tokenizer-type NullTokenizer --vocab-size 97"

# what only the ranks, the device, the kernels, the tokenizer or the files tell -> a part of the line
LATER: dict[str, str] = {
    "--cuda-graphs --attention-dropout 0 --hidden-dropout 0": "--cuda-graphs: needs a CUDA device",
    "--mock-data --eod-mask-loss": "--eod-mask-loss: the tokenizer has no end-of-document id",
    "--reset-position-ids": "--reset-position-ids: the tokenizer has no",
    "--dataloader-inter-document-masking": "--dataloader-inter-document-masking: the tokenizer has no",
    "--global-batch-size 3": "--global-batch-size 3 is not divisible by",
    "--eval-global-batch-size 3 --eval-iters 1": "--eval-global-batch-size 3: ",
    "--profile --profile-step-start 0 --profile-step-end 1 --profile-ranks 1": "--profile-ranks 1: there is no rank 1",
    "--device cuda": "--device cuda: not available",
    "--device nonsense": "--device nonsense: not a device",
    "--distributed-backend nccl": "--distributed-backend nccl: needs an accelerator",
    "--kernels auto,-nothing": "no operation 'nothing'",
    "--bf16 --store-param-remainders --kernels ref": "--store-param-remainders: needs the native AdamW",
    "--cpu-offloading-num-layers 9": "--cpu-offloading-num-layers 9: the model has 2 layers",
    "--cpu-offloading-num-layers 1 --recompute-granularity full --recompute-method block": "exclude each other: a",
    "--zero-stage 3 --remote-device cpu --num-distributed-optimizer-instances 2": "not summed between instances",
    "--num-distributed-optimizer-instances 2": "without ZeRO every rank has the whole optimizer state; add",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --zero-stage 2": "state is offloaded; keep one",
    "--optimizer-cpu-offload --optimizer-offload-directory out/d": "is either in memory or in a file; keep one",
    "--optimizer-cpu-offload --optimizer sgd": "--optimizer-cpu-offload: only the state of AdamW",
    "--optimizer-offload-directory out/d --bf16 --store-param-remainders": "an offloaded optimizer stores whole",
    "--bf16 --store-param-remainders --optimizer sgd": "--store-param-remainders: needs the native AdamW",
    "--save out/s --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir A-FILE": "A-FILE: is a file",
    "--save out/s --non-persistent-ckpt-type global --non-persistent-global-ckpt-dir A-FILE": "A-FILE: is a file",
    "--save out/s --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d --replication": "not a multiple",
    "--load NOWHERE": "does not exist",
    "--load Owner/model-7b --finetune": "if Owner/model-7b is a model on the Hugging Face Hub",
    "--load NOWHERE --finetune": "does not exist",
    "--load NOWHERE --use-checkpoint-args": "does not exist",
    "--load SAVED --ckpt-step 5": "--ckpt-step 5:",
    "--load SAVED --ckpt-step 5 --finetune": "--ckpt-step 5:",
    "--load SAVED --override-ckpt-iteration 100": "--override-ckpt-iteration 100: nothing is left of --train-iters",
    "--load SAVED --ffn-hidden-size 256": "--ffn-hidden-size",
    "--load SAVED --seed 7": "--seed is 7 here",
    "--load DAMAGED": "no valid checkpoint is left",
    "--load A-FILE": "is not a directory",
    "--tensorboard-dir A-FILE": "is a file",
    "--metrics-jsonl A-FILE/m.jsonl": "is a file",
    "--save A-FILE": "is a file",
    "--data-path NOWHERE": "no such file",
    "--data-path CORPUS --seed 4294967296": "--seed 4294967296: the sample order",
    "--data-path CORPUS --data-args-path A-FILE": "exclude each other",
    "--data-path BROKEN": "BROKEN.idx: ",
    "--data-path OTHER": "made with another tokenizer",
    "--data-path CORPUS --eod-mask-loss": "do not end with the end-of-document token",
    "--data-path A-FILE --sft": "--sft: NullTokenizer has no chat template",
    "--data-path NOWHERE --sft": "NOWHERE: no such file; give a JSONL file of conversations",
    "--data-args-path A-FILE": "the file is empty",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model NOWHERE": "no such file",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model A-FILE": "--tokenizer-model",
    "--vocab-file A-FILE --merge-file A-FILE": "--vocab-file",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER --vocab-size 9": "--vocab-size 9: the tokenizer",
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model TOKENIZER --fim-data": "--fim-prefix-token",
    "--fim-data": "--fim-data: needs a text tokenizer",
    "--tiktoken-special-tokens <unk> --tokenizer-type TikTokenizer --tokenizer-model A-FILE": "--ti",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from megatron.data.indexed.record import make_record, write_record

    root = tmp_path_factory.mktemp("places")
    (root / "A-FILE").write_bytes(b"")
    make_corpus(root / "CORPUS"), make_corpus(root / "BROKEN"), make_corpus(root / "OTHER")
    (root / "BROKEN.idx").write_bytes((root / "BROKEN.idx").read_bytes()[:40])
    write_record(
        root / "OTHER",
        make_record(str(root / "OTHER"), tokenizer_fingerprint="x" * 64, vocab_size=50000, eod_id=5, max_id=95),
    )
    train_here(flags(save=root / "SAVED", train_iters=2))
    train_here(flags(save=root / "DAMAGED", train_iters=1))
    (file,) = (root / "DAMAGED").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    file.write_bytes(file.read_bytes()[:-1])
    (root / "TOKENIZER").mkdir()
    words = {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"}
    (root / "TOKENIZER" / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
    return {name: root / name for name in (*{path.stem for path in root.iterdir()}, "NOWHERE")}


def with_places(words: str, places: dict[str, Path]) -> list[str]:
    split = shlex.split(words)
    for name, place in places.items():
        split = [str(place) + word.removeprefix(name) if word.startswith(name) else word for word in split]
    return split


@pytest.mark.parametrize("given", LATER)
def test_what_is_found_out_later(given: str, places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base: dict[str, Any] = {"train_iters": 1}
    if "--data-" in given and "--tokenizer" not in given:
        base |= {"mock_data": None, "tokenizer_type": "NullTokenizer"}
    if "--tokenizer-" in given or "--vocab-file" in given:
        base["vocab_size"] = None
    for name in [*base, "device", "global_batch_size", "mock_data", "vocab_size"]:
        if "--" + name.replace("_", "-") in shlex.split(given):
            base[name] = None
    lines = refused([*flags(**base), *with_places(given, places)], capsys)
    assert any(LATER[given] in line for line in lines), lines


TOGETHER = {
    "--cuda-graphs": "--cuda-graphs: needs a CUDA device",
    "--kernels auto,-nothing": "no operation 'nothing'",
    "--eod-mask-loss": "--eod-mask-loss: the tokenizer has no end-of-document id",
    "--eval-global-batch-size 3 --eval-iters 1": "--eval-global-batch-size 3: ",
    "--profile --profile-step-start 0 --profile-step-end 1 --profile-ranks 1": "--profile-ranks 1: there is no rank 1",
    "--distributed-backend nccl": "--distributed-backend nccl: needs an accelerator",
    "--load A-FILE": "is not a directory",
}


def test_what_is_found_out_later_is_told_together(places: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Reports mistakes of ranks, device, kernels, tokenizer and checkpoint together; none that only follows."""
    lines = refused([*flags(), *with_places(" ".join(TOGETHER), places)], capsys)
    assert len(lines) == len(TOGETHER), lines
    for part in TOGETHER.values():
        assert sum(part in line for line in lines) == 1, (part, lines)


def test_a_name_of_the_hub_is_told_without_what_it_would_give(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer omits the shape and the tokenizer, which would come from the model."""
    words = "--load Owner/model-7b --finetune --data-path absent --micro-batch-size 1 --train-iters many"
    many, load, data = refused(shlex.split(words), capsys)
    assert "if Owner/model-7b is a model on the Hugging Face Hub" in load
    assert "--train-iters many" in many and "--data-path absent: no such file" in data


@pytest.mark.parametrize(
    ("mistakes", "only"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model A-FILE --eod-mask-loss", "--tokenizer-model"),
        ("--device nonsense --cuda-graphs", "--device nonsense: not a device"),
    ],
)
def test_what_follows_from_a_part_that_is_wrong_is_not_said(
    places: dict[str, Path], capsys: pytest.CaptureFixture[str], mistakes: str, only: str
) -> None:
    base = {"vocab_size": None} if "tokenizer" in mistakes else {"device": None}
    (line,) = refused([*flags(**base), *with_places(mistakes, places)], capsys)
    assert only in line


def test_a_command_that_is_right_is_described_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_here([*flags(), "--print-config", "--tensor-model-parallel-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[model]") == 1 and "planned for 2 x cpu" in shown
    assert pretrain_here([*flags(), "--dry-run"]) == 0
    assert "[model]" not in capsys.readouterr().out


@pytest.mark.parametrize("way", ["--print-config", "--dry-run"])
def test_a_plan_for_gpus_is_made_without_one(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither --device cpu, which contradicts NCCL on every machine (LATER), nor a real run is accepted."""
    monkeypatch.setattr("megatron.distributed.device.accelerator_type", lambda: None)
    command = flags(device=None, distributed_backend="nccl")
    assert pretrain_here([*command, way]) == 0
    shown = capsys.readouterr().out
    assert "--distributed-backend nccl: this machine has no accelerator, so the plan is for CPUs with gloo" in shown
    assert pretrain_here(command) == 2
    assert "--distributed-backend nccl: needs an accelerator" in capsys.readouterr().err


@pytest.mark.parametrize("special", ["a pipe", "/dev/zero"])
@pytest.mark.parametrize(
    "given",
    [
        "--config FILE",
        "--deepspeed --deepspeed_config FILE",
        "--data-args-path FILE",
        "--per-split-data-args-path FILE",
        "--data-path FILE --tokenizer-type NullTokenizer",
        "--vocab-file FILE --merge-file FILE",
        *(
            f"--tokenizer-type {kind} --tokenizer-model FILE"
            for kind in ("HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")
        ),
        "--tokenizer-type BertWordPieceLowerCase --vocab-file FILE",
    ],
)
def test_a_file_without_an_end_is_not_read(
    given: str, special: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file" if special == "a pipe" else Path(special)
    if special == "a pipe":
        os.mkfifo(file)
    mock = "--mock-data" if "tokenizer" in given and "--data-path" not in given else "--mock-data --vocab-size 100"
    command = argv(SMALL.replace("--mock-data --vocab-size 100", mock), given.replace("FILE", str(file)))
    lines = refused(command, capsys)
    assert any(str(file) in line for line in lines), lines
