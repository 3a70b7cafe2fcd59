"""Command lines of Megatron-LM's scripts of 2026: flags that choose an implementation are accepted with a notice."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megatron.config import megatron_deepspeed_flags, megatron_lm_flag_table
from megatron.config.flag import Setting
from megatron.config.megatron_lm_flags import compat_flags, retired_flags
from megatron.config.run import all_settings
from megatron.config.sources import canonical_spellings, spelling_table
from megatron.errors import ConfigError
from tests.helpers.distributed import run_ranks
from tests.helpers.other_programs import parse_args
from tests.helpers.runs import Recorder, flags, make_parts, train_here

DENSE = """--transformer-impl transformer_engine --use-mcore-models --position-embedding-type rope --rotary-percent 1.0
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 2 --attention-dropout 0.0 --hidden-dropout 0.0 --sequence-parallel
    --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion --overlap-grad-reduce --async-save
    --use-persistent-ckpt-worker --ckpt-format torch_dist --dist-ckpt-strictness log_all --split '99,1,0'
    --dist-ckpt-optim-fully-reshardable --cross-entropy-loss-fusion --cross-entropy-fusion-impl te --manual-gc
    --distributed-backend gloo --rerun-mode validate_results --logging-level 40 --te-rng-tracker --log-params-norm"""
EXPERTS = f"""{DENSE} --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-permute-fusion
    --moe-router-fusion --moe-enable-deepep --overlap-moe-expert-parallel-comm --delay-wgrad-compute"""
PLAIN = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "split": "99,1,0",
}
PLAIN_EXPERTS = {**PLAIN, "num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2}


@pytest.mark.parametrize(("script", "plain"), [(DENSE, PLAIN), (EXPERTS, PLAIN_EXPERTS)], ids=["dense", "experts"])
def test_a_choice_of_implementation_is_said_and_changes_nothing(script: str, plain: dict[str, object]) -> None:
    argv = [*flags(), *(word.replace("'", '"') for word in script.split())]
    said = parse_args(argv).notices
    for spelling in ("--transformer-impl", "--use-persistent-ckpt-worker", "--ckpt-format", "--te-rng"):
        assert sum(line.startswith(spelling) for line in said) == 1, (spelling, said)
    assert sum(line.startswith("--sequence-parallel: has no effect without several") for line in said) == 1
    ours, wanted = train_here(argv), train_here(flags(**plain))
    assert [each["lm_loss"] for each in ours["records"]] == [each["lm_loss"] for each in wanted["records"]]
    assert all(torch.equal(tensor, wanted["weights"][name]) for name, tensor in ours["weights"].items())


COMMON = """--transformer-impl transformer_engine --use-mcore-models --no-gradient-accumulation-fusion --async-save
    --attention-softmax-in-fp32 --use-persistent-ckpt-worker --ckpt-format torch_dist --dist-ckpt-strictness log_all
    --dist-ckpt-optim-fully-reshardable --deterministic-mode --distributed-backend gloo --log-params-norm
    --split 949,50,1 --log-num-zeros-in-grad --clip-grad 1.0 --weight-decay 1e-2 --lr-decay-style cosine
    --lr-warmup-fraction 0.01 --lr-decay-iters 320000 --min-lr 1e-05 --verify-integrity
    --attention-dropout 0.0 --hidden-dropout 0.0"""
CALLED_OFF = "--ddp-average-in-collective --calculate-per-token-loss --ckpt-fully-parallel-load"
# (ranks, what a script of this kind adds, what of it changes the numbers of one process)
KINDS = {
    "fp16": (1, "--fp16 --apply-query-key-layer-scaling --transformer-impl local --attention-backend unfused",
             "--fp16 --apply-query-key-layer-scaling"),
    "bf16": (1, f"--bf16 --attention-backend flash --cross-entropy-loss-fusion --test-mode {CALLED_OFF}", "--bf16"),
    "null tokenizer": (1, "--tokenizer-type NullTokenizer --no-ckpt-fully-parallel-save",
                       "--tokenizer-type NullTokenizer"),
    "tensor parallel": (2, "--tensor-model-parallel-size 2 --sequence-parallel --use-tp-pp-dp-mapping", ""),
    "context parallel": (2, f"--context-parallel-size 2 --attention-backend flash {CALLED_OFF}", ""),
    "interleaved": (2, """--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4
             --overlap-p2p-communication-warmup-flush --microbatch-group-size-per-virtual-pipeline-stage 4
             --defer-embedding-wgrad-compute --wgrad-deferral-limit 2 --untie-embeddings-and-output-weights""",
                    "--num-layers 4 --untie-embeddings-and-output-weights"),
    "counted stages": (2, """--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --bf16=false
             --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split""", ""),
}  # fmt: skip
PLAIN_KIND = """--attention-dropout 0 --hidden-dropout 0 --clip-grad 1.0 --weight-decay 1e-2 --lr-decay-style cosine
    --lr-warmup-fraction 0.01 --lr-decay-iters 320000 --min-lr 1e-05 --split 949,50,1"""


def losses_of(argv: list[str], rank: int = 0, ranks: int = 1) -> list[float]:
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=ranks)
    with parts:
        parts.trainer.fit()
    return [record["lm_loss"] for record in records]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_script_trains_as_the_plain_command_does(kind: str) -> None:
    ranks, given, kept = KINDS[kind]
    small = flags(train_iters=3, **({"num_layers": None} if "--num-layers " in given else {}))
    script = [*small, *COMMON.split(), *given.split()]
    plain = losses_of([*small, *PLAIN_KIND.split(), *kept.split()])
    whole = losses_of(script) if ranks == 1 else None
    found = [whole] if whole else run_ranks(ranks, lambda rank: losses_of(script, rank, ranks))
    for losses in found:  # other kernels of the same formulas: the last bits may differ
        assert losses == pytest.approx(plain, rel=1e-3 if "16" in kept else 1e-5)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("--tiktoken-pattern v2", "--tiktoken-pattern v2: has no effect without --tokenizer-type TikTokenizer"),
        ("--exit-signal SIGUSR2", "--exit-signal SIGUSR2: has no effect without --exit-signal-handler"),
        ("--apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm: has no effect without --qk-layernorm"),
        ("--eval-micro-batch-size 2", "--eval-micro-batch-size 2: has no effect without --eval-iters above 0"),
        ("--validation-set-names a b", "--validation-set-names a b: has no effect without --multiple-validation-sets"),
        ("--test-mode", "--test-mode: training runs no tests; tools/check_layout.py compares layouts"),
        (
            "--check-weight-hash-across-dp-replicas-interval 5",
            "--check-weight-hash-across-dp-replicas-interval 5: taken as --check-replicas-every",
        ),
        (
            "--num-experts 4 --disable-bias-linear --moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax: has no effect without --moe-router-score-function softmax",
        ),
    ],
)
def test_what_has_no_effect_is_said(given: str, line: str) -> None:
    assert line in parse_args([*flags(), *given.split()]).notices


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        ("--override-ckpt-iteration 100", "without --load without --finetune; add that"),
        ("--null-tokenizer-pad-id 3", "samples are never padded; remove the flag"),
        ("--no-weight-decay-cond-type qwen3_next", "use --apply-wd-to-qk-layernorm"),
        ("--exit-signal SIGKILL", "no such choice"),
    ],
)
def test_what_is_refused_names_its_way_out(given: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(way_out)):
        parse_args([*flags(), *given.split()])


def test_names_of_special_tokens_may_be_given_as_main_spells_them() -> None:
    config = parse_args(
        [*flags(), "--tokenizer-special-tokens", "<unk>", "<s>", "</s>", "--null-tokenizer-pad-id", "-1"]
    )
    assert config.tokenizer.tiktoken_special_tokens == ("<unk>", "<s>", "</s>")


def test_what_changes_a_result_is_still_refused() -> None:
    for flag in (
        "--multi-latent-attention",
        "--fp8-format hybrid",
        "--mtp-num-layers 1",
    ):
        with pytest.raises(ConfigError, match=f"{flag}: not supported yet"):
            parse_args([*flags(), *flag.split()])


def test_every_way_out_names_flags_that_exist_and_work() -> None:
    working = {setting.name for setting in all_settings() if setting.flag.status not in ("later", "never")}
    retired = [flag for flag in retired_flags().values() if flag.values.keys() <= working]  # others are refused
    notes = [(flag.spelling, flag.note) for flag in (*compat_flags().values(), *retired)]
    for setting in all_settings():
        notes += [(setting.spelling, text) for text in (setting.flag.note, *(setting.flag.refused or {}).values())]
    known, table = canonical_spellings(), spelling_table()
    wrong = []
    for spelling, note in notes:
        for named in re.findall(r"--[a-z][\w-]*(?!\*)\b(?![-*])", note):
            target = table.get(known.get(named.replace("_", "-"), ""))
            if not isinstance(target, Setting) or target.flag.status in ("later", "never"):
                wrong.append((spelling, named, note))
    assert not wrong, "\n".join(map(str, wrong))


def test_no_flag_stands_twice_in_the_table() -> None:
    words: list[str] = []
    for table in (megatron_lm_flag_table, megatron_deepspeed_flags):
        groups = (table.LATER, table.NEVER, table.NO_OPS)
        words += [word for group in groups for text in group.values() for word in text.split()]
        words += table.RETIRED
    words = [word.partition("=")[0] for word in words]
    assert len(words) == len(set(words))
