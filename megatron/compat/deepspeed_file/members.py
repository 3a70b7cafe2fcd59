"""Keys of DeepSpeed's blocks that have only one row in the table. Any other key is rejected as a misspelling, even in a
block that is switched off."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from megatron.compat.deepspeed_file.keys import KINDS, Kind

_MEMBERS: Mapping[str, str] = MappingProxyType(
    {
        "aio": "block_size:whole queue_depth:whole intra_op_parallelism:whole thread_count:whole single_submit:switch "
        "overlap_events:switch use_gds:switch",
        "amp": "opt_level:text cast_model_type patch_torch_functions:switch keep_batchnorm_fp32 master_weights:switch "
        "loss_scale cast_model_outputs num_losses:whole verbosity:whole min_loss_scale:number max_loss_scale:number",
        "autotuning": "fast:switch results_dir:text exps_dir:text overwrite:switch metric:text metric_path:text "
        "start_profile_step:whole end_profile_step:whole tuner_type:text tuner_early_stopping:whole "
        "tuner_num_trials:whole arg_mappings:block model_info:block model_info_path:text mp_size:whole "
        "max_train_batch_size:whole min_train_batch_size:whole max_train_micro_batch_size_per_gpu:whole "
        "min_train_micro_batch_size_per_gpu:whole num_tuning_micro_batch_sizes:whole",
        "checkpoint.parallel_write": "pipeline_stage:switch",
        "comet": "samples_log_interval:whole project:text workspace:text api_key:text experiment_name:text "
        "experiment_key:text online:switch mode:text",
        "comms_logger": "verbose:switch prof_all:switch debug:switch prof_ops:list",
        "compile": "deepcompile:switch backend:text kwargs:block passes:list free_activation:switch "
        "free_activation_threshold:whole offload_activation:switch offload_activation_pin_memory:switch "
        "offload_opt_states:switch double_buffer:switch symmetric_memory:switch debug_log:switch "
        "offload_parameters:switch sync_before_reduce:switch sync_after_reduce:switch sync_before_allgather:switch "
        "sync_after_allgather:switch keep_int_input_tensors:switch keep_all_input_tensors:switch",
        "compression_training": "weight_quantization:block activation_quantization:block sparse_pruning:block "
        "row_pruning:block head_pruning:block channel_pruning:block layer_reduction:block",
        "compression_training.layer_reduction": "keep_number_layer:whole module_name_prefix:text teacher_layer:list "
        "other_module_name:list",
        "csv_monitor": "output_path:text job_name:text",
        "curriculum_learning": "curriculum_type:text min_difficulty:whole max_difficulty:whole schedule_type:text "
        "schedule_config:block",
        "data_efficiency": "seed:whole data_sampling:block data_routing:block",
        "data_efficiency.data_routing": "random_ltd:block",
        "data_efficiency.data_routing.random_ltd": "total_layer_num:whole random_ltd_layer_num:whole "
        "random_ltd_layer_id:list model_mask_name:text model_type:text micro_batch_size:whole global_batch_size:whole "
        "hidden_state_order:text random_ltd_schedule:block layer_token_lr_schedule:block",
        "data_efficiency.data_sampling": "num_epochs:whole num_workers:whole pin_memory:switch "
        "curriculum_learning:block dynamic_batching:block",
        "data_efficiency.data_sampling.curriculum_learning": "data_cluster_path:text curriculum_metrics:block",
        "data_efficiency.data_sampling.dynamic_batching": "metrics_path:text lr_scaling_method:text "
        "min_batch_size:whole max_batch_size:whole sequence_picking_order:text max_tokens:whole verbose:switch",
        "eigenvalue": "verbose:switch max_iter:whole tol:number stability:number gas_boundary_resolution:whole "
        "layer_name:text layer_num:whole",
        "elasticity": "max_train_batch_size:whole micro_batch_sizes:list min_gpus:whole max_gpus:whole min_time:whole "
        "version:number prefer_larger_batch:switch ignore_non_elastic_batch_info:switch num_gpus_per_node:whole "
        "model_parallel_size:whole",
        "expert_parallel": "autoep_size:whole expert_tensor_parallel_size:whole validate_folding_routing:switch "
        "preset_model:text moe_layer_pattern:text expert_pattern:text router_pattern:text use_grouped_mm:switch "
        "disable_triton_grouped_mm:switch route_norm:switch route_scale:number score_apply:text combine_impl:text "
        "num_expert_groups:whole num_limited_groups:whole score_func:text top_k:whole load_balance_coeff:number "
        "routed_scaling_factor:number expert_w1:text expert_w2:text expert_w3:text num_experts_attr:text "
        "top_k_attr:text has_shared_experts:switch shared_experts_pattern:text shared_experts_gate_pattern:text",
        "flops_profiler": "profile_step:whole module_depth:whole top_modules:whole detailed:switch output_file:text "
        "recompute_fwd_factor:number",
        "hybrid_engine": "max_out_tokens:whole inference_tp_size:whole release_inference_cache:switch "
        "pin_parameters:switch tp_gather_partition_size:whole enable_cuda_graph:switch",
        "nebula": "persistent_storage_path:text persistent_time_interval:whole num_of_version_in_retention:whole "
        "enable_nebula_load:switch nebula_load_path:text load_path:text",
        "pipeline": "stages partition:text seed_layers:switch activation_checkpoint_interval:whole "
        "pipe_partitioned:switch grad_partitioned:switch use_reentrant:switch",
        "progressive_layer_drop": "theta:number gamma:number",
        "quantize_training": "quantize_verbose:switch quantizer_kernel:switch quantize_bits:block quantize_type:text "
        "quantize_schedule:block quantize_groups:whole quantize_algo:block fp16_mixed_quantize:block rounding:text "
        "quantize_weight_in_forward:switch eigenvalue:block",
        "sparse_attention": "mode:text block:whole different_layout_per_head:switch num_local_blocks:whole "
        "num_global_blocks:whole attention:text horizontal_global_attention:switch "
        "num_different_global_patterns:whole num_random_blocks:whole local_window_blocks:list "
        "global_block_indices:list global_block_end_indices:list num_sliding_window_blocks:whole",
        "tensor_parallel": "autotp_size:whole tp_size:whole tp_grain_size:whole dtype:text tp_overlap_comm:switch "
        "tensor_parallel:block tp:block injection_policy_tuple:list partition_config:block preset_model:text "
        "keep_module_on_host:switch replace_with_kernel_inject:switch kernel_inject:switch",
        "timers": "throughput:block",
        "timers.throughput": "synchronized:switch",
        "torch_autocast": "dtype:text lower_precision_safe_modules:list",
        "weight_quantization": "shared_parameters:block different_groups:block quantized_initialization:block "
        "post_init_quant:block",
        "zero_optimization.leaf_module": "classes names name_suffixes",
        "zero_optimization.zenflow": "topk_ratio:number select_strategy:text select_interval update_interval "
        "overlap_step:switch offload:switch auto_ratio:number full_warm_up_rounds:whole pt_reserved_cores_perc:number "
        "steps_per_epoch:whole",
        "zero_optimization.zeropp_loco_param": "err_beta:number reset_T:whole",
    }
)
"""Block -> its keys. A block that is not listed may have any keys."""


@cache
def members_of(block: str) -> Mapping[str, Kind | None]:
    """Returns key -> type of the value (None: any type) for a block. Every listed block also has the key `enabled`. A
    block that is not listed gets an empty mapping."""
    if block not in _MEMBERS:
        return {}
    kinds: dict[str, Kind | None] = {"enabled": "switch"}
    for word in _MEMBERS[block].split():
        name, _, text = word.partition(":")
        kind = next((one for one in KINDS if one == text), None)
        assert kind is not None or not text, word
        kinds[name] = kind
    return MappingProxyType(kinds)
