"""Implements `--dry-run`: checks and describes the configured run, without a process group or memory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from megatron.checkpoint.found_step import describe_step
from megatron.checkpoint.save import bytes_besides
from megatron.config import MoEConfig, ParallelConfig, RunConfig
from megatron.config.blend import data_sources, given_sets
from megatron.config.refusals import Refusals
from megatron.config.stages import stage_layers
from megatron.data.split_datasets import sources_of
from megatron.data.splits import sample_counts
from megatron.data.validation import sizes_of_sets
from megatron.distributed.parallel_state import ParallelState
from megatron.errors import printable
from megatron.layout import Layout
from megatron.model.gpt import GPT
from megatron.parallelize import check_can_be_split, held_parameters
from megatron.training.batches import check_validation
from megatron.training.fit import plan_rows
from megatron.training.initialize import Run
from megatron.training.memory import offloaded_share, on_accelerator, state_of
from megatron.training.model import count_by_stage, model_flops
from megatron.training.output_places import check_output_places, space_for
from megatron.training.resume import ResumePoint
from megatron.training.state_bytes import copy_bytes
from megatron.utils.device import human_bytes
from megatron.utils.dtype import refuse_complex

NOT_CHECKED = (
    "not checked, because it needs other processes or the device:",
    "  - the connection between the ranks, and that their files, settings and packages are equal",
    "  - that the device can allocate the memory, and that its kernels compute correctly",
    "  - the sample order (built at the first launch) and the ids of data without a record",
    "  - checksums of the checkpoint's files, and folders on each machine's own disk",
    "  - code of your own: providers and hooks",
)
"""Last lines of the plan."""
_SHOWN = 4
"""Longest list of groups, or of ranks in a group, that is shown whole."""
_BYTES_OF_A_TOKEN = 100
"""Bytes of a token in the files of a tokenizer: 70 with 1,024 tokens, 104 with 151,000."""
_BUILT = 2048
"""Largest number of experts, over all layers, that are built one by one."""


def check_launch_files(run: Run, *, needs_data: bool) -> None:
    """Opens the data sources and the checkpoint's manifest, as a launch would. Does no slow work (sample order, hashes,
    tensors), and does not call a script's own datasets provider."""
    config, refusals = run.config, Refusals()
    if needs_data and not config.data.mock_data:
        with refusals.of_checking():
            _check_data(run)
    load, finetune = config.checkpoint.load, config.checkpoint.finetune
    if load is not None and not finetune:  # with --finetune it may be a Megatron-LM checkpoint, which has no manifest
        with refusals.of_checking():
            _check_checkpoint(run, Path(load))
    with refusals.of_checking():
        check_output_places(config)
    refusals.end()


def _check_data(run: Run) -> None:
    config = run.config
    sources = sources_of(
        config.data,
        vocab_size=run.data_vocab_size,
        eod_id=run.eod_id,
        tokenizer_fingerprint=run.tokenizer_fingerprint,
        tokenizer=run.tokenizer,
        chat=run.chat,
        say=run.log.info,
    )
    prefixes = [prefix for blend in data_sources(config.data).blends if blend for prefix in blend.prefixes]
    sources.prepare(prefixes)
    for prefix in dict.fromkeys(prefixes):
        sources.open(prefix)
    if config.evaluation.eval_iters:
        for split, samples in sizes_of_sets(config.data, sources):
            check_validation(run, samples, split)


def _check_checkpoint(run: Run, directory: Path) -> None:
    settings = run.config.checkpoint
    found = describe_step(
        directory,
        step=settings.ckpt_step,
        save_dir=Path(settings.save) if settings.save else None,
        strict=settings.strict_load,
        source=run.source,
    )
    point = ResumePoint(found)
    point.check_architecture(run.config)
    if not run.config.training.skip_train:
        point.check_tokenizer(run.tokenizer)
        for warning in point.check_settings(run.config):
            run.log.warn(warning)


def render_plan(run: Run, model_provider: Callable[[Run], nn.Module]) -> str:
    """Describes the run in a few lines. The model is built on the meta device, so nothing is allocated."""
    config, plan = run.config, run.batch_plan
    model, moe = _described(run, model_provider)
    refuse_complex(model, "the model provider's model")
    layout = config.parallel.layout(run.launch.world_size)
    check_can_be_split(model, config.parallel, ParallelState.plan(layout, 0))
    parameters = held_parameters(model, ParallelConfig(), ParallelState.plan(Layout(1), 0), moe)
    by_stage = count_by_stage(run, model, moe)
    held = max(by_stage)
    split = layout.size("model") > 1 or layout.ep > 1
    tokens = plan.train_samples * config.data.seq_length
    counts = sample_counts(
        train_iters=plan.total_iterations,
        train_samples=plan.train_samples,
        eval_interval=config.evaluation.eval_interval,
        eval_iters=config.evaluation.eval_iters,
        global_batch_size=plan.evaluation_batch_size,
    )
    train, valid, test = (count if given else 0 for count, given in zip(counts, given_sets(config.data)))
    rows = [
        ("ranks", f"{run.launch.world_size} (data parallel {plan.dp})"),
        *_groups(layout),
        *(_stages(run, layout, by_stage) if layout.pp > 1 else []),
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
            f"{plan.final_batch_size} samples = {plan.micro_batch_size} per micro-batch x {plan.dp} ranks x "
            f"{plan.micro_batches(plan.final_batch_size)} accumulation steps",
        ),
        ("iterations", f"{plan.total_iterations}"),
        ("samples", f"{train} train, {valid} validation, {test} test"),
        ("tokens", f"{tokens}"),
        ("checkpoints", _checkpoints(run, model, parameters)),
        *_compute(run, model, tokens),
        _memory(run, held),
        *plan_rows(run, model, moe),
        *(_copy_to_save(config, held, layout.expert_dp) if config.checkpoint.async_save else []),
    ]
    width = max(len(name) for name, _ in rows)
    lines = (f"  {name:<{width}}  {printable(text)}" for name, text in rows)
    return "\n".join(["dry run: all settings are valid", *lines, *NOT_CHECKED])


def _memory(run: Run, held: int) -> tuple[str, str]:
    """Table row about weights, gradients and optimizer, given the number of parameters on a rank."""
    on_host = run.config.parallel.parameters_on_host and on_accelerator(run)
    away = offloaded_share(run)
    return (
        "memory per rank",
        f"{human_bytes(round(state_of(run, held).total))} of weights, gradients and optimizer"
        + (", in host memory; a layer is on the device when it runs" if on_host else "")
        + (f"; {away:.0%} of the optimizer's state is offloaded" if away else ""),
    )


def _copy_to_save(config: RunConfig, held: int, dp: int) -> list[tuple[str, str]]:
    return [("copy to save", f"{human_bytes(round(copy_bytes(config, held, dp)))} of host memory (--async-save)")]


def _described(run: Run, model_provider: Callable[[Run], nn.Module]) -> tuple[nn.Module, MoEConfig | None]:
    """Builds the model on the meta device. With very many experts, a GPT is built with one expert (experts are equal),
    and the original settings are returned to count all of them."""
    moe, layers = run.config.moe, run.config.model.num_layers
    with torch.device("meta"):
        if (moe.num_experts or 0) * layers > max(_BUILT, layers):
            fewer = replace(
                moe, num_experts=1, moe_router_topk=1, moe_router_num_groups=None, moe_router_group_topk=None
            )
            model = model_provider(replace(run, config=replace(run.config, moe=fewer)))
            if isinstance(model, GPT) and model.make.moe is fewer:
                return model, moe
        return model_provider(run), None


def _checkpoints(run: Run, model: nn.Module, parameters: int) -> str:
    settings = run.config.checkpoint
    if settings.save is None:
        return "none (no --save): the weights are lost when the run ends"
    often = "" if settings.save_interval is None else f"every {settings.save_interval} iterations and "
    kind, interval = settings.non_persistent_ckpt_type, settings.non_persistent_save_interval
    between = "" if kind is None or interval is None else f"; {kind} non-persistent ones every {interval} iterations"
    space = space_for(_step_bytes(run, model, parameters), settings.save)
    return f"{often}at the end, in {settings.save}{between}{space}"


def _step_bytes(run: Run, model: nn.Module, parameters: int) -> float:
    """Estimates the bytes of a checkpoint with all its files."""
    config, tokenizer, ranks = run.config, run.tokenizer, run.launch.world_size
    kinds = round(copy_bytes(config, 1, 1) / 4)  # of a parameter: its weight, fp32 master and moments
    tensors = kinds * len(list(model.parameters())) * config.parallel.layout(ranks).tp
    files = config.checkpoint.save_tokenizer_assets and tokenizer is not None and tokenizer.files()
    texts = _BYTES_OF_A_TOKEN * run.vocab_size if files else 0
    return copy_bytes(config, parameters, 1) + bytes_besides(tensors, ranks) + texts


def _groups(layout: Layout) -> list[tuple[str, str]]:
    """Process groups of every axis with more than one rank."""
    names = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline"}
    if layout.instances > 1:
        names |= {"shard": "ZeRO", "replicate": "replica"}
    return [(f"{name} groups", _listed(layout, axis)) for axis, name in names.items() if layout.size(axis) > 1]


def _listed(layout: Layout, axis: str) -> str:
    """Lists all groups if they are few, else the first two and the last."""
    if layout.world_size // layout.size(axis) <= _SHOWN:
        return " | ".join(map(_ranks, layout.groups(axis)))
    first, second, last = map(_ranks, layout.first_groups(axis))
    return " | ".join([first, second, "...", last])


def _ranks(group: Sequence[int]) -> str:
    """Formats ranks: 0-7, or 0 8 16 24."""
    if len(group) > 1 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    return " ".join(map(str, group if len(group) <= _SHOWN else [*group[:2], "...", group[-1]]))


def _stages(run: Run, layout: Layout, parameters: Sequence[int]) -> list[tuple[str, str]]:
    """Table rows with each stage's ranks, layers and parameters per rank."""
    layers, rows = stage_layers(run.config.model.num_layers, run.config.parallel), []
    each = layout.world_size // layout.pp
    for stage, count in enumerate(parameters):
        runs = [_ranks(part) for part in layers.of_rank(stage)]
        ranks = range(stage * each, (stage + 1) * each)  # stages are the slowest-varying axis of the rank
        ends = [name for name, here in (("embedding", stage == 0), ("head", stage == layout.pp - 1)) if here]
        text = f"ranks {_ranks(ranks)}: layers {', '.join([*runs, *ends])}; {count} parameters on each"
        rows.append((f"stage {stage}", text))
    return rows


def _compute(run: Run, model: nn.Module, tokens: int) -> list[tuple[str, str]]:
    per_token = model_flops(run, model)
    if per_token is None:
        return []
    return [("compute", f"{per_token * tokens:.3e} FLOP (Megatron's formula for model FLOPs)")]
