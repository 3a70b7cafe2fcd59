"""The trainings that `compare_commits.py` compares: every axis, stage, precision, optimizer and place of its state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 16 --save-interval 2 --lr 1e-2 --lr-decay-style cosine "
    "--vocab-size 250 --make-vocab-size-divisible-by 16 --mock-data --num-workers 0 --log-interval 1 --eval-interval 2 "
    "--eval-iters 1 --device cpu --cpu-threads 1"
)


@dataclass(frozen=True)
class Row:
    name: str
    ranks: int
    words: str = ""

    def flags(self, output: Path) -> list[str]:
        """OUTPUT stands for the run's folder."""
        length = [] if "--train-samples" in self.words else ["--train-iters", "4"]
        return [*length, *(word.replace("OUTPUT", str(output)) for word in self.words.split())]


LLAMA = (
    "--normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
MOE = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
TP, PP, CP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"
BF16, FP16 = "--bf16", "--fp16 --initial-loss-scale 1024"

TABLE = (
    Row("one rank", 1),
    Row("llama", 1, f"{LLAMA} {BF16}"),
    Row("fp16", 1, FP16),
    Row("dp", 2),
    Row("tp", 2, TP),
    Row("tp sp llama", 2, f"{TP} --sequence-parallel {LLAMA} {BF16}"),
    Row("pp", 2, f"{PP} --pipeline-schedule 1f1b"),
    Row("pp untied", 2, f"{PP} --untie-embeddings-and-output-weights {BF16}"),
    Row("interleaved", 2, f"{PP} --pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 1"),
    Row("gpipe", 2, f"{PP} --pipeline-schedule gpipe"),
    Row("zero-bubble", 2, f"{PP} --pipeline-schedule zero-bubble"),
    Row("cp", 2, f"{CP} {LLAMA} --attention-dropout 0 --hidden-dropout 0"),
    Row("tp pp dp", 8, f"{TP} {PP} --use-distributed-optimizer {BF16}"),
    Row("tp cp", 4, f"{TP} {CP} {LLAMA} --attention-dropout 0 --hidden-dropout 0 --zero-stage 2 {BF16}"),
    Row("experts", 1, MOE),
    Row("ep", 2, f"{MOE} --expert-model-parallel-size 2 {BF16}"),
    Row("ep tp", 4, f"{MOE} --expert-model-parallel-size 2 {TP} --sequence-parallel {DISTRIBUTED} {BF16}"),
    Row("etp", 2, f"{MOE} {TP} --sequence-parallel --expert-tensor-parallel-size 2"),
    *(Row(f"stage {stage} fp32", 2, f"--zero-stage {stage}") for stage in (1, 2, 3)),
    *(Row(f"stage {stage} bf16", 2, f"--zero-stage {stage} {BF16} {LLAMA}") for stage in (0, 1, 2, 3)),
    *(Row(f"stage {stage} fp16", 2, f"--zero-stage {stage} {FP16}") for stage in (1, 3)),
    Row("stage 3 tp", 4, f"--zero-stage 3 {TP} {BF16}"),
    Row("overlap", 2, f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {BF16}"),
    Row("sgd", 2, "--optimizer sgd --use-distributed-optimizer"),
    Row("lion", 2, f"--optimizer lion --use-distributed-optimizer {BF16}"),
    Row("adam8bit", 2, f"--optimizer adam8bit --use-distributed-optimizer {BF16}"),
    Row("adafactor", 2, "--optimizer adafactor"),
    Row("adafactor tp", 2, f"--optimizer adafactor {TP} {BF16}"),
    Row("muon", 2, "--optimizer muon"),
    Row("muon tp", 2, f"--optimizer muon {TP} {BF16}"),
    Row("dist_muon", 2, f"--optimizer dist_muon {LLAMA} {BF16}"),
    Row("no decoupled decay", 2, "--no-decoupled-weight-decay --use-distributed-optimizer"),
    Row("remainders", 2, f"{DISTRIBUTED} --use-precision-aware-optimizer --store-param-remainders {BF16}"),
    Row(
        "narrow moments", 2,
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
        f"{BF16}",
    ),
    Row("offload to a file", 2, f"--use-distributed-optimizer --optimizer-offload-directory OUTPUT-offload {BF16}"),
    Row("no kernels", 2, f"--kernels ref --use-distributed-optimizer {BF16}"),
    Row("recompute", 2, f"{TP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    Row("window", 1, f"{LLAMA} --window-size 8 0"),
    Row("ramp", 2, "--rampup-batch-size 8 8 16 --train-samples 48"),
    Row("background save", 2, "--async-save --use-distributed-optimizer"),
)  # fmt: skip
