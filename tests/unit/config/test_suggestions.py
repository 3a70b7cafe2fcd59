"""Two hundred typed names with their suggestions: another program's setting, a close spelling, or none."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from megatron.config.other_programs import answers
from megatron.config.sources import canonical_spellings, spelling_table, unknown_setting
from megatron.errors import ConfigError
from tests.helpers.other_programs import parse_args
from tests.unit.config.commands import SMALL, argv

COUNTED = "torchrun starts the processes: torchrun --nproc_per_node N pretrain_gpt.py"
ELSEWHERE = {
    "--tp": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--cp": "--context-parallel-size",
    "--ep": "--expert-model-parallel-size",
    "--sp": "--sequence-parallel",
    "--bs": "--micro-batch-size",
    "--zero": "--zero-stage",
    "--precision": "--bf16 or --fp16",
    "--mixed-precision": "--bf16 or --fp16",
    "--dtype": "--bf16 or --fp16",
    "--resume": "--load",
    "--resume_from_checkpoint": "--load",
    "--dataset": "--data-path",
    "--dataset_name": "--data-path",
    "--train_file": "--data-path",
    "--model-name-or-path": "--load FOLDER --finetune",
    "--wandb": "--wandb-project",
    "--report_to": "--wandb-project, --tensorboard-dir or --metrics-jsonl",
    "--run_name": "--wandb-exp-name",
    "--output_dir": "--save",
    "--logging_steps": "--log-interval",
    "--save_steps": "--save-interval",
    "--save_total_limit": "--save-retain-last",
    "--eval_steps": "--eval-interval",
    "--learning_rate": "--lr",
    "--warmup_steps": "--lr-warmup-iters",
    "--warmup_ratio": "--lr-warmup-iters, with ceil(ratio x steps) for equal rates",
    "--lr_scheduler_type": "--lr-decay-style",
    "--max_grad_norm": "--clip-grad",
    "--gradient_checkpointing": "--recompute-granularity",
    "--per_device_train_batch_size": "--micro-batch-size",
    "--per_device_eval_batch_size": "--eval-micro-batch-size",
    "--max_steps": "--train-iters",
    "--optim": "--optimizer",
    "--adam_epsilon": "--adam-eps",
    "--torch_compile": "--compile",
    "--fsdp": "--zero-stage 3",
    "--ddp_timeout": "--distributed-timeout-minutes",
    "--ddp_bucket_cap_mb": "--ddp-bucket-size",
    "--dataloader_num_workers": "--num-workers",
    "--full_determinism": "--deterministic-mode",
    "--use_cpu": "--device cpu",
    "--training.seq_len": "--seq-length",
    "--training.local_batch_size": "--micro-batch-size",
    "--training.steps": "--train-iters",
    "--training.max_norm": "--clip-grad",
    "--parallelism.tensor_parallel_degree": "--tensor-model-parallel-size",
    "--parallelism.pipeline_parallel_degree": "--pipeline-model-parallel-size",
    "--parallelism.data_parallel_shard_degree": "--zero-stage 3",
    "--lr_scheduler.warmup_steps": "--lr-warmup-iters",
    "--metrics.log_freq": "--log-interval",
    "--checkpoint.interval": "--save-interval",
    "--train_micro_batch_size_per_gpu": "--micro-batch-size",
    "--pipe_parallel_size": "--pipeline-model-parallel-size",
    "--rotary_pct": "--rotary-percent",
    "--rotary_emb_base": "--rotary-base",
    "--gradient_clipping": "--clip-grad",
    "--sequence_len": "--seq-length",
    "--batch_accumulation_per_replica": "--gradient-accumulation-steps",
    "--checkpoints_path": "--save",
    "--checkpoint_interval": "--save-interval",
    "--train_steps": "--train-iters",
    "--tokenizer_name_or_path": "--tokenizer-model",
    "--n_layer": "--num-layers",
    "--n_head": "--num-attention-heads",
    "--n_embd": "--hidden-size",
    "--block_size": "--seq-length",
    "--megatron_lm_tp_degree": "--tensor-model-parallel-size",
    "--offload_optimizer_device": "--optimizer-cpu-offload",
    "--num_hidden_layers": "--num-layers",
    "--intermediate_size": "--ffn-hidden-size",
    "--rope_theta": "--rotary-base",
    "--grad_accum_steps": "--gradient-accumulation-steps",
    "--config_file": "--config",
    "--tf32": "--allow-tf32",
    "--logging_strategy": "--log-interval",
}
SENTENCES = {
    "--dp": "the data-parallel size is ranks / (TP x PP x CP)",
    "--gpus": COUNTED,
    "--num-gpus": COUNTED,
    "--nproc": COUNTED,
    "--num_processes": COUNTED,
    "--devices": COUNTED,
    "--nnodes": "torchrun connects the machines",
    "--num_nodes": "torchrun connects the machines",
    "--world-size": "torchrun sets the number of ranks",
    "--master_addr": "give torchrun the address",
    "--epochs": "the length is in steps or samples",
    "--num-train-epochs": "the length is in steps or samples",
    "--num_epochs": "the length is in steps or samples",
    "--fp8": "fp8 is not supported yet",
    "--load_in_4bit": "not supported; train all weights",
    "--lora_r": "not supported; train all weights",
    "--push_to_hub": "tools/convert_checkpoint.py --to hf",
    "--do_train": "training is the default",
    "--attn_implementation": "each device has its default attention",
    "--sample_packing": "documents are always packed",
    "--save_strategy": "--save-interval",
    "--eval_strategy": "--eval-interval",
    "--load_best_model_at_end": "the best model is not tracked",
    "--prediction_loss_only": "evaluation keeps only the loss",
    "--overwrite_output_dir": "older steps in --save are renamed",
    "--disable_tqdm": "no progress bar is shown",
}
TYPOS = {
    "--nm-layers": "--num-layers",
    "--num-layer": "--num-layers",
    "--hiden-size": "--hidden-size",
    "--hidden-sise": "--hidden-size",
    "--num-attention-head": "--num-attention-heads",
    "--seq-lenght": "--seq-length",
    "--micro-bath-size": "--micro-batch-size",
    "--microbatch-size": "--micro-batch-size",
    "--global-batch": "--global-batch-size",
    "--train-itrs": "--train-iters",
    "--train-iter": "--train-iters",
    "--weigth-decay": "--weight-decay",
    "--weight-decy": "--weight-decay",
    "--clip-gard": "--clip-grad",
    "--adam-bta1": "--adam-beta1",
    "--data-pth": "--data-path",
    "--dta-path": "--data-path",
    "--tokenizer-modle": "--tokenizer-model",
    "--vocab-fiel": "--vocab-file",
    "--merge-fil": "--merge-file",
    "--sve": "--save",
    "--lod": "--load",
    "--laod": "--load",
    "--save-intervall": "--save-interval",
    "--eval-itrs": "--eval-iters",
    "--log-intervl": "--log-interval",
    "--tensor-parallel-sise": "--tensor-model-parallel-size",
    "--sequence-paralel": "--sequence-parallel",
    "--router-topk": "--moe-router-topk",
    "--lr-warmp-iters": "--lr-warmup-iters",
    "--lr-decay-styl": "--lr-decay-style",
    "--recompute-granularty": "--recompute-granularity",
    "--use-distributed-optimiser": "--use-distributed-optimizer",
    "--mock-dta": "--mock-data",
    "--swiglo": "--swiglu",
    "--num-expert": "--num-experts",
    "--distributed-backnd": "--distributed-backend",
    "--init-method": "--init-method-std",
}
NOTHING = """
    --aim-repo --api-key --attention-config --audio-encoder --bar --baz-size --beam-search --color --color-jitter
    --comet-key --completions --converters --crop --cutmix --depth --disable-y --dry --email --enable-x --entity
    --epsilon-high --eval-table-size --foo --force --gamma --gmlp-attn-dim --gradient --gres --height --host
    --image-size --image-token --input --kl-coef --learning --logging --max-foo --mem --min-foo --mixup
    --mlflow-uri --name --no-foo --num-foos --num-generations --output --partition --plugh --port --queue --quiet
    --ref-model --region --reward-model --reward-weights --rpe-num-buckets --s5cmd-path --sampler
    --scheduler-gamma --sf --slurm-account --soft-prompt-tuning --sparsity-config --spec-augment --spot-instances
    --tags --team --threads-per --token --tp-mode --url --use-plugh --use-shared-fs --user --verbose --vf-coef
    --wd-mask --wandb-watch --width --xp --xyzzy --xyzzy-interval --yes
"""
"""Names without an answer."""


def hint(typed: str) -> str:
    line = str(unknown_setting(typed))
    match = re.match(rf"{re.escape(typed)}: unknown setting(?: \((.*)\))?; see --help or docs/flags.md$", line)
    assert match, line
    return match[1] or ""


def test_two_hundred_names_of_which_a_third_have_no_answer() -> None:
    count = len(ELSEWHERE) + len(SENTENCES) + len(TYPOS) + len(NOTHING.split())
    assert count >= 200 and len(NOTHING.split()) * 3 >= count


@pytest.mark.parametrize("typed", ELSEWHERE)
def test_the_setting_of_another_program(typed: str) -> None:
    assert hint(typed) == f"use {ELSEWHERE[typed]} instead"


@pytest.mark.parametrize("typed", SENTENCES)
def test_what_another_program_counts_or_does(typed: str) -> None:
    assert SENTENCES[typed] in hint(typed) and "did you mean" not in hint(typed)


@pytest.mark.parametrize("typed", TYPOS)
def test_a_misspelt_flag(typed: str) -> None:
    assert hint(typed) == f"did you mean {TYPOS[typed]}?"


@pytest.mark.parametrize("typed", NOTHING.split())
def test_no_suggestion_rather_than_a_misleading_one(typed: str) -> None:
    assert hint(typed) == ""


def test_answers_name_flags_that_exist() -> None:
    for name, answer in answers().items():
        assert f"--{name}" not in canonical_spellings(), f"{name} is a setting of this program"
        if answer.startswith("--"):
            assert set(re.findall(r"--[\w-]+", answer)) <= set(spelling_table()), answer


def test_the_fields_of_trainer_never_mislead() -> None:
    """A field has an entry, is a flag here, or gets no suggestion; a guess would mean something else."""
    transformers = pytest.importorskip("transformers")
    fields = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    unknown = [name for name in fields if f"--{name.replace('_', '-')}" not in canonical_spellings()]
    assert len(unknown) > 80
    assert not [name for name in unknown if "did you mean" in hint(f"--{name}")]


def test_unknown_flags_are_reported_alone() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_args(["--nm-layers", "2", "--fooo", "--lr", "fast"])
    assert [line.partition(":")[0] for line in raised.value.lines] == ["--nm-layers", "--fooo"]


def test_a_stray_word_is_an_unexpected_argument() -> None:
    with pytest.raises(ConfigError, match=r"unexpected argument 'hello' after --lr 0.1: remove it, or quote it"):
        parse_args([*argv(SMALL), "--lr", "0.1", "hello"])


@pytest.mark.parametrize("before", [[], ["--lr", "0.1"]])
@pytest.mark.parametrize("name", ["mine.yaml", "mine.yml", "mine.json"])
def test_a_settings_file_without_its_flag_is_reported_alone(name: str, before: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError) as raised:
        parse_args([*before, f"{tmp_path}/{name}", "--micro-batch-size", "1"])
    after = " after --lr 0.1" if before else ""
    meant = f"did you mean --config {tmp_path}/{name}?"
    assert raised.value.lines == (f"unexpected argument '{tmp_path}/{name}'{after}: {meant}",)
