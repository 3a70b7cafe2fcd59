"""Settings of other training programs, and the flags of this package that replace them.

Names come from transformers' TrainingArguments, accelerate, DeepSpeed, torchtitan, nanotron, GPT-NeoX, axolotl and
LitGPT, without leading dashes and with dashes between words. Names that are also flags of this package are
omitted.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

_FLAGS: dict[str, str] = {
    # layout
    "--tensor-model-parallel-size": "tp tp-size tp-degree tensor-parallel tensor-parallel-size tensor-parallel-degree "
    "megatron-lm-tp-degree parallelism-config-tp-size mp mp-size",
    "--pipeline-model-parallel-size": "pp pp-size pp-degree pipeline-parallel pipeline-parallel-size "
    "pipe-parallel-size pipeline-parallel-degree megatron-lm-pp-degree",
    "--context-parallel-size": "cp cp-size cp-degree context-parallel context-parallel-degree "
    "parallelism-config-cp-size megatron-lm-context-parallel-size",
    "--expert-model-parallel-size": "ep ep-size ep-degree expert-parallel expert-parallel-size expert-parallel-degree "
    "megatron-lm-expert-model-parallel-size ",
    "--sequence-parallel": "sp use-sequence-parallel megatron-lm-sequence-parallelism enable-sequence-parallel",
    "--zero-stage": "zero zero-optimization-stage deepspeed-stage",
    "--zero-stage 3": "fsdp use-fsdp zero3 fsdp-config fsdp-sharding-strategy fsdp-version data-parallel-shard-degree "
    "parallelism-config-dp-shard-size",
    "--num-distributed-optimizer-instances": "data-parallel-replicate-degree parallelism-config-dp-replicate-size",
    "--use-distributed-optimizer": "zero1 megatron-lm-use-distributed-optimizer",
    "--distributed-backend": "ddp-backend dist-backend",
    "--distributed-timeout-minutes": "ddp-timeout init-timeout-seconds train-timeout-seconds",
    "--tensor-model-parallel-size, --context-parallel-size or --zero-stage": "parallelism-config",
    "--device": "use-mps-device",
    "--device cpu": "cpu use-cpu no-cuda no-gpu",
    # model
    "--model": "model-preset model-config config-name model-type arch architecture flavor model-size",
    "--num-layers": "n-layer n-layers num-hidden-layers layers",
    "--hidden-size": "n-embd d-model dim model-dim n-embed embed-dim",
    "--num-attention-heads": "n-head n-heads num-heads heads",
    "--group-query-attention --num-query-groups": "n-kv-heads num-kv-heads n-query-groups",
    "--kv-channels": "head-dim d-head head-size",
    "--ffn-hidden-size": "intermediate-size d-ff ffn-dim n-inner mlp-dim",
    "--max-position-embeddings": "n-positions n-ctx max-positions max-model-len",
    "--normalization": "norm norm-type",
    "--normalization RMSNorm": "rmsnorm rms-norm use-rmsnorm",
    "--norm-epsilon": "layer-norm-epsilon rms-norm-eps rms-norm-epsilon layer-norm-eps norm-eps",
    "--rotary-base": "rope-theta rotary-emb-base rope-base",
    "--rotary-percent": "rotary-pct partial-rotary-factor rotary-percentage",
    "--position-embedding-type": "pos-emb position-encoding pos-encoding",
    "--use-parallel-residual": "parallel-residual",
    "--hidden-dropout, --attention-dropout": "dropout dropout-rate resid-pdrop attn-pdrop embd-pdrop",
    "--attention-dropout": "attn-dropout megatron-lm-attention-dropout",
    "--hidden-dropout": "residual-dropout megatron-lm-hidden-dropout",
    "--untie-embeddings-and-output-weights": "no-weight-tying untie-embeddings no-tie-word-embeddings",
    "--disable-bias-linear": "no-bias use-bias-in-attn-linear",
    "--init-method-std": "initializer-range init-std",
    "--num-experts": "n-experts num-local-experts n-routed-experts moe-num-experts",
    "--moe-router-topk": "num-experts-per-tok n-expert-per-token moe-top-k experts-per-token",
    "--window-size": "sliding-window window-attn sliding-window-size",
    # batches and length
    "--micro-batch-size": "bs bsz mbs micro-batch per-device-train-batch-size train-micro-batch-size-per-gpu "
    "local-batch-size per-gpu-train-batch-size device-batch-size per-device-batch-size",
    "--global-batch-size": "gbs train-batch-size total-batch-size effective-batch-size",
    "--gradient-accumulation-steps": "grad-accum grad-accum-steps accumulate-grad-batches accumulation-steps "
    "batch-accumulation-per-replica gas megatron-lm-num-micro-batches",
    "--eval-micro-batch-size": "per-device-eval-batch-size eval-batch-size per-gpu-eval-batch-size",
    "--seq-length": "seq-len sequence-length sequence-len max-seq-length max-seq-len context-length block-size "
    "max-length ctx-len context-size",
    "--train-iters": "max-steps steps train-steps num-steps iters max-iters training-steps total-steps max-iterations "
    "num-train-steps num-iterations",
    "--train-samples": "num-samples max-samples",
    # rates and optimizer
    "--lr": "learn-rate learning-rate max-lr peak-lr",
    "--min-lr": "lr-min min-learning-rate min-decay-lr final-lr",
    "--lr-decay-style": "lr-scheduler-type lr-scheduler scheduler decay-type ",
    "--lr-decay-iters": "lr-decay-steps decay-steps lr-max-iters",
    "--lr-warmup-iters": "warmup-steps warmup-iters lr-warmup-steps num-warmup-steps",
    "--min-lr, --lr-wsd-decay-iters or --lr-wsd-decay-style": "lr-scheduler-kwargs",
    "--lr-warmup-iters, with ceil(ratio x steps) for equal rates": "warmup-ratio",
    "--lr-warmup-fraction": "lr-warmup-ratio warmup-fraction",
    "--lr-wsd-decay-iters with --lr-decay-style WSD": "decay-ratio lr-decay-starting-step",
    "--clip-grad": "max-grad-norm gradient-clipping grad-clip max-norm gradient-clip-val grad-clip-norm "
    "megatron-lm-gradient-clipping clip-grad-norm",
    "--weight-decay": "wd decay",
    "--adam-eps": "adam-epsilon",
    "--adam-beta1": "beta1",
    "--adam-beta2": "beta2",
    "--optimizer": "optim optimizer-type optimizer-name optim-type",
    "--optimizer adafactor": "adafactor",
    "--lion-beta1, --muon-momentum or --adafactor-decay-rate": "optim-args",
    "--optimizer-cpu-offload": "offload-optimizer offload-optimizer-device cpu-offload zero-offload enable-cpu-offload "
    "megatron-lm-optimizer-cpu-offload fsdp-offload-params",
    "--optimizer-offload-directory": "offload-optimizer-nvme-path",
    "--remote-device cpu with --zero-stage 3": "offload-param offload-param-device",
    # precision
    "--bf16": "bfloat16 bf16-mixed",
    "--fp16": "half float16 fp16-mixed",
    "--bf16 or --fp16": "precision mixed-precision dtype torch-dtype params-dtype amp mixed-precision-param "
    "bf16-full-eval fp16-full-eval autocast",
    "--allow-tf32": "tf32",
    "--initial-loss-scale": "initial-scale-power init-loss-scale",
    # memory and speed
    "--recompute-granularity": "gradient-checkpointing activation-checkpointing "
    "activation-checkpoint selective-ac-option fsdp-activation-checkpointing megatron-lm-recompute-activations",
    "--recompute-num-layers or --cpu-offloading-num-layers": "activation-checkpointing-kwargs "
    "gradient-checkpointing-kwargs",
    "--compile": "torch-compile",
    "--kernels": "use-liger-kernel liger-kernel liger-kernel-config",
    "--ddp-bucket-size": "ddp-bucket-cap-mb",
    "--start-eval-at-iter": "eval-delay",
    "--num-workers": "dataloader-num-workers num-loading-workers data-workers",
    # data
    "--data-path": "dataset datasets dataset-name dataset-path train-file train-data data data-dir data-path-or-name "
    "hf-dataset-or-datasets dataset-folder train-dataset",
    "--valid-data-path": "validation-file eval-dataset val-data eval-data val-file",
    "--dataloader-type": "train-sampling-strategy",
    "--mock-data": "dummy-data synthetic-data fake-data",
    "--tokenizer-model": "tokenizer tokenizer-name tokenizer-path tokenizer-name-or-path",
    "--split": "validation-split-percentage val-split val-set-size",
    "--sft": "finetune-on-chat use-chat-template instruction-tuning",
    # checkpoints
    "--save": "output-dir out-dir save-dir ckpt-dir checkpoint-dir checkpoints-path dump-folder save-path",
    "--load": "resume resume-from-checkpoint resume-from load-checkpoint resume-checkpoint-path initial-load-path "
    "checkpoint ckpt init-from restore",
    "--load FOLDER --finetune": "model-name-or-path model-name model-id pretrained-model base-model init-checkpoint",
    "--save-interval": "save-steps checkpoint-interval save-every checkpointing-interval save-freq",
    "--save-retain-last": "save-total-limit keep-latest-k num-checkpoints-to-keep",
    "--no-save-optim": "save-only-model last-save-model-only",
    "--no-load-optim": "megatron-lm-no-load-optim",
    "--exit-signal-handler": "enable-jit-checkpoint",
    "--async-save": "async-mode async-checkpoint",
    # watching
    "--log-interval": "logging-steps log-every print-every log-freq iteration-step-info-interval log-steps "
    "steps-per-print logging-strategy",
    "--log-memory-interval": "skip-memory-metrics",
    "--eval-interval": "eval-steps eval-every val-check-interval eval-freq evaluation-interval",
    "--eval-iters": "limit-val-batches max-eval-samples eval-batches",
    "--wandb-project, --tensorboard-dir or --metrics-jsonl": "report-to",
    "--wandb-project": "wandb use-wandb enable-wandb project",
    "--wandb-exp-name": "run-name wandb-name wandb-run-name experiment-name",
    "--tensorboard-dir": "logging-dir tb-dir save-tb-folder enable-tensorboard log-dir",
    "--profile": "enable-profiling profiler",
    "--manual-gc --manual-gc-interval": "gc-freq",
    "--seed": "random-seed data-seed",
    "--deterministic-mode": "full-determinism deterministic use-deterministic-algorithms",
    "--config": "config-file yaml config-path job-config-file default-config-file",
    "--deepspeed --deepspeed_config": "ds-config deepspeed-config-file use-deepspeed",
    "--print-config": "print-args show-config",
    "--skip-train": "eval-only only-eval evaluate-only validate-only",
}
_SENTENCES: dict[str, str] = {
    "torchrun starts the processes: torchrun --nproc_per_node N pretrain_gpt.py": "gpus num-gpus nproc nproc-per-node "
    "num-processes ngpu n-gpu ngpus gpus-per-node devices num-devices multi-gpu global-num-gpus",
    "torchrun connects the machines: torchrun --nnodes N --nproc_per_node M": "nnodes num-nodes num-machines nodes",
    "torchrun sets the number of ranks; remove the flag": "world-size world rank node-rank machine-rank",
    "give torchrun the address: --master_addr and --master_port, or --rdzv_endpoint": "master-addr master-port "
    "main-process-ip main-process-port rdzv-endpoint rdzv-backend hostfile",
    "the data-parallel size is ranks / (TP x PP x CP); remove the flag": "dp dp-size dp-degree data-parallel-size "
    "data-parallel",
    "the length is in steps or samples: --train-iters or --train-samples": "epochs num-epochs num-train-epochs "
    "n-epochs epoch epoch-count",
    "fp8 is not supported yet; use --bf16": "fp8 float8 fp8-backend use-fp8 nvfp4 mxfp8 int8",
    "quantization and adapters are not supported; train all weights in --bf16": "load-in-8bit load-in-4bit lora qlora "
    "lora-r lora-alpha lora-dropout adapter use-peft peft",
    "upload after the run: python tools/convert_checkpoint.py --to hf, then hf upload": "push-to-hub hub-model-id "
    "push-to-hub-model-id push-to-hub-organization push-to-hub-token "
    "hub-token hub-strategy hub-private-repo hub-revision hub-always-push upload-s3-path",
    "training is the default; to evaluate only, use --skip-train or tools/evaluate.py": "do-train do-eval do-predict",
    "evaluation keeps only the loss, no logits; remove the flag": "eval-accumulation-steps prediction-loss-only "
    "eval-do-concat-batches eval-use-gather-object use-legacy-prediction-loop",
    "no evaluation runs before the first step; --skip-train evaluates without training": "eval-on-start",
    "the metrics are loss, perplexity and bits per byte; for tasks, tools/evaluate.py": "include-for-metrics "
    "batch-eval-metrics include-inputs-for-metrics",
    "mu-parametrization is not supported yet; remove the flag": "mup",
    "code in a model's folder is never executed; remove the flag": "remote-code",
    "each device has its default attention; --kernels and --attention-backend change it": "attn-implementation "
    "flash-attention use-flash-attention flash-attn use-flash-attention-2 xformers-attention sdp-attention",
    "documents are always packed; tokens attend across them unless --reset-attention-mask is given": "packing "
    "sample-packing pack-sequences group-by-length group-texts",
    "choose the columns when you encode the text: preprocess_data.py --json-keys": "text-column text-column-name "
    "remove-unused-columns text-field dataset-text-field json-key json-keys",
    "text is encoded before training, by preprocess_data.py --workers N": "preprocessing-num-workers "
    "dataset-processing-num-proc-per-process dataset-num-proc workers",
    "checkpoints are saved every --save-interval steps and at the end": "save-strategy",
    "evaluation runs every --eval-interval steps": "eval-strategy evaluation-strategy",
    "the best model is not tracked; every checkpoint's loss is in --metrics-jsonl": "load-best-model-at-end "
    "metric-for-best-model greater-is-better early-stopping-patience",
    "the loss is the cross-entropy; remove the flag": "label-smoothing-factor",
    "no noise is added to embeddings; remove the flag": "neftune-noise-alpha",
    "GaLore and APOLLO are not supported; remove the flag": "optim-target-modules",
    "the loss is already divided by the counted tokens of the whole batch; remove the flag": "average-tokens-across-"
    "devices",
    "the backend and the mode of torch.compile are torch's defaults; remove the flag": "torch-compile-backend "
    "torch-compile-mode torchdynamo",
    "torch's cache is never emptied between steps; remove the flag": "torch-empty-cache-steps",
    "training keeps no cache of keys and values; remove the flag": "use-cache past-index",
    "batch sizes are not tried out; --dry-run --device-memory 80GB says whether one fits": "auto-find-batch-size",
    "the first step is logged only with --log-interval 1": "logging-first-step",
    "rank 0 logs; remove the flag": "log-on-each-node",
    "a NaN or an infinity stops the run; --no-check-for-nan-in-loss-and-grad turns that off": "logging-nan-inf-filter",
    "a NaN or an infinity always stops the run; remove the flag": "debug",
    "warnings and errors are always printed; remove the flag": "log-level log-level-replica",
    "no progress bar is shown; remove the flag": "disable-tqdm",
    "each log line has the consumed samples and the tokens per second; remove the flag": "include-tokens-per-second "
    "include-num-input-tokens-seen",
    "Trackio is not supported; use --wandb-project": "trackio-space-id trackio-bucket-id trackio-static-space-id",
    "older steps in --save are renamed, never deleted; remove the flag": "overwrite-output-dir",
    "all ranks save into one folder; --non-persistent-ckpt-type local keeps copies on each machine": "save-on-each-"
    "node",
    "an export has safetensors, unless convert_checkpoint.py --no-safe-serialization is given": "save-safetensors",
    "a resume opens the next sample at once; remove the flag": "ignore-data-skip",
    "checkpoints hold no state of hooks; remove the flag": "restore-callback-states-from-checkpoint",
    "each rank reads its own samples; remove the flag": "accelerator-config",
    "batches are always whole, in order, pinned and read by lasting workers; remove the flag": "dataloader-drop-last "
    "dataloader-pin-memory dataloader-persistent-workers dataloader-in-order",
    "the micro-batches of a step are read ahead; remove the flag": "dataloader-prefetch-factor",
    "torch starts the workers in its default way; remove the flag": "dataloader-multiprocessing-context",
    "the label of a token is the next token; remove the flag": "label-names",
    "every sample has --seq-length tokens; remove the flag": "length-column-name",
    "nothing has to be chosen for the models here; remove the flag": "ddp-find-unused-parameters "
    "ddp-broadcast-buffers ddp-static-graph",
    "layers are sharded one by one with --zero-stage 3; remove the flag": "fsdp-min-num-params "
    "fsdp-transformer-layer-cls-to-wrap",
    "apex and TorchScript are not used; remove the flag": "fp16-opt-level half-precision-backend fp16-backend "
    "jit-mode-eval",
    "TPUs are not supported; remove the flag": "tpu-num-cores tpu-metrics-debug",
    "SageMaker's launcher is not used; start ranks with torchrun": "mp-parameters",
    "hyperparameter search is not included; remove the flag": "ray-scope",
}


@cache
def answers() -> Mapping[str, str]:
    """Returns another program's name without leading dashes -> the flags of this package, or a sentence."""
    table = {name: answer for part in (_FLAGS, _SENTENCES) for answer, names in part.items() for name in names.split()}
    return MappingProxyType(table)


def given_elsewhere(spelling: str) -> str | None:
    """Returns the replacement of another program's setting: "use --lr instead", or a sentence; None if unknown.

    If the whole name is unknown, the part after its last dot is looked up: `seq_len` of `--training.seq_len`.
    """
    name = spelling.lstrip("-").replace("_", "-").lower()
    answer = answers().get(name.replace(".", "-")) or answers().get(name.rpartition(".")[2])
    if answer is None:
        return None
    return f"use {answer} instead" if answer.startswith("--") else answer
