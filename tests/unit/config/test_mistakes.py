"""Each mistake at the command line gives one readable line that names the setting and the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.config import check_paths, check_settings, check_world
from megatron.config.run import all_settings, build
from megatron.errors import ConfigError
from tests.helpers.other_programs import parse_args
from tests.unit.config.commands import SMALL, argv, without

NULL = "--tokenizer-type NullTokenizer"

# words added to a valid command -> words that the line must contain (setting, then fix)
ADDED = {
    "--num-layer 3": ("--num-layer", "did you mean --num-layers?"),
    "--lerning-rate 1e-3": ("--lerning-rate", "docs/flags.md"),
    "--learning_rate 1e-3": ("--learning_rate", "use --lr instead)"),
    "--max_steps 5": ("--max_steps", "use --train-iters instead)"),
    "-num-layers 3": ("-num-layers", "give --num-layers"),
    "-lr 1": ("-lr", "give --lr"),
    "--split 969 30 1": ("--split 969 30 1: one value", "use --split 969,30,1"),
    "--fp16 true": ("'true' after --fp16", "remove it"),
    "--fp16=maybe": ("--fp16=maybe", "--fp16=false"),
    "stray": ("'stray'", "remove it"),
    "--clip-grad": ("--clip-grad", "needs one value"),
    "--rampup-batch-size 1 2": ("--rampup-batch-size", "needs 3 values, as in --rampup-batch-size VALUE VALUE VALUE;"),
    "--seed many": ("--seed many", "whole number"),
    "--rampup-batch-size 1 1 9000000000000000000": ("--rampup-batch-size 1 1 9000000000000000000", "lower SAMPLES"),
    "--log-interval 1.5": ("--log-interval 1.5", "whole number of at least 1"),
    "--weight-decay nan": ("--weight-decay nan", "finite"),
    "--tensorboard-dir ''": ("--tensorboard-dir", "remove the flag"),
    "--lr-decay-style cosin": ("--lr-decay-style cosin", "did you mean cosine?"),
    "--lr-decay-style cosine_with_restarts": ("restarts are not supported", "use cosine"),
    "--lr-decay-style warmup_stable_decay": ("--lr-decay-style warmup_stable_decay", "use WSD"),
    "--optimizer adamw_torch": ("--optimizer adamw_torch: AdamW", "use adam"),
    "--optimizer adamw_hf": ("--optimizer adamw_hf: AdamW", "use adam"),
    "--optimizer adamw_8bit": ("--optimizer adamw_8bit: 8-bit AdamW", "use adam8bit"),
    "--hidden-dropout 1.5": ("--hidden-dropout 1.5", "below 1"),
    "--adam-beta1 1.0": ("--adam-beta1 1.0", "below 1"),
    "--adam-beta1 -0.1": ("--adam-beta1 -0.1", "at least 0"),
    "--adam-beta2 1.0": ("--adam-beta2 1.0", "below 1"),
    "--min-lr -1e-5": ("--min-lr -1e-05", "at least 0"),
    "--batch-size 3": ("--micro-batch-size 2 and --batch-size 3", "keep one"),
    "--fp16 --min-loss-scale 4 --initial-loss-scale 2": (
        "--min-loss-scale 4.0 is above --initial-loss-scale 2.0",
        "lower",
    ),
    "--fp16 --bf16": ("--fp16 and --bf16", "keep one"),
    "--num-query-groups 3": ("--num-query-groups 3", "divides the heads"),
    "--group-query-attention": ("--group-query-attention", "--num-query-groups N"),
    "--train-samples 100": ("--train-iters 100 and --train-samples 100", "keep one"),
    "--step-batch-size-schedule 0:4": ("--train-iters 100 and --step-batch-size-schedule 0:4", "--train-samples"),
    "--step-batch-size-schedule 0:4 --global-batch-size 4": ("--step-batch-size-schedule 0:4", "--train-samples"),
    "--lr-decay-samples 10": ("--lr-decay-samples 10", "--lr-decay-iters"),
    "--lr-warmup-samples 5": ("--lr-warmup-samples 5", "use --lr-warmup-iters"),
    "--lr-warmup-iters 100": ("--lr-warmup-iters 100", "shorten the warm-up"),
    "--lr-warmup-iters 5 --lr-warmup-fraction 0.1": ("--lr-warmup-fraction 0.1", "keep one"),
    "--lr-warmup-init 1": ("--lr-warmup-init 1.0 is above --lr 0.001", "lower it"),
    "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler": (
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler",
        "keep one",
    ),
    "--min-lr 1e-2": ("--min-lr 0.01 is above --lr 0.001", "lower it"),
    "--lr-decay-style WSD": ("--lr-decay-style WSD", "--lr-wsd-decay-iters"),
    "--lr-decay-style WSD --lr-wsd-decay-iters 101": ("--lr-wsd-decay-iters 101", "shorten it"),
    "--lr-decay-style WSD --lr-wsd-decay-iters 95 --lr-warmup-iters 10": ("--lr-wsd-decay-iters 95", "the 90 iters"),
    "--lr-decay-style WSD --lr-wsd-decay-iters 95 --lr-warmup-fraction 0.1": (
        "--lr-wsd-decay-iters 95",
        "the 90 iters",
    ),
    "--global-batch-size 5": ("--global-batch-size 5", "multiple of"),
    "--rampup-batch-size 2 2 10 --global-batch-size 8": ("--rampup-batch-size 2 2 10", "--train-samples"),
    "--profile --profile-step-end 10": (
        "--profile-step-end 10 is not after --profile-step-start 10",
        "after the start",
    ),
    "--profile-step-start 3": ("--profile-step-start 3", "without --profile; add that"),
    "--profile-step-end 12": ("--profile-step-end 12", "without --profile; add that"),  # its default, but asked for
    "--profile-ranks 0 1": ("--profile-ranks 0 1", "without --profile; add that"),
    "--profile-dir traces": ("--profile-dir traces", "without --profile; add that"),
    "--pytorch-profiler-collect-shapes": ("--pytorch-profiler-collect-shapes", "without --profile; add that"),
    "--pytorch-profiler-collect-callstack": ("--pytorch-profiler-collect-callstack", "without --profile; add that"),
    "--use-pytorch-profiler --profile-ranks 0": ("--profile-ranks 0", "without --profile; add that"),
    "--record-memory-history": ("--record-memory-history", "without --profile; add that"),
    "--profile --profile-step-start 100 --profile-step-end 101": (
        "--profile-step-start 100: --train-iters 100 ends before",
        "lower --profile-step-start",
    ),
    "--profile --memory-snapshot-path m.pickle": ("--memory-snapshot-path m.pickle", "--record-memory-history"),
    "--save out --save-retain-interval 8": ("--save-retain-interval 8: without --save-interval", "add --save-interval"),
    "--split 0,9,1": ("--split 0,9,1", "give training a share"),
    "--ckpt-step 5": ("--ckpt-step 5", "--load"),
    "--finetune": ("--finetune", "--load"),
    "--data-path corpus": ("--mock-data", "keep one"),
    "--split 90,abc": ("--split 90,abc", "969,30,1"),
    "--split 0,0,0": ("--split 0,0,0", "969,30,1"),
    "--swiglu --num-attention-heads 1 --hidden-size 16": ("--hidden-size 16 --swiglu", "give --ffn-hidden-size"),
    "--swiglu --openai-gelu": ("--swiglu and --openai-gelu", "keep one"),
    "--recompute-granularity full": ("--recompute-granularity full", "--recompute-method uniform"),
    "--recompute-method uniform": ("--recompute-method uniform", "--recompute-granularity full"),
    "--recompute-granularity selective --recompute-modules core_attn moe": ("--recompute-modules core_attn moe", "mlp"),
    "--recompute-granularity selective --recompute-modules mlp --num-experts 4 --disable-bias-linear": (
        "--recompute-modules mlp: no layer",
        "give moe",
    ),
    "--recompute-granularity selective --recompute-modules moe moe_act --num-experts 4 --disable-bias-linear": (
        "--recompute-modules moe moe_act: moe includes moe_act",
        "remove moe_act",
    ),
    "--moe-layer-recompute --recompute-modules moe_act --num-experts 4 --disable-bias-linear": (
        "--recompute-modules moe_act: moe of --moe-layer-recompute includes moe_act",
        "remove moe_act",
    ),
    "--recompute-granularity selective --recompute-modules moe_act": ("--recompute-modules moe_act: no", "give mlp"),
    "--recompute-granularity selective --recompute-modules layernorm --norm-placement after": (
        "--recompute-modules layernorm: no layer",
        "give core_attn",
    ),
    "--recompute-granularity selective --recompute-modules layernorm --cpu-offloading-num-layers 1": (
        "--cpu-offloading-num-layers and --recompute-modules layernorm",
        "keep one",
    ),
    "--bf16 --grad-reduce-in-bf16 --ddp-reduce-scatter-with-fp32-accumulation": (
        "--grad-reduce-in-bf16 and --ddp-reduce-scatter-with-fp32-accumulation exclude each other",
        "keep one",
    ),
    "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation word norm": (
        "--grad-reduce-in-bf16 and --ddp-param-name-patterns-for-fp32-local-accumulation word norm exclude",
        "keep one",
    ),
    "--moe-layer-recompute --checkpoint-activations": ("--moe-layer-recompute and --recompute-gran", "keep one"),
    "--recompute-activations --checkpoint-activations": ("--recompute-activations", "keep one"),
    "--kernels fast": ("--kernels fast", "auto, native or ref"),
    "--kernels auto,rope": ("--kernels auto,rope", "--kernels auto,-rope"),
    "--use-flash-attn --attention-backend unfused": ("--attention-backend unfused", "keep one"),
    "--window-size 5": ("--window-size 5", "--window-size LEFT 0"),
    "--use-rope-scaling": ("--use-rope-scaling", "--position-embedding-type rope"),
    "--position-embedding-type rope --rotary-percent 0.2": ("--rotary-percent 0.2", "even number"),
    "--use-rotary-position-embeddings --position-embedding-type learned_absolute": (
        "--use-rotary-position-embeddings",
        "keep one",
    ),
    "--seq-length=64": ("--seq-length 64", "raise --max-position-embeddings"),
    "--weight-decay-incr-style linear": ("--weight-decay-incr-style linear", "--start-weight-decay"),
    "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1": (
        "--end-weight-decay 0.1 is below --start-weight-decay 0.2",
        "can only grow",
    ),
    "--start-weight-decay 0.1": ("--start-weight-decay 0.1", "--weight-decay-incr-style"),
    "--lr-schedule WarmupDecayLR": ("--lr-schedule WarmupDecayLR: needs total_num_steps", "--total-num-steps"),
    "--lr-schedule OneCycle --cycle-max-lr 1e-3": ("needs cycle_min_lr", "--cycle-min-lr"),
    "--cycle-momentum": ("--cycle-momentum: not supported yet", "remove the flag"),
    "--lr-schedule WarmupLR --lr-decay-style cosine": ("--lr-schedule WarmupLR and --lr-decay-style", "keep one"),
    "--optimizer soap": ("--optimizer soap: not supported yet", "use muon or adam"),
    "--optimizer muon --muon-tp-mode blockwise": ("--muon-tp-mode blockwise: updates of each rank", "remove the flag"),
    "--optimizer muon --muon-num-ns-steps 6": ("--muon-num-ns-steps 6 with", "--muon-num-ns-steps 5 or 10"),
    "--optimizer muon --muon-coefficient-type polar_express": ("--muon-num-ns-steps 5 with", "8 or more"),
    "--use-precision-aware-optimizer --exp-avg-dtype fp16": ("--exp-avg-dtype fp16: a scale", "use bf16"),
    "--use-precision-aware-optimizer --exp-avg-sq-dtype fp8": ("--exp-avg-sq-dtype fp8", "use bf16"),
    "--main-params-dtype fp16": ("--main-params-dtype fp16: not supported yet", "remove the flag"),
    "--decoupled-lr 1e-3 --decoupled-min-lr 1e-2": ("--decoupled-min-lr 0.01 is above --decoupled-lr", "lower it"),
    "--position-embedding-type relative": ("--position-embedding-type relative", "use learned_absolute"),
    "--cp-comm-type ring": ("--cp-comm-type ring", "choose from p2p, a2a"),
    "--num-experts 8": ("--num-experts 8: experts have no biases", "--disable-bias-linear"),
    "--fp8-format hybrid": ("--fp8-format hybrid: not supported yet", "remove the flag"),
    "--bf16 --fp8-format hybrid --fp8-margin 1": ("--fp8-format hybrid: not supported yet", "remove the flag"),
    "--virtual-pipeline-model-parallel-size 2": (
        "--virtual-pipeline-model-parallel-size 2: not supported yet",
        "use --num-virtual-stages-per-pipeline-rank 2",
    ),
    "--moe-router-load-balancing-type sinkhorn": ("--moe-router-load-balancing-type sinkhorn", "use seq_aux_loss"),
    "--moe-shared-expert-gate": ("--moe-shared-expert-gate: not supported yet", "remove the flag"),
    "--fp4-format e2m1": ("--fp4-format e2m1: not supported", "--bf16"),
    "--use-sharp": ("--use-sharp: not supported", "data parallelism has no such option"),
    "--topk 0": ("--topk 0: --moe-router-topk 0: out of range", "give a whole number of at least 1"),
    "--deepspeed --deepspeed_config ds.json": (
        "--deepspeed_config ds.json: no such file",
        "give the path of a JSON file",
    ),
    "--zero-stage 3 --cuda-graphs": ("--zero-stage 3 and --cuda-graphs exclude each other", "keep one"),
    "--use-torch-fsdp2 --compile": ("--use-torch-fsdp2 and --compile exclude each other", "keep one"),
    "--zero-stage 3 --remote-device nvme": ("--remote-device nvme: parameters are kept in host memory", "use cpu"),
    "--zero-stage 3 --remote-device disk": ("--remote-device disk", "choose from none, cpu, nvme"),
    "--zero-stage 2 --bf16 --store-param-remainders": (
        "--zero-stage 2 and --store-param-remainders exclude each other",
        "keep one",
    ),
    "--zero-stage 2 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble": (
        "--zero-stage 2 and --pipeline-schedule zero-bubble exclude each other",
        "keep one",
    ),
    "--data-impl object": ("--data-impl object: not supported", "mmap or infer or lazy or cached"),
    "--retro-project-dir x": ("--retro-project-dir", "remove"),
    "--warmup 100": ("--warmup 100", "--lr-warmup-iters"),
    "--model gpt2-124mb": ("--model gpt2-124mb", "did you mean gpt2-124m?"),
    "--config nowhere.yaml": ("--config nowhere.yaml", "path of a YAML file"),
    "--tokenizer-type GPT2BPE": ("--tokenizer-type GPT2BPE", "GPT2BPETokenizer"),
    "--tokenizer-type HuggingFaceTokenizer": ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model"),
    "--tokenizer-type MultimodalTokenizer": ("--tokenizer-type MultimodalTokenizer", "not a tokenizer for GPT"),
    "--tokenizer-type SFTTokenizer": ("--tokenizer-type SFTTokenizer needs", "--tokenizer-model: not"),
    "--sft": ("--sft: has no effect without data files", "remove this setting"),
    "--sft --reset-position-ids": ("--sft and --reset-position-ids exclude each other", "keep one"),
    "--sft --fim-data": ("--sft and --fim-data exclude each other", "keep one"),
    "--sft --sft-tokenizer-prompt-format chatml": ("--sft-tokenizer-prompt-format chatml", "nemotron-h-aligned"),
    "--save x --non-persistent-save-interval 5": ("--non-persistent-save-interval 5: the place", "-ckpt-type"),
    "--save x --non-persistent-ckpt-type local": ("--non-persistent-ckpt-type local: needs", "-local-ckpt-dir"),
    "--save x --non-persistent-ckpt-type in_memory": ("--non-persistent-ckpt-type in_memory: ", "/dev/shm/NAME"),
    "--save x --non-persistent-ckpt-type global --non-persistent-global-ckpt-dir x": (
        "is the same as --save",
        "another",
    ),
    "--save x --save-interval 4 --save-retain-interval 6": ("--save-retain-interval 6", "--save-interval 4"),
    "--no-position-embedding --position-embedding-type learned_absolute": ("--no-position-embedding", "keep one"),
    "--loss-scale 0 --fp16": ("--loss-scale 0", "above 0"),
}


def refused(command: list[str], *said: str) -> None:
    """Checks for one line with all these words; another mistake in the command has its own line."""
    with pytest.raises(ConfigError) as caught:
        parse_args(command)
    assert caught.value.exit_code == 2
    lines = caught.value.lines
    assert all(line and "\n" not in line for line in lines)
    assert any(all(words in line for words in said) for line in lines), lines


@pytest.mark.parametrize("mistake", ADDED)
def test_a_mistake_gives_one_line(mistake: str) -> None:
    setting, way_out = ADDED[mistake]
    refused(argv(SMALL, mistake), setting, way_out)


REQUIRED = {
    "--num-layers": "--model preset",
    "--micro-batch-size": "give them",
    "--seq-length": "give them",
    "--max-position-embeddings": "give them",
    "--lr": "--lr 1e-4",
    "--train-iters": "--skip-train",
    "--mock-data": "tools/preprocess_data.py",
    "--vocab-size": "--vocab-size N",
}


@pytest.mark.parametrize(("missing", "way_out"), REQUIRED.items())
def test_what_is_required_is_named(missing: str, way_out: str) -> None:
    refused(argv(without(SMALL, missing)), missing if missing != "--mock-data" else "--data-path", way_out)


CHANGED = [
    ("--hidden-size 64", "--hidden-size 66", "--hidden-size 66", "--kv-channels"),
    ("--seq-length 32", "--seq-length 33", "--max-position-embeddings 32", "to 33"),
    ("--num-layers 2", "--num-layers 0", "--num-layers 0", "at least 1"),
    ("--num-layers 2", "--num-layers -2", "--num-layers -2", "at least 1"),
    ("--mock-data", "--data-path a b 0.5", "--data-path a b 0.5", "WEIGHT PREFIX"),
    ("--mock-data", "--data-path 0.5 a b c", "--data-path 0.5 a b c", "WEIGHT PREFIX"),
    ("--mock-data", "--data-path 0 a 1 b", "--data-path 0 a 1 b", "positive"),
    ("--mock-data", "--valid-data-path a", "--valid-data-path a", "--train-data-path"),
    ("--mock-data", "--data-path a --valid-data-path b", "--valid-data-path b", "keep one"),
    ("--mock-data", "--train-data-path a --split 9,1,0", "--split 9,1,0", "remove --split"),
    ("--mock-data --vocab-size 100", "--data-path a", "--vocab-file and --merge-file", "vocab.json"),
    ("--mock-data --vocab-size 100", "--data-path a --vocab-file v", "--merge-file", "merges.txt"),
    ("--vocab-size 100", NULL, "--tokenizer-type NullTokenizer", "--vocab-size"),
]


@pytest.mark.parametrize(("old", "new", "setting", "way_out"), CHANGED)
def test_a_wrong_value_gives_one_line(old: str, new: str, setting: str, way_out: str) -> None:
    assert old in SMALL
    refused(argv(SMALL.replace(old, new)), setting, way_out)


def test_a_checkpoint_that_gave_nothing_leaves_the_requirements() -> None:
    command = without(SMALL, "--num-layers", "--hidden-size", "--vocab-size")
    config = parse_args(argv(command, "--load x --use-checkpoint-args"))
    with pytest.raises(ConfigError, match=r"--num-layers, --hidden-size: required and not given"):
        check_settings(config)


def test_batch_sizes_must_fit_the_ranks() -> None:
    config = parse_args(argv(SMALL, "--global-batch-size 6"))
    check_world(config, 3)
    with pytest.raises(
        ConfigError, match=r"--global-batch-size 6 .* 2 data-parallel ranks; use --global-batch-size 4 or 8 .*4"
    ):
        check_world(config, 2)
    ramp = "--rampup-batch-size 2 2 100 --global-batch-size 8"
    config = parse_args(argv(SMALL.replace("--train-iters", "--train-samples"), ramp))
    check_world(config, 1)
    with pytest.raises(ConfigError, match=r"--rampup-batch-size 2 2 100.* multiples of 4"):
        check_world(config, 2)


def test_a_trace_that_is_switched_off_keeps_its_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("profile: {profile: true, profile_step_start: 3}")
    assert not parse_args(argv(SMALL, f"--config {file} --profile=false")).profile.profile


def test_profiled_ranks_must_exist() -> None:
    config = parse_args(argv(SMALL, "--profile --profile-ranks 0 1"))
    check_world(config, 2)
    with pytest.raises(ConfigError, match=r"--profile-ranks 0 1: there is no rank 1; the ranks are 0 to 0"):
        check_world(config, 1)


@pytest.mark.parametrize("flag", [setting.spelling for setting in all_settings() if setting.flag.path])
@pytest.mark.parametrize(("path", "reason"), [("n" * 5000, "File name too long"), ("a\0b", "embedded null byte")])
def test_a_path_that_no_file_can_have(flag: str, path: str, reason: str) -> None:
    """A file of settings may contain a null byte."""
    values = {flag.lstrip("-").replace("-", "_"): (path,) if flag.endswith("data-path") else path}
    with pytest.raises(ConfigError, match=rf"{flag} .*{reason}; name another path"):
        check_paths(build(values))


def test_files_must_exist(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("data")
    for name in ("corpus.idx", "corpus.bin", "vocab.json"):
        (folder / name).write_bytes(b"")
    data = f"--data-path {folder}/corpus --vocab-file {folder}/vocab.json"
    command = SMALL.replace("--mock-data --vocab-size 100", data)
    with pytest.raises(ConfigError, match=r"--merge-file .*merges.txt: no such file"):
        check_paths(parse_args(argv(command, f"--merge-file {folder}/merges.txt")))
    (folder / "merges.txt").write_bytes(b"")
    check_paths(parse_args(argv(command, f"--merge-file {folder}/merges.txt")))
    for place in ("/", ".", "..", "//"):  # they have no name
        with pytest.raises(ConfigError, match=r"--merge-file [/.]+: is a directory"):
            check_paths(parse_args(argv(command, f"--merge-file {place}")))
    wrong = command.replace("corpus ", "corpus.bin ")
    with pytest.raises(
        ConfigError, match=r"--data-path .*corpus.bin.idx: no such file; give the prefix without its suffix: .*corpus$"
    ):
        check_paths(parse_args(argv(wrong, f"--merge-file {folder}/merges.txt")))
    os.mkfifo(folder / "pipe")
    with pytest.raises(ConfigError, match=r"--merge-file .*pipe: not a regular file"):
        check_paths(parse_args(argv(command, f"--merge-file {folder}/pipe")))
    with pytest.raises(ConfigError, match=r"--merge-file .*: is a directory; name the file"):
        check_paths(parse_args(argv(command, f"--merge-file {folder}")))
    with pytest.raises(ConfigError, match=r"--data-cache-path .*vocab.json: is a file"):
        check_paths(parse_args(argv(SMALL, f"--data-cache-path {folder}/vocab.json")))
    with pytest.raises(ConfigError, match=r"--tensorboard-dir .*vocab.json/a/b: .*vocab.json is a file"):
        check_paths(parse_args(argv(SMALL, f"--tensorboard-dir {folder}/vocab.json/a/b")))
    with pytest.raises(ConfigError, match=r"--metrics-jsonl .*: is a directory"):
        check_paths(parse_args(argv(SMALL, f"--metrics-jsonl {folder}")))
    with pytest.raises(ConfigError, match=r"--save .*: is a file"):
        check_paths(parse_args(argv(SMALL, f"--save {folder}/vocab.json --save-interval 1")))
    model = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/nowhere"
    with pytest.raises(ConfigError, match=r"--tokenizer-model .*nowhere: no such"):
        check_paths(parse_args(argv(without(SMALL, "--vocab-size"), model)))


@pytest.mark.parametrize("flag", ["--data-path", "--valid-data-path"])
def test_a_source_behind_a_url_is_told_how_to_be_fetched(flag: str) -> None:
    given = [flag, "0.5", "https://me:pw@h.org/a/web?key=1", "0.5", "s3://b/code"]
    other = [] if flag == "--data-path" else ["--train-data-path", "s3://b/code"]
    command = [*argv(without(SMALL, "--mock-data", "--vocab-size"), NULL, "--vocab-size 100"), *given, *other]
    with pytest.raises(ConfigError) as error:
        check_paths(parse_args(command))
    lines = str(error.value).splitlines()
    assert f"{flag} s3://b/code: training reads only local files; copy it to each node first (python " in str(
        error.value
    )
    assert any("--input s3://b/code --output-prefix code) and give code" in line for line in lines)
    assert "pw" not in str(error.value) and "no such file" not in str(error.value) and "h.org/a/web" in str(error.value)


TEXTS = {
    '{"content": "some words", "path": "a.py"}\n': "--json-keys content ",
    '{"path": "a.py", "text": "x"}\n': "--output-prefix {folder}/corpus --tokenizer-type",
    '{"path": "a.py", "content": "' + "word " * 20_000 + '"}\n': "--json-keys content ",
    "plain words\n": "--output-prefix {folder}/corpus --tokenizer-type",
}


@pytest.mark.parametrize("content", TEXTS, ids=range(len(TEXTS)))
def test_text_instead_of_a_dataset_prints_the_command_that_makes_one(content: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text(content)
    command = argv(
        without(SMALL, "--mock-data"), f"--data-path {tmp_path}/corpus.json", "--tokenizer-type NullTokenizer"
    )
    with pytest.raises(ConfigError) as raised:
        check_paths(parse_args(command))
    said = str(raised.value)
    assert said.startswith(f"--data-path {tmp_path}/corpus.json: this is text, not a dataset; make one: python ")
    assert ("json.dumps" in said and "corpus.json.jsonl && python tools/" in said) == content.startswith("plain")
    assert TEXTS[content].format(folder=tmp_path) in said and "--vocab-size 100 --append-eod" in said


def test_names_of_the_hub_print_the_command_that_downloads(tmp_path: Path) -> None:
    given = "--data-path HuggingFaceFW/fineweb --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2"
    command = argv(without(SMALL, "--mock-data", "--vocab-size"), given)
    with pytest.raises(ConfigError) as raised:
        check_paths(parse_args(command))
    data, tokenizer = sorted(raised.value.lines)
    assert "hf download HuggingFaceFW/fineweb --repo-type dataset --local-dir fineweb" in data
    assert "hf download gpt2 --include 'tokenizer*'" in tokenizer
    (tmp_path / "weights.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xfe")
    with pytest.raises(ConfigError, match="this is not a dataset"):
        check_paths(parse_args(argv(without(SMALL, "--mock-data"), f"--data-path {tmp_path}/weights.npy", NULL)))


@pytest.mark.parametrize("given", ["mine/story", "mine/story.txt"])
def test_the_output_prefix_or_the_text_of_a_dataset_is_told_its_name(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    for name in ("story.txt", "story_text_document.idx", "story_text_document.bin"):
        Path("mine", name).touch()
    with pytest.raises(ConfigError, match=r"did you mean mine/story_text_document\?$"):
        check_paths(parse_args(argv(without(SMALL, "--mock-data"), f"--data-path {given}", NULL)))
    with pytest.raises(ConfigError, match=r"mine/other.idx: no such file; give the prefix"):  # no name of the Hub
        check_paths(parse_args(argv(without(SMALL, "--mock-data"), "--data-path mine/other", NULL)))
