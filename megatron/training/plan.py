"""`--dry-run`: what the settings amount to, without data, process group or memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron.config import RunConfig
from megatron.data.splits import sample_counts
from megatron.model.flops import flops_per_token
from megatron.model.gpt import GPT
from megatron.training.batch_plan import BatchPlan
from megatron.training.initialize import Run, layout_of
from megatron.training.model import held_parameters
from megatron.utils.device import human_bytes


def render_plan(run: Run, model_provider: Callable[[Run], nn.Module]) -> str:
    """A few lines; the model is counted on the meta device, so nothing is allocated."""
    config, plan = run.config, BatchPlan(run.config, run.parallel.dp.size)
    with torch.device("meta"):
        model = model_provider(run)
    parameters = sum(p.numel() for p in model.parameters())
    stages = layout_of(config, run.launch.world_size).group_of("pp", 0)
    held = max(held_parameters(run, model_provider, rank) for rank in stages)
    split = run.parallel.model.size > 1 or run.parallel.ep.size > 1
    tokens = plan.train_samples * config.data.seq_length
    train, valid, test = sample_counts(
        train_iters=plan.total_iterations,
        train_samples=plan.train_samples,
        eval_interval=config.evaluation.eval_interval,
        eval_iters=config.evaluation.eval_iters,
        global_batch_size=plan.final_batch_size,
    )
    rows = [
        ("ranks", f"{run.launch.world_size} (data parallel {plan.dp})"),
        *(
            [("vocabulary", f"{run.vocab_size}, padded to {run.padded_vocab_size} in memory")]
            if run.has_vocabulary
            else []
        ),
        (
            "parameters",
            f"{parameters} in {config.precision.params_dtype}{f', at most {held} on a rank' if split else ''}",
        ),
        (
            "batch",
            f"{plan.final_batch_size} samples = {config.training.micro_batch_size} per micro-batch x {plan.dp} ranks x "
            f"{plan.micro_batches(plan.final_batch_size)} accumulation steps",
        ),
        ("iterations", f"{plan.total_iterations}"),
        ("samples", f"{train} train, {valid} validation, {test} test"),
        ("tokens", f"{tokens}"),
        *_compute(run, model, tokens),
        (
            "memory per rank",
            f"{human_bytes(held * _bytes_per_parameter(config))} of weights, gradients and optimizer",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["dry run: all settings are valid", *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _compute(run: Run, model: nn.Module, tokens: int) -> list[tuple[str, str]]:
    """Nothing for a model that is not ours: we do not guess."""
    if not isinstance(model, GPT):
        return []
    per_token = flops_per_token(
        run.config.model, seq_length=run.config.data.seq_length, padded_vocab_size=run.padded_vocab_size
    )
    return [("compute", f"{per_token * tokens:.3e} FLOP (Megatron's formula for model FLOPs)")]


def _bytes_per_parameter(config: RunConfig) -> int:
    moments = 8 if config.optimizer.optimizer == "adam" else 4
    if config.precision.params_dtype == "float32":
        return 4 + 4 + moments
    masters = 2 if config.optimizer.store_param_remainders else 4
    return 2 + 4 + masters + moments  # half weights, fp32 gradients
