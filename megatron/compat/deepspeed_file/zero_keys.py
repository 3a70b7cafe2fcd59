"""Keys of DeepSpeed's JSON about communication, ZeRO and offload."""

from megatron.compat.deepspeed_file.keys import block, decided, no_effect, refused, sets, within

_BUCKETS = "weights are gathered in the buckets of reduce_bucket_size, and updated there"
_STAGE3 = "at stage 3 each layer is gathered before it runs and freed after it, which changes no result"
_FILES = "file access of optimizer state has one implementation"
_PINNED = "memory is pinned where a device needs it"
_BY_LAYER = "parameters come to the device layer by layer"


def _in_bf16(value: str) -> bool:
    if value not in ("fp32", "bf16"):
        raise ValueError("gradients are reduced in fp32, or in bf16; give one of these, or remove it")
    return value == "bf16"


COMMUNICATION = (
    sets("communication_data_type", "text", "grad_reduce_in_bf16", "`fp32`, or `bf16` with bf16 weights", _in_bf16),
    refused("seq_parallel_communication_data_type", "text", "remove it", "fp32"),
    refused("seq_parallel_comm_data_type", "text", "remove it", "fp32"),
    refused("gradient_allreduce_op", "text", "gradients are averaged; remove it", "mean"),
    no_effect("prescale_gradients", "switch", "gradients are divided once, by the number of counted samples or tokens"),
    no_effect("gradient_predivide_factor", "number", "gradients are divided once, and reduced in fp32"),
    no_effect("sparse_gradients", "switch", "gradients of embeddings are dense, which changes no result"),
    no_effect("disable_allgather", "switch", "how weights are gathered changes no result"),
    no_effect("use_data_before_expert_parallelism", "switch", "the order of ranks changes no result"),
    no_effect("comms_logger", "block", "see docs/scale.md for bytes between ranks, and --profile"),
)

ZERO = (
    *block(
        "zero_optimization",
        sets("stage", "whole", "zero_stage", '0 to 3; `"zero_optimization": true` is stage 1'),
        sets("overlap_comm", "switch", "overlap_grad_reduce"),
        no_effect(
            "reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce",
            "switch",
            "how ranks communicate changes no result",
        ),
        no_effect("contiguous_gradients", "switch", "gradients always live in contiguous buffers"),
        sets("reduce_bucket_size", "whole", "ddp_bucket_size", "default: 40 million or more"),
        no_effect("allgather_bucket_size sub_group_size", "whole", _BUCKETS),
        no_effect("round_robin_gradients", "switch", "each rank copies its own share of the gradients"),
        no_effect("parameter_alignment", "switch", "how buffers are laid out changes no result"),
        no_effect("compute_grad_norm", "switch", "the norm is computed when gradients are clipped or it is logged"),
        no_effect("ignore_unused_parameters", "switch", "a parameter without a gradient stays unchanged"),
        no_effect("load_from_fp32_weights", "switch", "a checkpoint holds the fp32 masters"),
        no_effect("elastic_checkpoint", "switch", "a checkpoint loads into any layout"),
        no_effect("legacy_stage1", "switch", "stage 1 has one implementation"),
        no_effect(
            "memory_efficient_linear override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings "
            "enable_sanity_checks mics_hierarchical_params_gather save_muon_momentum_buffer_in_memory",
            "switch",
            "a detail of DeepSpeed's own implementation",
        ),
        refused(
            "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
            "switch",
            "it would round communicated values; remove it",
            False,
        ),
        refused(
            "zero_hpz_partition_size",
            "whole",
            "no group of ranks keeps a second copy of the weights; remove it, or give pretrain_gpt.py "
            "--num-distributed-optimizer-instances",
            0,
            1,
        ),
        refused(
            "mics_shard_size",
            "whole",
            "remove it, and give pretrain_gpt.py --num-distributed-optimizer-instances the number of data-parallel "
            "ranks divided by this size",
            -1,
        ),
        refused("zeropp_loco_param", "block", "it would round communicated values; remove it"),
        refused("zenflow leaf_module", "block", "remove it"),
    ),
    no_effect(
        "zero_allow_untested_optimizer",
        "switch",
        "used only for your own optimizer in megatron.compat.initialize(), which is tested on pieces of parameters",
    ),
    no_effect("zero_force_ds_cpu_optimizer", "switch", "an offloaded step has one implementation"),
)

STAGE3 = within(
    "zero_optimization",
    no_effect(
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_partition_stream_chunk_size",
        "whole",
        _STAGE3,
    ),
    no_effect("stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential", "switch", _STAGE3),
    no_effect(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        "switch",
        "saved weights are whole",
    ),
)

OFFLOAD = (
    *within(
        "zero_optimization",
        *block(
            "offload_optimizer",
            decided("device", "text", "cpu: `--optimizer-cpu-offload`; nvme: `nvme_path`"),
            sets("ratio", "number", "optimizer_offload_fraction"),
            no_effect("pin_memory", "switch", _PINNED),
            decided("nvme_path", "text", "`--optimizer-offload-directory`"),
            no_effect("buffer_count", "whole", _FILES),
            no_effect("fast_init pipeline_read pipeline_write", "switch", _FILES),
        ),
        *block(
            "offload_param",
            decided(
                "device",
                "text",
                "`--remote-device`; no effect below stage 3, as in DeepSpeed, with a notice; nvme is rejected at stage "
                "3",
            ),
            no_effect("pin_memory", "switch", _PINNED),
            no_effect("nvme_path", "text", "parameters are not kept in files"),
            no_effect("buffer_count buffer_size max_in_cpu", "whole", _BY_LAYER),
        ),
        decided("cpu_offload", "switch", "same as `offload_optimizer` with device cpu"),
        decided("cpu_offload_param cpu_offload_params", "switch", "same as `offload_param` with device cpu"),
        no_effect("cpu_offload_use_pin_memory", "switch", _PINNED),
    ),
    no_effect("aio", "block", _FILES),
)
