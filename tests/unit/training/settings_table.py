"""Maps every setting to a value, flags with which it has an effect, and flags with which it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.unit.training.behaviour import on_ranks, plan, train

BASE = """
    --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8
    --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 1e-2 --vocab-size 32 --mock-data --num-workers 0
    --log-interval 1 --eval-iters 1 --eval-interval 2 --make-vocab-size-divisible-by 8 --device cpu
"""
"""Default flags; a word -flag in the table below removes --flag."""


@dataclass(frozen=True)
class Case:
    given: str
    where: str = ""  # has an effect there
    idle: str | None = None  # has none there: a notice or a rejection; None: it always has one
    seen_by: Callable[[list[str]], list[str]] = train


def planned(given: str, where: str = "", idle: str | None = None) -> Case:
    return Case(given, where, idle, plan)


def ranked(given: str, where: str = "", idle: str | None = None) -> Case:
    return Case(given, where, idle, on_ranks)


FP16 = "--fp16 --initial-loss-scale 256"
ROPE = "--position-embedding-type rope"
LLAMA3 = f"{ROPE} --use-rope-scaling"
YARN = "--position-embedding-type yarn --yarn-factor 4"
NO_BIAS = "--disable-bias-linear"
DENSE = f"{NO_BIAS} --swiglu --ffn-hidden-size 24"
PLAIN_MOE = f"--num-experts 4 {DENSE}"
MOE = f"{PLAIN_MOE} --moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type seq_aux_loss"
SIGMOID = f"{MOE} --moe-router-score-function sigmoid"
BIASED = f"{SIGMOID} --moe-router-enable-expert-bias"

MODEL = {
    "model": Case("--model llama3-8b --num-query-groups 1 --ffn-hidden-size 24 --kv-channels 8"),
    "num_layers": Case("--num-layers 1"),
    "hidden_size": Case("--hidden-size 32"),
    "ffn_hidden_size": Case("--ffn-hidden-size 24", idle=f"{MOE} --moe-ffn-hidden-size 16"),
    "num_attention_heads": Case("--num-attention-heads 1"),
    "kv_channels": Case("--kv-channels 4"),
    "group_query_attention": Case("--group-query-attention"),
    "num_query_groups": Case("--num-query-groups 1"),
    "max_position_embeddings": Case("--max-position-embeddings 16"),
    "position_embedding_type": Case("--position-embedding-type none"),
    "add_position_embedding": Case("--no-position-embedding"),
    "use_rotary_position_embeddings": Case("--use-rotary-position-embeddings"),
    "rotary_percent": Case("--rotary-percent 0.5", ROPE, ""),
    "rotary_base": Case("--rotary-base 100", ROPE, ""),
    "rotary_seq_len_interpolation_factor": Case("--rotary-seq-len-interpolation-factor 2", ROPE, ""),
    "use_rope_scaling": Case("--use-rope-scaling", ROPE, ""),
    "rope_scaling_factor": Case("--rope-scaling-factor 4", LLAMA3, ROPE),
    "rope_low_freq_factor": Case("--rope-low-freq-factor 2", LLAMA3, ROPE),
    "rope_high_freq_factor": Case("--rope-high-freq-factor 8", LLAMA3, ROPE),
    "rope_original_max_position": Case("--rope-original-max-position 16", LLAMA3, ROPE),
    "yarn_factor": Case("--yarn-factor 8", YARN, ROPE),
    "yarn_original_max_position_embeddings": Case("--yarn-original-max-position-embeddings 16", YARN, ROPE),
    "yarn_beta_fast": Case("--yarn-beta-fast 2", YARN, ROPE),
    "yarn_beta_slow": Case("--yarn-beta-slow 8", YARN, ROPE),
    "yarn_attention_factor": Case("--yarn-attention-factor 2", YARN, ROPE),
    "make_vocab_size_divisible_by": Case("--make-vocab-size-divisible-by 64"),
    "normalization": Case("--normalization RMSNorm"),
    "norm_epsilon": Case("--norm-epsilon 0.1"),
    "apply_layernorm_1p": Case("--apply-layernorm-1p"),
    "qk_layernorm": Case("--qk-layernorm"),
    "qk_layernorm_scope": Case("--qk-layernorm-scope all", "--qk-layernorm", ""),
    "norm_placement": Case("--norm-placement after"),
    "use_parallel_residual": Case("--use-parallel-residual"),
    "window_size": Case("--window-size 1 0"),
    "swiglu": Case("--swiglu", "--ffn-hidden-size 24"),
    "squared_relu": Case("--squared-relu"),
    "openai_gelu": Case("--openai-gelu", NO_BIAS),
    "bias_gelu_fusion": Case("--no-bias-gelu-fusion", "", "--squared-relu"),
    "add_bias_linear": Case("--disable-bias-linear"),
    "add_qkv_bias": Case("--add-qkv-bias", NO_BIAS, ""),
    "untie_embeddings_and_output_weights": Case("--untie-embeddings-and-output-weights"),
    "attention_dropout": Case("--attention-dropout 0.5"),
    "hidden_dropout": Case("--hidden-dropout 0.5"),
    "init_method_std": Case("--init-method-std 0.1", "", "--init-method-xavier-uniform"),
    "init_method_xavier_uniform": Case("--init-method-xavier-uniform"),
    "apply_residual_connection_post_layernorm": Case("--apply-residual-connection-post-layernorm"),
    "apply_query_key_layer_scaling": Case(
        "--apply-query-key-layer-scaling", "--attention-backend unfused --num-layers 3"
    ),
    "fp32_residual_connection": Case("--fp32-residual-connection", "--bf16", ""),
}

EXPERTS = {
    "num_experts": Case("--num-experts 4", DENSE),
    "moe_layer_freq": Case("--moe-layer-freq 2", MOE, DENSE),
    "moe_ffn_hidden_size": Case("--moe-ffn-hidden-size 16", MOE, DENSE),
    "moe_router_topk": Case("--moe-router-topk 3", MOE, DENSE),
    "moe_router_pre_softmax": Case("--moe-router-pre-softmax", MOE, SIGMOID),
    "moe_router_score_function": Case("--moe-router-score-function sigmoid", MOE, DENSE),
    "moe_router_num_groups": Case(
        "--moe-router-num-groups 4",
        f"{MOE} --num-experts 8 --moe-router-topk 4 --moe-router-num-groups 2 --moe-router-group-topk 2",
        DENSE,
    ),
    "moe_router_group_topk": Case(
        "--moe-router-group-topk 1", f"{MOE} --moe-router-num-groups 2 --moe-router-group-topk 2", DENSE
    ),
    "moe_router_topk_scaling_factor": Case("--moe-router-topk-scaling-factor 2", SIGMOID, DENSE),
    "moe_router_dtype": Case("--moe-router-dtype fp64", MOE, DENSE),
    "moe_router_load_balancing_type": Case(
        "--moe-router-load-balancing-type aux_loss", f"{MOE} --micro-batch-size 2", PLAIN_MOE
    ),
    "moe_aux_loss_coeff": Case("--moe-aux-loss-coeff 0.5", MOE, f"{PLAIN_MOE} --moe-router-load-balancing-type none"),
    "moe_z_loss_coeff": Case("--moe-z-loss-coeff 0.1", MOE, DENSE),
    "moe_router_enable_expert_bias": Case("--moe-router-enable-expert-bias", SIGMOID, DENSE),
    "moe_router_bias_update_rate": Case("--moe-router-bias-update-rate 0.1", BIASED, SIGMOID),
    "moe_expert_capacity_factor": Case("--moe-expert-capacity-factor 0.5", MOE, DENSE),
    "moe_token_drop_policy": Case("--moe-token-drop-policy position", f"{MOE} --moe-expert-capacity-factor 0.5", MOE),
    "moe_shared_expert_intermediate_size": Case("--moe-shared-expert-intermediate-size 16", MOE, DENSE),
}

STAGES = "--pipeline-model-parallel-size 2 --global-batch-size 4 --micro-batch-size 1"
FOUR = f"{STAGES} --num-layers 4"
PARALLEL = {
    "tensor_model_parallel_size": planned("--tensor-model-parallel-size 2"),
    "pipeline_model_parallel_size": planned("--pipeline-model-parallel-size 2"),
    "pipeline_schedule": ranked("--pipeline-schedule gpipe", f"{STAGES} --pipeline-trace out/t", ""),
    "num_layers_per_virtual_pipeline_stage": planned("--num-layers-per-virtual-pipeline-stage 1", FOUR, ""),
    "num_virtual_stages_per_pipeline_rank": planned("--num-virtual-stages-per-pipeline-rank 2", FOUR, ""),
    "microbatch_group_size_per_virtual_pipeline_stage": ranked(
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        f"{FOUR} --num-layers-per-virtual-pipeline-stage 1 --pipeline-trace out/t",
        FOUR,
    ),
    "account_for_embedding_in_pipeline_split": planned(
        "--account-for-embedding-in-pipeline-split", f"{STAGES} --num-layers 3", ""
    ),
    "account_for_loss_in_pipeline_split": planned(
        "--account-for-loss-in-pipeline-split", f"{STAGES} --num-layers 3", ""
    ),
    "decoder_first_pipeline_num_layers": planned("--decoder-first-pipeline-num-layers 1", FOUR, ""),
    "decoder_last_pipeline_num_layers": planned("--decoder-last-pipeline-num-layers 1", FOUR, ""),
    "pipeline_trace": ranked("--pipeline-trace out/t", STAGES, ""),
    "sequence_parallel": ranked("--sequence-parallel", "--tensor-model-parallel-size 2", ""),
    "context_parallel_size": planned("--context-parallel-size 2"),
    "cp_comm_type": ranked("--cp-comm-type a2a", "--context-parallel-size 2", ""),
    "expert_model_parallel_size": planned("--expert-model-parallel-size 2", MOE, ""),
    "check_replicas_every": ranked("--check-replicas-every 1"),
    "zero_stage": ranked("--zero-stage 3"),
    "num_distributed_optimizer_instances": planned(
        "--num-distributed-optimizer-instances 2", "--use-distributed-optimizer"
    ),
    "use_torch_fsdp2": ranked("--use-torch-fsdp2"),
    "torch_fsdp2_reshard_after_forward": ranked("--torch-fsdp2-no-reshard-after-forward", "--use-torch-fsdp2", ""),
    "data_parallel_sharding_strategy": ranked("--data-parallel-sharding-strategy optim_grads"),
}

SAMPLES = "-train-iters --train-samples 8"
TRAINING = {
    "micro_batch_size": Case("--micro-batch-size 2"),
    "gradient_accumulation_steps": planned("--gradient-accumulation-steps 3", "-global-batch-size"),
    "global_batch_size": Case("--global-batch-size 4"),
    "rampup_batch_size": Case("--rampup-batch-size 2 2 4", f"{SAMPLES} --global-batch-size 4"),
    "step_batch_size_schedule": Case("--step-batch-size-schedule 0:2 32:4", f"{SAMPLES} -global-batch-size"),
    "train_iters": Case("--train-iters 2"),
    "train_samples": Case("--train-samples 4", SAMPLES),
    "exit_interval": Case("--exit-interval 2"),
    "exit_duration_in_mins": Case("--exit-duration-in-mins 1e-9"),
    "exit_signal_handler": Case("--exit-signal-handler"),
    "exit_signal": Case("--exit-signal SIGUSR2", "--exit-signal-handler", ""),
    "seed": Case("--seed 7"),
    "skip_train": Case("--skip-train"),
    "iterations_to_skip": Case("--iterations-to-skip 2"),
    "deterministic_mode": planned("--deterministic-mode"),
    "manual_gc": Case("--manual-gc"),
    "manual_gc_interval": Case("--manual-gc-interval 1", "--manual-gc", ""),
    "manual_gc_eval": Case("--no-manual-gc-eval", "--manual-gc --eval-interval 1", ""),
    "check_for_nan_in_loss_and_grad": Case("--no-check-for-nan-in-loss-and-grad", "--fp16 --loss-scale 1e30"),
    "check_for_spiky_loss": Case("--check-for-spiky-loss", "--spiky-loss-factor 0.5"),
    "spiky_loss_factor": Case("--spiky-loss-factor 0.5", "--check-for-spiky-loss", ""),
}

LOAD_OTHER = "--load SAVED --min-lr 1e-3"
RAMP = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.5"
CONSTANT = "--lr-decay-style constant"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 2"
OVERFLOWS = "--fp16 --initial-loss-scale 1e30 --hysteresis 1"
MUON = "--optimizer muon"
ADAFACTOR = "--optimizer adafactor"
AWARE = "--use-precision-aware-optimizer"
WARMUP = "--lr-schedule WarmupDecayLR --total-num-steps 4 --warmup-num-steps 2"
COSINE = "--lr-schedule WarmupCosineLR --total-num-steps 4 --warmup-num-steps 2"
RANGE = "--lr-schedule LRRangeTest"
SHORT = "--cycle-first-step-size 1"
CYCLE = "--lr-schedule OneCycle --cycle-min-lr 1e-3 --cycle-max-lr 1e-2"
DECAYING = f"{CYCLE} {SHORT} --decay-lr-rate 1 --train-iters 5"
DEEPSPEED = {
    "lr_schedule": Case(RANGE),
    "warmup_min_lr": Case("--warmup-min-lr 1e-4", WARMUP, RANGE),
    "warmup_max_lr": Case("--warmup-max-lr 1e-2", WARMUP, RANGE),
    "warmup_num_steps": Case("--warmup-num-steps 3", WARMUP, RANGE),
    "warmup_type": Case("--warmup-type linear", f"{WARMUP} --warmup-min-lr 1e-4 --warmup-num-steps 3", RANGE),
    "total_num_steps": Case("--total-num-steps 3", f"{WARMUP} --train-iters 5", RANGE),
    "warmup_min_ratio": Case("--warmup-min-ratio 0.5", COSINE, RANGE),
    "cos_min_ratio": Case("--cos-min-ratio 0.5", f"{COSINE} --train-iters 5", RANGE),
    "cycle_min_lr": Case("--cycle-min-lr 2e-3", CYCLE, RANGE),
    "cycle_max_lr": Case("--cycle-max-lr 2e-2", CYCLE, RANGE),
    "cycle_first_step_size": Case("--cycle-first-step-size 5", CYCLE, RANGE),
    "cycle_second_step_size": Case("--cycle-second-step-size 3", f"{CYCLE} {SHORT}", RANGE),
    "cycle_first_stair_count": Case("--cycle-first-stair-count 1", CYCLE, RANGE),
    "cycle_second_stair_count": Case(
        "--cycle-second-stair-count 1", f"{CYCLE} {SHORT} --cycle-second-step-size 3", RANGE
    ),
    "decay_step_size": Case("--decay-step-size 1", DECAYING, RANGE),
    "decay_lr_rate": Case("--decay-lr-rate 2", f"{DECAYING} --decay-step-size 1", RANGE),
    "lr_range_test_min_lr": Case("--lr-range-test-min-lr 1e-2", RANGE, ""),
    "lr_range_test_step_size": Case("--lr-range-test-step-size 1", RANGE, ""),
    "lr_range_test_step_rate": Case("--lr-range-test-step-rate 50", RANGE, ""),
    "lr_range_test_staircase": Case("--lr-range-test-staircase", f"{RANGE} --lr-range-test-step-size 2", ""),
}
OPTIMIZER = {
    "optimizer": Case("--optimizer sgd"),
    "weight_decay": Case("--weight-decay 0.5"),
    "apply_wd_to_qk_layernorm": Case("--apply-wd-to-qk-layernorm", "--qk-layernorm --weight-decay 0.5", ""),
    "weight_decay_incr_style": Case("--weight-decay-incr-style cosine", RAMP),
    "start_weight_decay": Case("--start-weight-decay 0.3", RAMP, ""),
    "end_weight_decay": Case("--end-weight-decay 0.9", RAMP, ""),
    "clip_grad": Case("--clip-grad 0.01", "--optimizer sgd"),
    "adam_beta1": Case("--adam-beta1 0.5", "", "--optimizer sgd"),
    "adam_beta2": Case("--adam-beta2 0.5", "", "--optimizer sgd"),
    "adam_eps": Case("--adam-eps 1e-2", "", "--optimizer sgd"),
    "sgd_momentum": Case("--sgd-momentum 0.5", "--optimizer sgd", ""),
    "optimizer_cpu_offload": planned("--optimizer-cpu-offload"),
    "decoupled_weight_decay": Case("--no-decoupled-weight-decay", "", "--optimizer sgd"),
    "lion_beta1": Case("--lion-beta1 0.5", "--optimizer lion", ""),
    "lion_beta2": Case("--lion-beta2 0.5", "--optimizer lion", ""),
    "muon_momentum": Case("--muon-momentum 0.5", MUON, ""),
    "muon_nesterov": Case("--muon-nesterov", MUON, ""),
    "muon_split_qkv": Case("--muon-no-split-qkv", MUON, ""),
    "muon_num_ns_steps": Case("--muon-num-ns-steps 10", MUON, ""),
    "muon_coefficient_type": Case("--muon-coefficient-type simple", MUON, ""),
    "muon_scale_mode": Case("--muon-scale-mode unit_rms_norm", MUON, ""),
    "muon_extra_scale_factor": Case("--muon-extra-scale-factor 0.2", MUON, ""),
    "muon_fp32_matmul_prec": Case("--muon-fp32-matmul-prec highest", MUON, ""),
    "muon_scalar_optimizer": Case("--muon-scalar-optimizer lion", MUON, ""),
    "adafactor_beta1": Case("--adafactor-beta1 0.9", ADAFACTOR, ""),
    "adafactor_decay_rate": Case("--adafactor-decay-rate -0.5", ADAFACTOR, ""),
    "adafactor_clip_threshold": Case("--adafactor-clip-threshold 0.5", ADAFACTOR, ""),
    "adafactor_eps1": Case("--adafactor-eps1 1e-2", ADAFACTOR, ""),
    "adafactor_eps2": Case("--adafactor-eps2 0.5", ADAFACTOR, f"{ADAFACTOR} --adafactor-no-scale-parameter"),
    "adafactor_scale_parameter": Case("--adafactor-no-scale-parameter", ADAFACTOR, ""),
    "adafactor_relative_step": Case(
        "--adafactor-relative-step", f"{ADAFACTOR} -lr --lr 3 --lr-decay-style constant", ""
    ),
    "use_precision_aware_optimizer": Case("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", ""),
    "exp_avg_dtype": Case("--exp-avg-dtype bf16", AWARE, ""),
    "exp_avg_sq_dtype": Case("--exp-avg-sq-dtype bf16", AWARE, ""),
    "decoupled_lr": Case("--decoupled-lr 1e-1"),
    "decoupled_min_lr": Case("--decoupled-min-lr 5e-3", "--decoupled-lr 2e-2", ""),
    "lr": Case("--lr 1e-3", "", "-lr --lr-schedule LRRangeTest"),
    "min_lr": Case("--min-lr 5e-3", "", CONSTANT),
    "lr_decay_style": Case("--lr-decay-style cosine"),
    "lr_decay_iters": Case("--lr-decay-iters 2", "", CONSTANT),
    "lr_decay_samples": Case("--lr-decay-samples 6", SAMPLES, f"{SAMPLES} {CONSTANT}"),
    "lr_warmup_fraction": Case("--lr-warmup-fraction 0.5"),
    "lr_warmup_iters": Case("--lr-warmup-iters 1"),
    "lr_warmup_samples": Case("--lr-warmup-samples 3", SAMPLES),
    "lr_warmup_init": Case("--lr-warmup-init 5e-3", "--lr-warmup-iters 2", ""),
    "lr_wsd_decay_style": Case("--lr-wsd-decay-style linear", WSD, ""),
    "lr_wsd_decay_iters": Case("--lr-wsd-decay-iters 1", WSD, ""),
    "lr_wsd_decay_samples": Case(
        "--lr-wsd-decay-samples 2", f"{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 6", SAMPLES
    ),
    "override_opt_param_scheduler": Case("--override-opt_param-scheduler", LOAD_OTHER, ""),
    "use_checkpoint_opt_param_scheduler": Case("--use-checkpoint-opt_param-scheduler", LOAD_OTHER, ""),
    "fp16": Case("--fp16", "--initial-loss-scale 256"),
    "bf16": Case("--bf16"),
    "grad_reduce_in_bf16": Case("--grad-reduce-in-bf16", "--bf16", ""),
    "loss_scale": Case("--loss-scale 3"),
    "initial_loss_scale": Case("--initial-loss-scale 512", FP16, "--bf16"),
    "min_loss_scale": Case("--min-loss-scale 9e29", OVERFLOWS, "--bf16"),
    "loss_scale_window": Case("--loss-scale-window 1", FP16, "--fp16 --loss-scale 8"),
    "hysteresis": Case("--hysteresis 3", OVERFLOWS, ""),
    "allow_tf32": planned("--allow-tf32"),
}

FULL = "--recompute-granularity full --recompute-method uniform --num-layers 3"
TABLE = "--log-kernels"
ROOM = {
    "recompute_activations": Case("--recompute-activations"),
    "recompute_granularity": Case("--recompute-granularity selective"),
    "recompute_modules": Case("--recompute-modules mlp", "--recompute-granularity selective", ""),
    "moe_layer_recompute": Case("--moe-layer-recompute", PLAIN_MOE),
    "recompute_method": Case("--recompute-method block", f"{FULL} --recompute-num-layers 1", ""),
    "recompute_num_layers": Case("--recompute-num-layers 2", FULL.replace("uniform", "block"), ""),
    "cpu_offloading_num_layers": planned("--cpu-offloading-num-layers 1"),
    "kernels": planned("--kernels ref", TABLE),
    "compile": Case("--compile", "--num-experts 4 --disable-bias-linear"),  # rejected there when it is read
    "masked_softmax_fusion": planned("--no-masked-softmax-fusion", TABLE),
    "bias_swiglu_fusion": planned("--no-bias-swiglu-fusion", f"{TABLE} {DENSE}", ""),
    "bias_dropout_fusion": planned("--no-bias-dropout-fusion", TABLE),
    "rope_fusion": planned("--no-rope-fusion", f"{TABLE} {ROPE}", ""),
    "gradient_accumulation_fusion": planned("--no-gradient-accumulation-fusion", TABLE),
    "persist_layer_norm": planned("--no-persist-layer-norm", TABLE, "--normalization RMSNorm"),
    "use_flash_attn": planned("--use-flash-attn", TABLE),
    "attention_backend": planned("--attention-backend unfused", TABLE),
    "cuda_graphs": planned("--cuda-graphs"),
    "cpu_threads": planned("--cpu-threads 1"),
    "cpu_pinning": planned("--cpu-pinning"),
    "cpu_scheduling": planned("--cpu-scheduling batch"),
    "cpu_allocator": planned("--cpu-allocator system"),
    "fp32_products": planned("--fp32-products mkl"),
}

NO_FILES = "-mock-data --tokenizer-type NullTokenizer --vocab-size 96"
FILES = f"{NO_FILES} --data-path CORPUS"
TWO_SETS = f"{NO_FILES} --train-data-path CORPUS --valid-data-path CORPUS ENDS"
ENDS = f"{NO_FILES} --data-path ENDS"
TEXT = "-vocab-size --vocab-file BPE/vocab.json --merge-file BPE/merges.txt"
FIM = f"{TEXT} --fim-data --fim-rate 1 --seq-length 32 --max-position-embeddings 32"
FRAGMENTS = f"{FIM} --fim-split-sample e --fim-fragment-rate 1"
HF = "-vocab-size --tokenizer-type HuggingFaceTokenizer --tokenizer-model"
CHATS = "-vocab-size -mock-data --data-path CHATS.jsonl --tokenizer-type SFTTokenizer --tokenizer-model CHAT"
SFT = f"{CHATS} --sft --seq-length 64 --max-position-embeddings 64"
TIK = "-vocab-size --tokenizer-type TikTokenizer --tokenizer-model TIK/vocab.json"
DATA = {
    "data_path": Case("--data-path ENDS", FILES),
    "train_data_path": Case("--train-data-path ENDS", f"{NO_FILES} --train-data-path CORPUS"),
    "valid_data_path": Case("--valid-data-path CORPUS", f"{NO_FILES} --train-data-path CORPUS"),
    "test_data_path": Case("--test-data-path CORPUS", f"{NO_FILES} --train-data-path CORPUS"),
    "data_args_path": Case("--data-args-path WORDS2", f"{NO_FILES} --data-args-path WORDS"),
    "per_split_data_args_path": Case(
        "--per-split-data-args-path SETS2.json", f"{NO_FILES} --per-split-data-args-path SETS.json"
    ),
    "multiple_validation_sets": Case("--multiple-validation-sets", TWO_SETS),
    "validation_set_names": Case("--validation-set-names one two", f"{TWO_SETS} --multiple-validation-sets", TWO_SETS),
    "split": Case("--split 50,25,25", FILES, ""),
    "split_rule": Case("--split-rule main", f"{FILES} --split 5,45,50", ""),
    "max_epochs": Case("--max-epochs 0.001", FILES, ""),
    "data_table_path": Case("--data-table-path out/t.txt"),
    "data_cache_path": Case("--data-cache-path out/cache", FILES, ""),
    "seq_length": Case("--seq-length 4"),
    "num_workers": Case("--num-workers 1"),
    "dataloader_type": Case("--dataloader-type cyclic"),
    "data_sharding": ranked("--no-data-sharding", f"{FILES} --dataloader-type cyclic", ""),
    "reset_position_ids": Case("--reset-position-ids", ENDS, f"{ENDS} --no-position-embedding"),
    "reset_attention_mask": Case("--reset-attention-mask", ENDS),
    "dataloader_inter_document_masking": Case("--dataloader-inter-document-masking", ENDS),
    "eod_mask_loss": Case("--eod-mask-loss", ENDS),
    "mmap_bin_files": Case("--no-mmap-bin-files", FILES, ""),
    "sft": Case("--sft", CHATS, ""),
    "mock_data": Case("--mock-data", "-mock-data"),
    "accept_changed_data": Case("--accept-changed-data", "--load SAVED --seed 7", ""),
    "fim_data": Case("--fim-data", f"{TEXT} --seq-length 32 --max-position-embeddings 32"),
    "fim_rate": Case("--fim-rate 0", FIM, ""),
    "fim_spm_rate": Case("--fim-spm-rate 1", FIM, ""),
    "fim_split_sample": Case("--fim-split-sample o", FRAGMENTS, ""),
    "fim_fragment_rate": Case("--fim-fragment-rate 0.5", FRAGMENTS, ""),
    "fim_no_prefix": Case("--fim-no-prefix GH", FIM, ""),
    "fim_prefix_token": Case("--fim-prefix-token <file>", FIM, ""),
    "fim_middle_token": Case("--fim-middle-token <file>", FIM, ""),
    "fim_suffix_token": Case("--fim-suffix-token <file>", FIM, ""),
    "fim_eod_token": Case("--fim-eod-token <file>", FIM, ""),
    "tokenizer_type": Case("--tokenizer-type NullTokenizer"),
    "tokenizer_model": Case("--tokenizer-model HF2", f"{HF} HF", ""),
    "vocab_file": Case("--vocab-file BPE2/vocab.json", TEXT, "--tokenizer-type NullTokenizer"),
    "merge_file": Case("--merge-file BPE2/merges.txt", TEXT, "--tokenizer-type NullTokenizer"),
    "vocab_size": Case("--vocab-size 64"),
    "tiktoken_pattern": Case("--tiktoken-pattern v1", f"{TIK} --save out/s", ""),
    "tiktoken_num_special_tokens": Case("--tiktoken-num-special-tokens 9", TIK, ""),
    "tiktoken_special_tokens": Case("--tiktoken-special-tokens <unk> <s>", TIK),
    "sft_tokenizer_prompt_format": Case("--sft-tokenizer-prompt-format identity", SFT, ""),
    "null_tokenizer_eod_id": Case("--null-tokenizer-eod-id 5", "--tokenizer-type NullTokenizer --eod-mask-loss", ""),
}

SAVE = "--save out/s"
KEPT = "--non-persistent-ckpt-type"
BETWEEN = f"{SAVE} --non-persistent-save-interval 1 {KEPT}"
ON_MACHINES = "--non-persistent-local-ckpt-dir out/l"
COPIED = f"{BETWEEN} local {ON_MACHINES} --replication"
CHECKPOINT = {
    "save": Case(SAVE),
    "load": Case("--load SAVED"),
    "save_interval": Case("--save-interval 2", SAVE, ""),
    "async_save": Case("--async-save", SAVE, ""),
    "save_retain_last": Case("--save-retain-last 2", f"{SAVE} --save-interval 1", ""),
    "save_retain_interval": Case("--save-retain-interval 2", f"{SAVE} --save-interval 1", ""),
    "non_persistent_save_interval": Case("--non-persistent-save-interval 1", f"{SAVE} {KEPT} global", ""),
    "non_persistent_ckpt_type": Case(f"{KEPT} global", f"{SAVE} --non-persistent-save-interval 1", ""),
    "non_persistent_global_ckpt_dir": Case("--non-persistent-global-ckpt-dir out/g", f"{BETWEEN} global", SAVE),
    "non_persistent_local_ckpt_dir": Case(ON_MACHINES, f"{BETWEEN} local", SAVE),
    "replication": ranked("--replication", f"{BETWEEN} local {ON_MACHINES}", SAVE),
    "replication_jump": ranked("--replication-jump 1", COPIED, SAVE),
    "replication_factor": ranked("--replication-factor 3", COPIED, SAVE),
    "save_optim": Case("--no-save-optim", SAVE, ""),
    "save_rng": Case("--no-save-rng", SAVE, ""),
    "save_tokenizer_assets": Case("--no-save-tokenizer-assets", f"{HF} HF {SAVE}", ""),
    "load_optim": Case("--no-load-optim", "--load SAVED", "--load SAVED --finetune"),
    "load_rng": Case("--no-load-rng", "--load SAVED", ""),
    "finetune": Case("--finetune", "--load SAVED", ""),
    "use_checkpoint_args": Case("--use-checkpoint-args", "--load SAVED -num-layers", ""),
    "strict_load": Case("--strict-load", "--load DAMAGED", ""),
    "skip_hash": Case("--skip-hash", "--load SAVED", ""),
    "ckpt_step": Case("--ckpt-step 1", "--load SAVED", ""),
    "override_ckpt_iteration": Case("--override-ckpt-iteration 1", "--load SAVED", "--load SAVED --finetune"),
}

TB = "--tensorboard-dir out/tb"
WANDB = "--wandb-project p"
TRACE = "--profile --profile-step-start 0 --profile-step-end 1 --profile-dir out/p"
FOLLOWED = {
    "log_interval": Case("--log-interval 2"),
    "log_format": Case("--log-format compact"),
    "log_kernels": planned("--log-kernels"),
    "log_memory_interval": Case("--log-memory-interval 1"),
    "tensorboard_dir": Case(TB),
    "tensorboard_log_interval": Case("--tensorboard-log-interval 2", TB, ""),
    "tensorboard_queue_size": Case("--tensorboard-queue-size 2", TB, ""),
    "metrics_jsonl": Case("--metrics-jsonl out/m.jsonl"),
    "log_timers_to_tensorboard": Case("--log-timers-to-tensorboard", TB, ""),
    "log_memory_to_tensorboard": Case("--log-memory-to-tensorboard", TB, ""),
    "log_validation_ppl_to_tensorboard": Case("--log-validation-ppl-to-tensorboard", TB, ""),
    "log_world_size_to_tensorboard": Case("--log-world-size-to-tensorboard", TB, ""),
    "log_batch_size_to_tensorboard": Case("--log-batch-size-to-tensorboard", TB, ""),
    "log_learning_rate_to_tensorboard": Case("--no-log-learnig-rate-to-tensorboard", TB, ""),
    "log_loss_scale_to_tensorboard": Case("--no-log-loss-scale-to-tensorboard", TB, ""),
    "log_params_norm": Case("--log-params-norm"),
    "log_num_zeros_in_grad": Case("--log-num-zeros-in-grad"),
    "timing_log_level": Case("--timing-log-level 2"),
    "timing_log_option": Case("--timing-log-option all", "--timing-log-level 2", ""),
    "wandb_project": Case(WANDB),
    "wandb_exp_name": Case("--wandb-exp-name e", WANDB, ""),
    "wandb_save_dir": Case("--wandb-save-dir out/w", WANDB, ""),
    "wandb_entity": Case("--wandb-entity e", WANDB, ""),
    "eval_interval": Case("--eval-interval 1", "", "--eval-iters 0"),
    "start_eval_at_iter": Case("--start-eval-at-iter 3", "", "--split 1,0,0"),
    "eval_global_batch_size": Case("--eval-global-batch-size 4", "", "--eval-iters 0"),
    "eval_micro_batch_size": Case("--eval-micro-batch-size 2", "", "--eval-iters 0"),
    "eval_iters": Case("--eval-iters 2"),
    "validation_samples": Case("--validation-samples 3", FILES, "--eval-iters 0"),
    "full_validation": Case("--full-validation", FILES, "--eval-iters 0"),
    "profile": Case("--profile", "--profile-step-end 11 --train-iters 12"),
    "profile_step_start": Case("--profile-step-start 1", TRACE.replace("end 1", "end 2"), ""),
    "profile_step_end": Case("--profile-step-end 2", TRACE, ""),
    "profile_ranks": ranked("--profile-ranks 0 1", TRACE, ""),
    "profile_dir": Case("--profile-dir out/q", TRACE, ""),
    "pytorch_profiler_collect_shapes": Case("--pytorch-profiler-collect-shapes", TRACE, ""),
    "pytorch_profiler_collect_callstack": Case("--pytorch-profiler-collect-callstack", TRACE, ""),
    "record_memory_history": Case("--record-memory-history", TRACE, ""),
    "device": planned("--device cuda"),
    "distributed_backend": planned("--distributed-backend nccl"),
    "config": Case("--config SEED.yaml"),
    "print_config": planned("--print-config"),
    "dry_run": planned("--dry-run", "--print-config"),
    "dry_run_ranks": planned("--dry-run-ranks 4"),
    "print_config_changed": planned("--changed", "--print-config", ""),
    "print_config_format": planned("--format yaml", "--print-config", ""),
    "device_memory": planned("--device-memory 1GB"),
}

CASES = MODEL | EXPERTS | PARALLEL | TRAINING | OPTIMIZER | DEEPSPEED | ROOM | DATA | CHECKPOINT | FOLLOWED

ELSEWHERE = {
    "perform_initialization": "saves time, as --load replaces what it would draw; tests/unit/training/test_loop.py",
    "store_param_remainders": "saves memory; tests/unit/optimizer/test_adam_flat.py",
    "optimizer_offload_directory": "where the state lies; tests/unit/optimizer/test_adam_offload.py",
    "optimizer_offload_fraction": "where a share of the state lies; tests/unit/optimizer/test_adam_offload.py",
    "consecutive_hysteresis": "data must overflow, and then not; tests/unit/optimizer/test_loss_scaler.py",
    "remote_device": "where the shards are; tests/cluster/test_offload.py",
    "use_distributed_optimizer": "as zero_stage; tests/unit/config/test_parallel_checks.py",
    "ddp_bucket_size": "a matter of time; tests/unit/engine/test_assembly.py",
    "overlap_param_gather": "a matter of time; tests/equivalence/test_zero.py",
    "overlap_grad_reduce": "a matter of time; tests/distributed/test_bucket_store.py",
    "no_overlap_grad_reduce": "a matter of time; tests/cluster/test_zero.py",
    "memory_snapshot_path": "CUDA writes it; tests/unit/training/test_profiling.py",
    "distributed_timeout_minutes": "of a collective that fails; tests/faults/test_heartbeat.py",
    "heartbeat_timeout_seconds": "of a rank that is lost; tests/faults/test_heartbeat.py",
    "deepspeed": "fills other settings; tests/unit/compat/deepspeed_file/test_source.py",
    "deepspeed_config": "fills other settings; tests/unit/compat/deepspeed_file/test_source.py",
    "local_rank": "of a launcher; tests/distributed/test_launchers.py",
}
"""Settings whose effect a small run does not show -> the test file that shows it."""
