"""Flags of Megatron-DeepSpeed that Megatron-LM does not have, in the format of megatron_lm_flag_table.py."""

LATER: dict[str, str] = {
    "use --cpu-offloading-num-layers": "--checkpoint-in-cpu",
    "use --moe-expert-capacity-factor": "--moe-train-capacity-factor= --moe-eval-capacity-factor= --moe-min-capacity=",
}

NEVER: dict[str, str] = {
    "use --profile": "--profile-backward",
    "use --profile-step-start and --profile-step-end": "--profile-steps=",
    "use --moe-layer-freq": "--expert-interval=",
    "use --num-experts": "--num-experts-switch=",
    "use --moe-shared-expert-intermediate-size": "--mlp-type=standard",
    "use --train-samples, which counts sequences": "--train-tokens=",
    "use --lr-decay-samples, which counts sequences": "--lr-decay-tokens=",
    "use --lr-warmup-samples, which counts sequences": "--lr-warmup-tokens=",
    "use --ckpt-step": "--load-tag=",
    "use --override-opt_param-scheduler": "--no-load-lr-state",
    "use --finetune": "--reset-iteration",
    "use --exit-signal-handler": "--kill-switch-file=",
    "use --data-path": "--aml-data-download-path= --use-dataset-only=",
    "--seed gives the order of samples; remove the flag": """
        --train-data-exact-num-epochs= --train-idx-path= --train-desc-path= --train-doc-idx-path=
        --train-sample-idx-path= --train-shuffle-idx-path= --repeated-dataloader --return-data-index""",
    "every token passes every layer, in the order of the data; remove the flag": """
        --random-ltd --curriculum-learning --data-efficiency-curriculum-learning""",
    "use tools/generate.py for generation": "--ds-inference --inference",
    "use --context-parallel-size": """
        --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size= --ds-sequence-parallel-fpdt-offloading""",
    "torchrun or Slurm starts the ranks; remove the flag": "--deepspeed_mpi",
    "use only --tensorboard-dir": "--log-optimizer-states-to-tensorboard",
    "remove the flag": "--scattered-embeddings --split-transformers --memory-centric-tiled-linear --tile-factor=1",
    "distillation is not built; remove the flag": """
        --kd --mos --kd-alpha-ce= --kd-beta-ce= --kd-temp= --load-teacher= --num-layers-teacher=
        --num-experts-teacher=... --hidden-size-teacher= --num-attention-heads-teacher=""",
}

RETIRED: dict[str, tuple[str, dict[str, str | bool | None]]] = {
    "--checkpoint-activations": (
        "taken as --recompute-granularity full --recompute-method uniform",
        {"recompute_granularity": "full", "recompute_method": "uniform"},
    ),
    "--checkpoint-num-layers=": ("taken as --recompute-num-layers", {"recompute_num_layers": None}),
    "--partition-activations": ("taken as --distribute-saved-activations", {"distribute_saved_activations": True}),
    "--distribute-checkpointed-activations": (
        "taken as --distribute-saved-activations",
        {"distribute_saved_activations": True},
    ),
    "--cpu-optimizer": ("taken as --optimizer-cpu-offload", {"optimizer_cpu_offload": True}),
    "--no-pipeline-parallel": ("taken as --pipeline-model-parallel-size 1", {"pipeline_model_parallel_size": "1"}),
    "--enable-zbh1-pipeline": ("taken as --pipeline-schedule zero-bubble", {"pipeline_schedule": "zero-bubble"}),
    "--ds-sequence-parallel-size=": (
        "taken as --context-parallel-size with --cp-comm-type a2a",
        {"context_parallel_size": None, "cp_comm_type": "a2a"},
    ),
    "--rotary-position-embeddings-theta=": ("taken as --rotary-base", {"rotary_base": None}),
    "--zero-reduce-bucket-size=": ("taken as --ddp-bucket-size", {"ddp_bucket_size": None}),
    "--topk=": ("taken as --moe-router-topk", {"moe_router_topk": None}),
    "--moe-loss-coeff=": ("taken as --moe-aux-loss-coeff", {"moe_aux_loss_coeff": None}),
    "--moe-expert-parallel-size=": ("taken as --expert-model-parallel-size", {"expert_model_parallel_size": None}),
    "--use-flash-attn-v1": ("taken as --use-flash-attn", {"use_flash_attn": True}),
    "--use-flash-attn-v2": ("taken as --use-flash-attn", {"use_flash_attn": True}),
    "--use-flash-attn-triton": ("taken as --use-flash-attn", {"use_flash_attn": True}),
    "--deepscale": ("taken as --deepspeed", {"deepspeed": True}),
    "--deepscale_config=": ("taken as --deepspeed_config", {"deepspeed_config": None}),
}

NO_OPS: dict[str, str] = {
    "tokens are dropped only with --moe-expert-capacity-factor": "--disable-moe-token-dropping",
    "the experts with the highest scores are always chosen": "--disable-moe-top2-2nd-expert-sampling",
    "experts are split over the tensor-parallel ranks, as all layers are": "--enable-expert-tensor-parallelism",
    "--pipeline-schedule zero-bubble gives exact results": "--enable-zbh1-exact-semantics",
    "--context-parallel-size turns it on": "--force-ds-sequence-parallel",
    "a checkpoint loads into any layout": "--universal-checkpoint",
    "recomputation has one implementation; see --recompute-granularity": """
        --deepspeed-activation-checkpointing --contigious-checkpointing --synchronize-each-layer""",
    "gradients are reduced, and weights gathered, in buckets of --ddp-bucket-size": """
        --zero-allgather-bucket-size= --zero-contigious-gradients --zero-reduce-scatter""",
    "memory is pinned if the device needs it": "--use-pin-memory",
    "there is one implementation of each optimizer; see --kernels": "--torch_adam --cpu_torch_adam --ds_fused_adam",
    "--kernels chooses the implementation of each operation": "--disable-mem-efficient-ln --use-flash-attn-builder",
    "there is one implementation, which routes and permutes tokens": "--use-tutel --create-moe-param-group",
    "the training process writes the checkpoint": """
        --checkpoint-io-buffer-size= --checkpoint-data-parallel= --checkpoint-writer-decoupled
        --aio-intra-op-parallelism=""",
}
