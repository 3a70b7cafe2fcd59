"""Tables for megatron_lm_flags.py: the text of an error or a notice -> the flags that it answers.

"--x" is a switch, and "--x=" takes a value. Text after the = is the neutral value, which is accepted ("--x=1"), or the
list of accepted values ("--x=a|b"). "--x=..." takes several values. VALUE in a fix stands for the given value.
"""

LATER: dict[str, str] = {
    "remove the flag": """
        --moe-router-force-load-balancing --moe-router-padding-for-fp8 --moe-router-padding-for-quantization
        --moe-input-jitter-eps= --moe-per-layer-logging --moe-apply-probs-on-input --moe-shared-expert-gate
        --moe-use-upcycling --moe-upcycling-granularity= --moe-token-dropping
        --pipeline-model-parallel-comm-backend=
        --embedding-init-method-std= --rotary-interleaved --no-rope-freq=
        --window-attn-skip-freq= --qk-l2-norm --quick-geglu --activation-func-clamp-value= --glu-linear-offset=0
        --softmax-type=vanilla --check-for-large-grads --log-energy --log-progress --log-max-attention-logit
        --qk-clip --qk-clip-alpha= --qk-clip-threshold= --log-device-memory-used --straggler-ctrlr-port=
        --straggler-minmax-count= --disable-straggler-on-startup --error-injection-rate=0 --error-injection-type=
        --result-rejected-tracker-filename= --nvtx-ranges --train-sync-interval= --decrease-batch-size-if-needed
        --phase-transition-iterations= --distributed-timeout-seconds-after-init= --nccl-communicator-config-path=
        --num-dataset-builder-threads=1 --mid-level-dataset-surplus=0.005
        --allow-ambiguous-pad-tokens --tokenizer-metadata=
        --pretrained-checkpoint= --ckpt-convert-save= --load-main-params-from-ckpt
        --compile-dtypes --save-on-signal --wandb-resume= --calc-ft-timeouts
        --use-mup --mtp-use-repeated-layer --attention-output-gate --embedding-weights-in-fp32
        --freeze-all-layers --save-activations-interval= --save-dgrads-interval= --save-params-interval=
        --save-tokens-per-expert-interval= --save-wgrads-interval= --record-shapes --pytorch-profiler-collect-chakra
        --gpu-sniff-test-interval= --batch-invariant-mode --batch-invariant-backend= --otel-enabled
        --otel-service-name= --otel-span-groups=... --dataloader-defer-npy-index-mmap --dataloader-fast-cache-load
        --use-same-sampling-seed-across-dp-ranks --mlp-chunks-for-training=
        --disable-clone-scatter-output-in-embedding --disable-manual-gc-eval --disable-log-loss-scale-to-tensorboard
        --expert-tensor-parallel-num-weight-shards= --tensor-parallel-num-weight-shards= --ft-num-warmup-iters=
        --chat-template= --enable-msc --disable-use-tokenizer-model-from-checkpoint-args
        --disable-ckpt-load-validate-sharding-integrity --disable-strict-fsdp-dtensor-load --fake-process-group""",
    "multi-latent attention is not built; remove the flag": """
        --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim= --rotary-scaling-factor= --mscale= --mscale-all-dim=
        --cache-mla-latents --mla-down-proj-fusion --disable-dsa-indexer-rotate-activation
        --disable-dsa-indexer-scoring-relu --no-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu
        --dsa-indexer-head-dim= --dsa-indexer-k-norm-epsilon= --dsa-indexer-k-norm-fp32 --dsa-indexer-loss-coeff=
        --dsa-indexer-n-heads= --dsa-indexer-rope-interleaved --dsa-indexer-skip-topk-offset= --dsa-indexer-topk=
        --dsa-indexer-topk-freq= --dsa-indexer-use-sparse-loss --dsa-kernel-backend=
        --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int""",
    "use --num-virtual-stages-per-pipeline-rank VALUE": "--virtual-pipeline-model-parallel-size=1",
    "use --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers": """
        --pipeline-model-parallel-layout=""",
    "remove the flag; see --context-parallel-size and --cp-comm-type": """
        --hybrid-context-parallel --max-seqlen-per-dp-cp-rank=""",
    "every optimizer instance has the whole state; remove the flag, or lower --num-distributed-optimizer-instances to "
    "shard the state over more ranks": "--outer-dp-sharding-strategy=no_shard",
    "master weights and gradients are fp32; remove the flag": """
        --main-grads-dtype=fp32 --main-params-dtype=fp32
        --megatron-fsdp-main-params-dtype=fp32 --megatron-fsdp-main-grads-dtype=fp32
        --megatron-fsdp-grad-comm-dtype=fp32""",
    "fp8 is not built; remove the flag": """
        --fp8-e4m3 --fp8-hybrid --fp8-interval=1 --no-fp8-wgrad --fp8-wgrad --first-last-layers-bf16
        --num-layers-at-start-in-bf16=0 --num-layers-at-end-in-bf16=0 --fp8-param --fp8-quantizer-factory=
        --disable-fp8-wgrad --fp8-param-gather""",
    "use --apply-wd-to-qk-layernorm": "--no-weight-decay-cond-type=",
    "multi-token prediction is not built; remove the flag": """
        --mtp-detach-heads --mtp-hsm --mtp-hybrid-override-pattern= --mtp-standalone --num-speculative-tokens=""",
    "mu-parametrization is not built; remove the flag": """
        --mup-attn-scale-power= --mup-base-head-dim= --mup-base-hidden-size= --mup-embedding-mult= --mup-output-mult=
        --mup-width-mult=""",
    "use --recompute-granularity full": """
        --activation-offload-fraction= --fine-grained-activation-offloading
        --fine-grained-offloading-max-inflight-offloads= --offload-modules=... --min-offloaded-tensor-size=
        --delta-offload-bytes-across-pp-ranks= --delay-offload-until-cuda-graph
        --cpu-offloading-retain-pinned-cpu-buffers""",
    "datasets need no such file; remove the flag": "--per-dataset-sequences-path=",
    "--exit-signal-handler also ends the data-loader workers; remove the flag": """
        --exit-signal-handler-for-dataloader --exit-signal-handler-for-training""",
    "use tokenizer.json or the tokenizer's original files": """
        --tokenizer-hf-no-use-fast --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces""",
    "samples are never padded; remove the flag": "--null-tokenizer-pad-id=-1",
    "--make-vocab-size-divisible-by sets the padding of the vocabulary; use --make-vocab-size-divisible-by 1": """
        --no-pad-vocab-size --disable-pad-vocab-size""",
}

NEVER: dict[str, str] = {
    "use --lr-warmup-fraction, --lr-warmup-iters or --lr-warmup-samples": "--warmup=",
    "use --kernels and --fp16 or --bf16": """
        --fp4-format= --fp4-recipe= --fp4-param-gather --kitchen-config-file= --kitchen-recipe-number=
        --te-precision-config-file= --keep-fp8-transpose-cache --reuse-grad-buf-for-mxfp8-param-ag --onnx-safe=
        --use-kitchen-attention --kitchen-attention-backend=""",
    "data parallelism has no such option; remove the flag": """
        --enable-full-sharding-in-hsdp --use-sharp --sharp-enabled-group= --data-parallel-random-init
        --lazy-mpu-init=""",
    "only GPT-style decoders are supported; remove the flag": """
        --encoder-num-layers= --decoder-num-layers= --decoder-seq-length= --vocab-extra-ids=0
        --pipeline-model-parallel-split-rank= --standalone-embedding-stage --bert-no-binary-head --mask-prob=
        --short-seq-prob= --mask-factor= --mask-type= --relative-attention-num-buckets=
        --relative-attention-max-distance= --mrope-section=... --hybrid-attention-ratio=0 --hybrid-mlp-ratio=0
        --hybrid-override-pattern= --hybrid-layer-pattern= --is-hybrid-model --disable-mamba-mem-eff-path
        --experimental-attention-variant= --linear-attention-type= --linear-attention-freq=
        --heterogeneous-layers-config-path= --heterogeneous-layers-config-encoded-json= --query-in-block-prob=
        --use-one-sent-docs --titles-data-path= --evidence-data-path= --block-data-path= --embedding-path=
        --indexer-batch-size= --indexer-log-interval= --img-h= --img-w= --num-classes= --num-channels= --patch-dim=
        --classes-fraction= --data-per-class-fraction= --head-lr-mult= --iter-per-epoch= --output-bert-embeddings
        --bert-embedder-type= --bert-load= --num-classes-per-head= --sample-rate=1
        --perform-rl-step --spec=... --enable-experimental --add-retriever
        --linear-conv-kernel-dim= --linear-key-head-dim= --linear-num-key-heads= --linear-num-value-heads=
        --linear-value-head-dim= --gdp-cutedsl-kernel --gdp-num-chunk-states-to-recompute= --gdp-num-householder=
        --enable-mhc-connections --mhc-init-gating-factor= --mhc-num-residual-streams= --mhc-recompute-layer-num=
        --mhc-sinkhorn-iterations=""",
    "--make-vocab-size-divisible-by and the tokenizer give the padded size; remove the flag": "--padded-vocab-size=",
    "use tools/generate.py for generation": """
        --max-tokens-to-oom= --flash-decode --use-legacy-static-engine --symmetric-ar-type=
        --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill= --disable-chunked-prefill --decode-only-cuda-graphs
        --enable-chunked-prefill --output-logit-dtype= --refit-method=""",
    "a tokenizer's code is never executed; give a tokenizer.json": "--trust-remote-code",
    "use --config VALUE": "--yaml-cfg=",
    "use --print-config": "--config-logger-dir=",
    "checkpoints have --ckpt-format torch, which loads into any layout; remove the flag": """
        --ckpt-convert-update-legacy-dist-opt-format""",
    "give the layout on the command line": "--use-mp-args-from-checkpoint-args",
    "remove the flag, or give another tokenizer, which replaces the checkpoint's": """
        --no-use-tokenizer-model-from-checkpoint-args""",
    "use --exit-signal-handler and --load, which resume a run under any scheduler": """
        --adlr-autoresume --adlr-autoresume-interval= --enable-ft-package""",
    "use torchrun, which restarts failed runs": "--inprocess-restart",
    "remove the flag": """
        --run-workload-inspector-server --dump-param-to-param-group-map=
        --disable-bf16-reduced-precision-matmul --tensorboard-flush-secs= --rope-type=rope""",
    "distillation is not built; remove the flag": """
        --export-te-mcore-model --export-kd-teacher-load= --export-kd-cfg= --logits-load-decode-threads=
        --logits-load-dir= --logits-load-ignore-errors --logits-load-kd-loss-alpha= --logits-load-msc-prefetch-depth=
        --logits-load-prefetch-factor= --logits-save-dir= --logits-save-dtype= --logits-save-top-k=
        --logits-save-top-p= --logits-save-top-p-min-k=""",
}

FAMILIES: dict[str, str] = {
    "--retro-": "RETRO is not supported; remove the --retro-* flags",
    "--rl-": "reinforcement learning is not supported; remove the --rl-* flags",
    "--grpo-": "reinforcement learning is not supported; remove the --grpo-* flags",
    "--langrl-": "reinforcement learning is not supported; remove the --langrl-* flags",
    "--ict-": "only GPT-style decoders are supported; remove the --ict-* flags",
    "--biencoder-": "only GPT-style decoders are supported; remove the --biencoder-* flags",
    "--retriever-": "only GPT-style decoders are supported; remove the --retriever-* flags",
    "--vision-": "only GPT-style decoders are supported; remove the --vision-* flags",
    "--swin-": "only GPT-style decoders are supported; remove the --swin-* flags",
    "--dino-": "only GPT-style decoders are supported; remove the --dino-* flags",
    "--mamba-": "only GPT-style decoders are supported; remove the --mamba-* flags",
    "--inference-": "not supported in training; use tools/generate.py for generation",
    "--inprocess-": "torchrun restarts failed runs; remove the --inprocess-* flags",
    "--moe-": "this flag of mixture of experts is not supported; docs/flags.md has the supported ones",
    "--muon-": "this flag of Muon is not supported; docs/flags.md has the supported ones",
    "--fp8-": "fp8 is not supported yet; remove the flag",
    "--fp4-": "fp4 is not supported; use --bf16",
    "--cuda-graph-": "not supported; use --cuda-graphs, which captures the whole forward and backward pass",
    "--hybrid-": "only GPT-style decoders are supported; remove the --hybrid-* flags",
    "--fault-injector-": "fault injection is not supported; remove the --fault-injector-* flags",
    "--gtp-": "not supported; remove the --gtp-* flags",
    "--megatron-fsdp-": "Megatron-FSDP is not supported; remove the --megatron-fsdp-* flags",
}

# flag -> (notice, {field that the flag sets: value; None stands for the value that the user gave})
RETIRED: dict[str, tuple[str, dict[str, str | bool | None]]] = {
    "--activations-checkpoint-method=": (
        "taken as --recompute-granularity full with this --recompute-method",
        {"recompute_granularity": "full", "recompute_method": None},
    ),
    "--checkpoint-granularity=": ("taken as --recompute-granularity", {"recompute_granularity": None}),
    "--checkpoint-method=": ("taken as --recompute-method", {"recompute_method": None}),
    "--activations-checkpoint-num-layers=": ("taken as --recompute-num-layers", {"recompute_num_layers": None}),
    "--use-megatron-fsdp": (
        "taken as --data-parallel-sharding-strategy optim_grads_params",
        {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "--use-custom-fsdp": (
        "taken as --data-parallel-sharding-strategy optim_grads_params",
        {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    "--check-weight-hash-across-dp-replicas-interval=": (
        "taken as --check-replicas-every",
        {"check_replicas_every": None},
    ),
    "--no-query-key-layer-scaling": (
        "query-key layer scaling is off unless --apply-query-key-layer-scaling is given",
        {"apply_query_key_layer_scaling": False},
    ),
}

# notice: why the flag has no effect -> flags
NO_OPS: dict[str, str] = {
    "gradients are accumulated and reduced in fp32, unless --grad-reduce-in-bf16 is given": """
        --accumulate-allreduce-grads-in-fp32""",
    "the loss is always the mean over the counted tokens of the global batch": "--calculate-per-token-loss",
    "experts need no padding, and padding changes no result": "--moe-pad-expert-input-to-capacity",
    "initial weights never depend on the device or the layout": "--use-cpu-initialization",
    "data parallelism has one implementation, which gives the same gradients": "--DDP-impl=local|torch",
    "data is always read as .bin/.idx": "--data-impl=mmap|infer|lazy|cached",
    "the operating system's page cache keeps the files in memory": "--mmap-warmup",
    "tensor-parallel communication always overlaps, which changes no result": """
        --no-async-tensor-model-parallel-allreduce""",
    "gradients always live in contiguous buffers": "--no-contiguous-buffers-in-local-ddp",
    "stages exchange whole activations, or with --sequence-parallel each rank's slice": """
        --no-scatter-gather-tensors-in-pipeline""",
    "pipeline communication always overlaps where it can, which changes no result": "--overlap-p2p-communication",
    "there is one model implementation": "--use-mcore-models --use-legacy-models",
    "attention masks are never made in the data loader": "--no-create-attention-mask-in-dataloader",
    "attention masks are made from document ids inside the model": "--create-attention-mask-in-dataloader",
    "the loss is always computed in fp32, which is more exact and does not overflow": "--fp16-lm-cross-entropy",
    "--kernels chooses the implementation of the cross-entropy": "--cross-entropy-loss-fusion",
    "training runs no tests; tools/check_layout.py compares layouts": "--test-mode",
    "there is no one-logger": """
        --no-one-logger --one-logger-project= --one-logger-run-name= --one-logger-async --app-tag-run-name=
        --app-tag-run-version=""",
    "there is no multi-storage client": "--disable-msc",
    "tokenizers have one implementation, which gives the same ids": "--legacy-tokenizer",
    "timers never wait for other ranks": "--no-barrier-with-level-1-timing",
    "each stage reduces its gradients as soon as it has them": "--no-align-grad-reduce",
    "each stage gathers its parameters when it needs them": "--no-align-param-gather",
    "the embedding's output shares no memory with another tensor": "--no-clone-scatter-output-in-embedding",
    "gloo is only used if the device needs it": "--disable-gloo-process-groups",
    "the format of a checkpoint is always detected": "--auto-detect-ckpt-format",
    "only applies to distributed formats; --ckpt-format torch is written": """
        --ckpt-fully-parallel-save --no-ckpt-fully-parallel-save --ckpt-assume-constant-structure""",
    "only applies to distributed formats; --ckpt-format torch is read": "--ckpt-fully-parallel-load",
    # The flags below choose among implementations that give the same result. No flags will be added to this list.
    "--cpu-offloading-num-layers turns offloading on": "--cpu-offloading",
    "copies for an offloaded optimizer always overlap and use pinned memory; --kernels chooses its operations": """
        --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
        --no-pin-cpu-params""",
    "the training process writes the checkpoint, with --async-save in a thread": """
        --use-persistent-ckpt-worker --async-strategy= --async-ckpt-use-cpu-shm --async-ckpt-cpu-priority=
        --async-ckpt-io-priority=""",
    "only applies to distributed formats; a checkpoint here loads into any layout": """
        --use-dist-ckpt --dist-ckpt-format= --dist-ckpt-strictness= --dist-ckpt-save-pre-mcore-014
        --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-workers=
        --no-ckpt-load-validate-sharding-integrity --ckpt-fully-parallel-save-process-group=
        --ckpt-fully-parallel-load-process-group= --ckpt-fully-parallel-load-exchange-algo=
        --ckpt-fully-parallel-load-per-rank-objects --ckpt-drop-redundant-extra-state --ckpt-pg-tensors-cache-create
        --ckpt-pg-tensors-cache-path= --no-strict-fsdp-dtensor-load""",
    "checksums are always verified, unless --skip-hash": "--verify-integrity",
    "there is one implementation, which routes and permutes tokens": """
        --moe-router-fusion --moe-permute-fusion --moe-enable-deepep --moe-deepep-num-sms=
        --moe-flex-dispatcher-backend= --moe-use-legacy-grouped-gemm --moe-extended-tp""",
    "it would change only which operations overlap, not the result": """
        --overlap-moe-expert-parallel-comm --delay-wgrad-compute --overlap-p2p-communication-warmup-flush
        --defer-embedding-wgrad-compute --wgrad-deferral-limit=0 --moe-shared-expert-overlap
        --ep-overlap-early-attn-memory-release --overlap-dispatch-backward-with-experts-wgrad
        --high-priority-stream-groups=... --high-priority-a2a-comm-stream""",
    "context-parallel ranks exchange over one group, which changes no result": """
        --hierarchical-context-parallel-sizes=...""",
    "tensor-parallel communication always overlaps": """
        --tp-comm-overlap-cfg= --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad
        --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --disable-tp-comm-split-ag
        --disable-tp-comm-split-rs --tp-comm-bootstrap-backend= --tp-comm-atomic-ag --tp-comm-atomic-rs
        --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs
        --no-tp-comm-split-ag --no-tp-comm-split-rs""",
    "the mean is taken over the counted tokens of the global batch": "--ddp-average-in-collective",
    "--ddp-bucket-size sets the size of all gradient buckets": """
        --ddp-num-buckets= --ddp-pad-buckets-for-high-nccl-busbw""",
    "each stage of ZeRO has one implementation, and data parallelism one order of ranks": """
        --init-model-with-meta-device --fsdp-double-buffer --suggested-communication-unit-size= --use-nccl-ub
        --disable-symmetric-registration --use-ring-exchange-p2p --no-gradient-reduce-div-fusion
        --no-use-layer-wise-param-layout --fsdp-db-use-persist-buf-on-alloc-fail --fsdp-manual-registration
        --disable-align-grad-reduce --create-all-gather-group --overlap-param-gather-with-optimizer-step""",
    "--kernels chooses the implementation of each operation": """
        --cross-entropy-fusion-impl=native --te-rng-tracker --use-te-activation-func --use-transformer-engine-op-fuser
        --disable-jit-fuser --fused-residual-rmsnorm --use-fused-weighted-squared-relu
        --use-grouped-gemm-for-shared-expert --use-grouped-gemm-for-dense-mlp --flash-attention-version=""",
    "--cuda-graphs always captures the whole forward and backward pass of a micro-batch": """
        --cuda-graph-impl=none --cuda-graph-scope=... --cuda-graph-modules=... --cuda-graph-warmup-steps=
        --enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph""",
    "ranks are ordered tp, cp, dp, pp, which changes no result": "--use-tp-pp-dp-mapping",
    "the allocator keeps its memory between steps": "--empty-unused-memory-level=0",
    "the log has one level; --timing-log-level chooses the timers": "--logging-level=",
    "gigatoken is always used if it is installed and gives equal ids": "--use-gigatoken",
    "no special token is added to a document, except Llama 2's first one": "--tokenizer-hf-no-include-special-tokens",
    "a watchdog and a record of each rank's last collectives are always on (docs/parallelism.md)": """
        --flight-recorder-dump-path= --flight-recorder-trace-buffer-size= --flight-recorder-include-stack-trace
        --no-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec
        --no-flight-recorder-include-only-active --disable-flight-recorder-dump-on-timeout
        --disable-flight-recorder-extra-dump-on-exec --disable-flight-recorder-include-only-active""",
}
