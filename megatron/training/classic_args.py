"""Builds the `args` of Megatron-LM's checkpoints from a run."""

from typing import Any

from megatron.training.initialize import Run
from megatron.training.resume import Progress


def classic_args(run: Run, progress: Progress, *, is_gpt: bool) -> dict[str, Any]:
    """Builds the `args` that Megatron's readers of a `model_optim_rng.pt` look up. The checkpoint itself adds those
    that it derives from the model's settings (shape, activation)."""
    config, model, parallel = run.config, run.config.model, run.parallel
    of_model: dict[str, Any] = {}
    if is_gpt:
        of_model = {
            "num_query_groups": model.query_groups,
            "vocab_size": run.vocab_size,
            "padded_vocab_size": run.padded_vocab_size,
            "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
            "normalization": model.normalization,
            "norm_epsilon": model.norm_epsilon,
            "apply_query_key_layer_scaling": model.apply_query_key_layer_scaling,
            "add_bias_linear": model.add_bias_linear,
            "attention_dropout": model.attention_dropout,
            "hidden_dropout": model.hidden_dropout,
            "init_method_std": model.init_method_std,
        }
    return {
        **of_model,
        "seq_length": config.data.seq_length,
        "fp16": config.precision.fp16,
        "bf16": config.precision.bf16,
        "params_dtype": config.precision.params_dtype,
        "seed": config.training.seed,
        "iteration": progress.iteration,
        "consumed_train_samples": progress.consumed_train_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "tensor_model_parallel_size": parallel.tp.size,
        "pipeline_model_parallel_size": parallel.pp.size,
        "data_parallel_size": parallel.dp.size,
        "world_size": parallel.world.size,
    }
