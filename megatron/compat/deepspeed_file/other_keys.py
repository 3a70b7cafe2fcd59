"""Keys of DeepSpeed's JSON about reports and activations, and keys of features that are configured elsewhere."""

from megatron.compat.deepspeed_file.keys import block, decided, no_effect, refused, sets

REPORTS = (
    sets("steps_per_print", "whole", "log_interval"),
    sets("wall_clock_breakdown", "switch", "timing_log_level", "true is level 1", int),
    no_effect("memory_breakdown", "switch", "see --log-memory-interval"),
    no_effect("dump_state", "switch", "see --print-config"),
    no_effect("timers", "block", "throughput is always reported; see --timing-log-level"),
    *block(
        "tensorboard",
        decided("enabled", "switch", "`--tensorboard-dir` OUTPUT_PATH/JOB_NAME"),
        decided("output_path", "text", "default: the working directory, as in DeepSpeed"),
        decided("job_name", "text", "default: DeepSpeedJobName"),
    ),
    *block(
        "wandb",
        decided("enabled", "switch", "turns Weights & Biases on; the default project is `deepspeed`"),
        sets("project", "text", "wandb_project"),
        sets("team", "text", "wandb_entity"),
        no_effect("group", "text", "runs are not grouped"),
    ),
    no_effect(
        "csv_monitor", "block", "no CSV files are written; --metrics-jsonl FILE gets one JSON object per logged step"
    ),
    no_effect("comet", "block", "nothing is sent to Comet; see --tensorboard-dir, --wandb-project, --metrics-jsonl"),
    no_effect("flops_profiler", "block", "TFLOP/s are always reported; --profile shows where the time of a step goes"),
)

_ONE_RECOMPUTATION = "recomputation has one implementation, see --recompute-granularity"

ACTIVATIONS = (
    *block(
        "activation_checkpointing",
        sets("partition_activations", "switch", "distribute_saved_activations"),
        refused("cpu_checkpointing", "switch", "use --cpu-offloading-num-layers", False),
        no_effect(
            "contiguous_memory_optimization synchronize_checkpoint_boundary profile", "switch", _ONE_RECOMPUTATION
        ),
        no_effect("number_checkpoints", "whole", _ONE_RECOMPUTATION),
    ),
)

_OTHERS = """autotuning compression_training curriculum_learning data_efficiency eigenvalue elasticity hybrid_engine
    nebula progressive_layer_drop quantize_training sparse_attention weight_quantization"""

REST = (
    *block(
        "checkpoint",
        no_effect("tag_validation", "text", "ranks always agree on the step that they save"),
        no_effect("load_universal", "switch", "a checkpoint loads into any layout"),
        refused("use_node_local_storage", "switch", "all ranks use one folder; remove it", False),
        no_effect("parallel_write", "block", "every rank writes its own share"),
    ),
    no_effect("vocabulary_size", "whole", "the tokenizer sets it, see --vocab-size"),
    no_effect("graph_harvesting", "switch", "see --cuda-graphs"),
    refused("tensor_parallel", "block", "use --tensor-model-parallel-size"),
    refused("sequence_parallel_size", "whole", "use --context-parallel-size with --cp-comm-type a2a", 1),
    refused("expert_parallel", "block", "use --expert-model-parallel-size"),
    refused("pipeline", "block", "use --pipeline-model-parallel-size"),
    refused("compile", "block", "use --compile"),
    *(refused(name, "block", "remove it") for name in _OTHERS.split()),
)
