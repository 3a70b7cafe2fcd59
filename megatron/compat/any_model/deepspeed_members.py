"""Members of DeepSpeed's engine that need no code here: the value they return, or the call to use instead."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.compat.deepspeed_file.table import keys_by_path
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Instead:
    """Text of the error for an unsupported member: what to do instead."""

    text: str


def _of_key(path: str) -> Instead:
    """Returns the notice or the fix that the table of configuration keys has for a key."""
    key = keys_by_path()[path]
    return Instead(f"{path} has no effect here: {key.line}" if key.line else f"not supported; {key.way_out}")


def _of_block(path: str, names: str) -> dict[str, Instead]:
    """Returns a method BLOCK_NAME for each of `names`. It raises with the text of the block `path`."""
    return {f"{path}_{name}": _of_key(path) for name in names.split()}


def _of_zero_keys(start: str, names: str) -> dict[str, Instead]:
    """Returns a method zero_NAME for each of `names`. It raises with the text of the key named `start` + NAME in
    `zero_optimization`."""
    return {f"zero_{name}": _of_key(f"zero_optimization.{start}{name}") for name in names.split()}


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_INTERNAL = Instead("it is internal to DeepSpeed and does not exist here; remove this line")
_REDUCES = Instead("engine.step() averages the gradients over the ranks; remove this line")
_COMPILES = Instead("not supported; use engine.compile(), or torch.compile on parts of the model")
_TIMES = Instead("the engine has no timers; use torch.profiler, or time engine.step() yourself")
_ONE_AXIS = Instead("every rank has the whole model and whole sequences; use torch.distributed.group.WORLD")

METHODS: Mapping[str, Any] = MappingProxyType(
    {
        **_each("amp_enabled torch_autocast_enabled autotuning_enabled compile_autosp compile_autotp", False),
        **_each("curriculum_enabled_legacy curriculum_learning_enabled data_efficiency_enabled", False),
        **_each("data_sampling_enabled eigenvalue_enabled elasticity_enabled flops_profiler_enabled", False),
        **_each("pld_enabled quantize_training random_ltd_enabled is_elastic_model_parallel_supported", False),
        **_each("is_deepcompile_active is_deepcompile_enabled is_sanity_checks_enabled graph_harvesting", False),
        **_each("dump_state memory_breakdown wall_clock_breakdown optimizer_legacy_fusion super_offload", False),
        **_each("sparse_gradients_enabled use_node_local_storage uses_parallelization_pass_only", False),
        **_each("fp16_master_weights_and_gradients bf16_master_weights_and_gradients bf16_optimizer_states", False),
        **_each("zero_legacy_stage1 zero_nvme_offload_optimizer zero_quantized_gradients", False),
        **_each("zero_quantized_weights zero_quantized_nontrainable_weights", False),
        **_each("managed_gradient_accumulation dataloader_drop_last zero_ignore_unused_parameters", True),
        **_each("checkpoint_tag_validation_enabled checkpoint_tag_validation_fail", True),
        **_each("zero_contiguous_gradients zero_gather_16bit_weights_on_model_save", True),
        **_each("get_model_parallel_rank get_tensor_parallel_rank autotp_size", 0),
        **_each("empty_partition_cache get_pld_theta zenflow_config zeropp_loco_param", None),
        "mics_shard_size": -1,
        "zero_hpz_partition_size": 1,
        "zero_partial_offload": 1.0,
        "aio_config": _of_key("aio"),
        "amp_params": _of_key("amp"),
        **_of_block(
            "autotuning", "end_profile_step metric metric_path model_info_path profile_model_info start_profile_step"
        ),
        **_each("curriculum_learning_config curriculum_params_legacy", _of_key("curriculum_learning")),
        **_each(
            "data_efficiency_config data_sampling_config random_ltd_config random_ltd_initialize",
            _of_key("data_efficiency"),
        ),
        **_of_block("eigenvalue", "gas_boundary_resolution layer_name layer_num max_iter stability tol verbose"),
        **_of_block(
            "flops_profiler", "detailed module_depth output_file profile_step recompute_fwd_factor top_modules"
        ),
        **_each("pld_gamma pld_params pld_theta", _of_key("progressive_layer_drop")),
        **_each("torch_autocast_dtype torch_autocast_lower_precision_safe_modules", _of_key("torch_autocast")),
        "fp16_auto_cast": _of_key("fp16.auto_cast"),
        "gradient_predivide_factor": _of_key("gradient_predivide_factor"),
        "load_universal_checkpoint": _of_key("checkpoint.load_universal"),
        "postscale_gradients": _of_key("prescale_gradients"),
        "swap_tensor_config": _of_key("aio"),
        "tensor_parallel_config": _of_key("tensor_parallel"),
        **_of_zero_keys(
            "",
            "allgather_bucket_size allgather_partitions elastic_checkpoint load_from_fp32_weights "
            "log_trace_cache_warnings reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory "
            "sub_group_size",
        ),
        **_of_zero_keys(
            "stage3_",
            "allgather_sequential max_live_parameters max_reuse_distance model_persistence_threshold "
            "module_granularity_threshold param_persistence_threshold prefetch_bucket_size",
        ),
        "zero_force_ds_cpu_optimizer": _of_key("zero_force_ds_cpu_optimizer"),
        "zero_multi_rank_bucket_allreduce": _of_key("zero_optimization.use_multi_rank_bucket_allreduce"),
        "zero_reduce_bucket_size": Instead(
            "megatron.compat.initialize() sets the size of its buckets itself; remove this line"
        ),
        **_each(
            "allreduce_bucket allreduce_and_copy allreduce_gradients allreduce_no_retain buffered_allreduce_fallback "
            "all_gather_scalar sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain",
            _REDUCES,
        ),
        **_each(
            "get_autosp_backend get_autotp_backend get_compile_time get_deepcompile_backend "
            "get_deepspeed_compile_backend register_compile_pass",
            _COMPILES,
        ),
        **_each("get_wall_clock_timers print_forward_breakdown", _TIMES),
        **_each(
            "checkpoint_serialization_enabled checkpoint_writer_enabled compile_zero_optimization_stage "
            "cpuadam_cores_perc is_first_weights_partition_group log_level zero_grad_hooks",
            _INTERNAL,
        ),
        **_each("is_iterable_style_dataset is_map_style_dataset", Instead("use torch.utils.data.IterableDataset")),
        "clip_fp32_gradients": Instead('give "gradient_clipping" in the config; engine.step() clips'),
        "coalesce_grad_reduction": Instead(
            "use engine.no_sync() around all backward passes but the last, then engine.backward(loss) and engine.step()"
        ),
        "deepspeed_io": Instead(
            "give training_data= to megatron.compat.initialize(), or make a DataLoader with a DistributedSampler"
        ),
        "dynamic_loss_scale_args": Instead("read engine.cur_scale; the settings are in the fp16 block of your config"),
        "get_sequence_parallel_group": _ONE_AXIS,
        "load_module_state_dict": Instead("use engine.module.load_state_dict(state), with whole tensors"),
        "load_moe_state_dict": Instead("use engine.load_checkpoint(directory)"),
        **_each(
            "offload_states reload_states",
            Instead('not supported; give "offload_optimizer": {"device": "cpu"} in zero_optimization'),
        ),
        "scale": Instead("call engine.backward(loss), which applies the loss scale"),
        **_each(
            "set_custom_curriculum_learning_schedule set_data_post_process_func",
            Instead("not supported; change samples in your dataset, or in collate_fn= of megatron.compat.initialize()"),
        ),
    }
)
"""Method -> its return value, or the text of the error that it raises."""

ATTRIBUTES: Mapping[str, Any] = MappingProxyType(
    {
        **_each("block_eigenvalue eigenvalue flops_profiler mesh_device mpu progressive_layer_drop quantizer", None),
        **_each("has_moe_layers optimized_linear_base_weight_sharding optimized_linear_lora_enabled", False),
        **_each("pipeline_parallelism torch_autocast_z0_gradscaler", False),
        **_each("mp_world_size sequence_parallel_size seq_dp_world_size", 1),
        **_each("gate_modules moe_layers num_experts summary_events", ()),
        "communication_data_type": Instead(
            "gradients are reduced in fp32, or in the parameters' dtype if that is wider"
        ),
        "config": Instead(
            "use the config that you gave to megatron.compat.initialize(); the model's is engine.module.config"
        ),
        **_each(
            "compression_scheduler curriculum_scheduler_legacy random_ltd_scheduler",
            Instead("not supported; remove this line"),
        ),
        **_each("enable_backward_allreduce gradient_average", _REDUCES),
        **_each("engine_timers engine_timers_cache fwd_duration timers tput_timer", _TIMES),
        **_each(
            "all_to_all_group data_parallel_group expert_data_parallel_group expert_parallel_group "
            "local_all_to_all_group seq_data_parallel_group seq_parallel_group",
            _ONE_AXIS,
        ),
        "dist_backend": Instead("use torch.distributed.get_backend()"),
        "losses": Instead("keep what engine.backward(loss) returns"),
        "monitor": Instead("the engine sends no metrics; log them in your training loop"),
        "collate_fn": Instead("read it from the loader: engine.training_dataloader"),
        "training_data": Instead("use the dataset that you gave to megatron.compat.initialize()"),
        "param_names": Instead("use engine.module.named_parameters()"),
        "client_lr_scheduler": Instead("use engine.lr_scheduler"),
        **_each("basic_optimizer client_optimizer", Instead("use engine.optimizer")),
        **_each(
            "loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size",
            Instead("a checkpoint loads into any number of ranks; remove this line"),
        ),
        "inside_no_sync_ctxt": Instead("keep track of engine.no_sync() in your program"),
        "flops": _of_key("flops_profiler"),
        "autotuning_model_info": _of_key("autotuning"),
        "sparse_tensor_module_names": _of_key("sparse_gradients"),
        **_each(
            "checkpoint_engine checkpoint_mp_rank dont_change_device first_dataloader_check flatten gas_boundary_ctr "
            "module_forward_post_hook module_forward_pre_hook save_non_zero_checkpoint save_zero_checkpoint "
            "scale_wrt_gas unflatten update_interval use_ds_comm warn_unscaled_loss",
            _INTERNAL,
        ),
    }
)
"""Attribute -> its value, or the text of the error that it raises."""


def deepspeed_member(name: str) -> Any:
    """Returns the attribute or method of this name from the tables."""
    if name in METHODS:
        return _method(name, METHODS[name])
    return _answer(f"engine.{name}", ATTRIBUTES[name])


def check_assignment(name: str) -> None:
    """Rejects setting an attribute of DeepSpeed's engine that nothing here would read."""
    if name in ATTRIBUTES:
        value = ATTRIBUTES[name]
        text = value.text if isinstance(value, Instead) else "the engine does not read it; remove this line"
        raise ConfigError(f"engine.{name} = ...: {text}")


def _method(name: str, value: Any) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        return _answer(f"engine.{name}()", value)

    return answer


def _answer(spelled: str, value: Any) -> Any:
    if isinstance(value, Instead):
        raise ConfigError(f"{spelled}: {value.text}")
    return value
