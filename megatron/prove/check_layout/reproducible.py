"""Adapts the user's settings for tools/check_layout.py: makes them reproducible, smaller, or for one process."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megatron.config import (
    BatchPlan,
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    TokenizerConfig,
    check_settings,
    check_world,
)
from megatron.config.notices import spelled
from megatron.config.run import all_settings
from megatron.config.stages import stage_layers
from megatron.errors import ConfigError
from megatron.layout import nearest_multiples
from megatron.model.flops import flops_per_token
from megatron.model.parameters import parameters

MOST_PARAMETERS = 30_000_000
MOST_WORK = 6e11
"""Limits below which nothing is shrunk: parameters of all replicas, and floating-point operations of both runs."""
_FEW_RANKS, _MOST_RANKS = 8, 128
_SHORT, _CHUNK, _NARROW_HEAD, _FEW_EXPERTS = 32, 4, 8, 4


def ranks_of(config: RunConfig, asked: int | None) -> int:
    """Returns the number of ranks, checked as in training: `asked`, or else the fewest that hold the layout.

    At least two ranks are data-parallel if eight ranks suffice, because with one axis a wrong group can look right.
    """
    unit = config.parallel.fewest_ranks
    if asked is None:
        few = [*range(2 * unit, _FEW_RANKS + 1, unit), *([unit] if unit > 1 else [])]
        ranks = next((count for count in few if _fits(config, count)), few[0])
    elif asked < 2 or asked % unit:
        fits = " or ".join(str(n) for n in nearest_multiples(asked, unit) if n > 1) or str(2 * unit)
        raise ConfigError(f"--ranks {asked}: the layout needs a multiple of {unit} ranks, and at least 2; use {fits}")
    else:
        ranks = asked
    if ranks > _MOST_RANKS:
        raise ConfigError(
            f"this layout needs {ranks} processes on this machine, but check_layout.py starts at most {_MOST_RANKS}; "
            "give smaller parallel sizes of the same kinds"
        )
    _check_world(config, ranks)
    return ranks


def _fits(config: RunConfig, ranks: int) -> bool:
    try:
        _check_world(config, ranks)
    except ConfigError:
        return False
    return True


def _check_world(config: RunConfig, ranks: int) -> None:
    """Checks the settings for this number of ranks, without --profile-ranks, which refer to the user's own launch."""
    check_world(replace(config, profile=ProfileConfig()), ranks)


def plain_run(config: RunConfig, ranks: int, steps: int) -> RunConfig:
    """Returns settings of `steps` steps on CPUs with one batch size and one learning rate, without skips or traces."""
    plan = BatchPlan.on(config, ranks)
    training = replace(
        config.training,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.final_batch_size,
        gradient_accumulation_steps=None,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
        train_iters=steps,
        train_samples=None,
        exit_interval=None,
        iterations_to_skip=None,
        skip_train=False,
    )
    return replace(
        config,
        training=training,
        parallel=replace(config.parallel, pipeline_trace=None, check_replicas_every=None),
        schedule=ScheduleConfig(lr=config.schedule.lr, lr_decay_style="constant"),
        profile=ProfileConfig(),
        runtime=RuntimeConfig(device="cpu", distributed_backend="gloo"),
    )


def reproducible(config: RunConfig, ranks: int, steps: int, cache: Path) -> RunConfig:
    """Makes the run deterministic up to rounding: no dropout, half precision, checkpoints, logs or evaluation."""
    plain, optimizer = plain_run(config, ranks, steps), config.optimizer
    if optimizer.weight_decay_incr_style != "constant":
        decay = optimizer.end_weight_decay or 0.0
        optimizer = replace(
            optimizer,
            weight_decay_incr_style="constant",
            weight_decay=decay,
            start_weight_decay=None,
            end_weight_decay=None,
        )
    return replace(
        plain,
        model=replace(config.model, attention_dropout=0.0, hidden_dropout=0.0),
        training=replace(plain.training, exit_duration_in_mins=None, exit_signal_handler=False),
        optimizer=optimizer,
        precision=replace(config.precision, fp16=False, bf16=False, loss_scale=None),
        data=replace(config.data, num_workers=0, data_cache_path=str(cache), data_table_path=None),
        checkpoint=CheckpointConfig(),
        tokenizer=_without_table_of_load(config),
        logging=LoggingConfig(),
        evaluation=EvaluationConfig(eval_iters=0),
    )


def _without_table_of_load(config: RunConfig) -> TokenizerConfig:
    """Drops the vocabulary size of the checkpoint in --load, because it is not loaded and the tokenizer has its own
    size."""
    tokenizer = config.tokenizer
    own = tokenizer.vocab_file is not None or tokenizer.tokenizer_model is not None
    if config.checkpoint.load is None or not own or tokenizer.kind == "TikTokenizer":  # its size is a setting
        return tokenizer
    return replace(tokenizer, vocab_size=None)


def alone(config: RunConfig) -> RunConfig:
    """Returns the settings of the same training in one process."""
    return replace(config, parallel=ParallelConfig())


def is_large(config: RunConfig, ranks: int, vocab_size: int) -> bool:
    model, moe, training, seq_length = config.model, config.moe, config.training, config.data.seq_length
    count = sum(prod(parameter.shape) for parameter in parameters(model, vocab_size, moe).values())
    copies = 1 + ranks // config.parallel.model_parallel_size
    tokens = (training.global_batch_size or 0) * seq_length * (training.train_iters or 0)
    work = 2 * tokens * flops_per_token(model, seq_length=seq_length, padded_vocab_size=vocab_size, moe=moe)
    return count * copies > MOST_PARAMETERS or work > MOST_WORK


def shrink(config: RunConfig, ranks: int) -> RunConfig:
    """Returns a small model and batch of the same structure: sizes divide as before, shared heads and layers stay
    shared. The vocabulary and the data are unchanged."""
    seq_length = _short(config)
    small = replace(config, data=replace(config.data, seq_length=seq_length))
    layers, cut = _few_layers(config)
    small = replace(small, model=_small_model(config, layers, seq_length), parallel=cut)
    small = replace(small, moe=_small_experts(small, config), training=_small_batch(config, ranks))
    if config.recompute.recompute_num_layers > 1:
        small = replace(small, recompute=replace(config.recompute, recompute_num_layers=1))
    try:
        check_settings(small, needs_data=False)
        check_world(small, ranks)
    except ConfigError as error:
        why = ", and ".join(error.lines)
        raise ConfigError(f"this layout could not be shrunk ({why}); give a smaller model, or --full") from None
    return small


def changed_settings(before: RunConfig, after: RunConfig) -> list[str]:
    """Returns lines such as `--num-layers 32 -> 4`, one for each setting that differs."""
    return [
        f"{spelled(before, setting.name)} -> {spelled(after, setting.name).rpartition(' ')[2]}"
        for setting in all_settings()
        if before.value(setting) != after.value(setting)
    ]


def _short(config: RunConfig) -> int:
    """Returns a short sequence length that divides as before, with a few tokens in every context-parallel chunk."""
    chunks = 2 * config.parallel.context_parallel_size
    unit = chunks * config.parallel.tensor_model_parallel_size
    return min(config.data.seq_length, unit * -(-max(_SHORT, _CHUNK * chunks) // unit))


def _small_model(config: RunConfig, layers: int, seq_length: int) -> Any:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    groups, heads = _few_heads(config)
    head = min(model.head_dim, _NARROW_HEAD if model.rotary_percent == 1.0 else 2 * _NARROW_HEAD)
    hidden = min(model.hidden_size, heads * head if model.kv_channels is None else 6 * _NARROW_HEAD)
    ffn = min(model.ffn_size, tp * max(2, round(model.ffn_size / model.hidden_size * hidden / tp)))
    window = model.window_size and tuple(min(size, seq_length // 4) if size > 0 else size for size in model.window_size)
    return replace(
        model,
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=groups if model.num_query_groups is not None else None,
        hidden_size=hidden,
        kv_channels=None if model.kv_channels is None else head,
        ffn_hidden_size=ffn,
        max_position_embeddings=min(model.max_position_embeddings, max(seq_length, 1)),
        window_size=window,
        **_short_context(model, seq_length / config.data.seq_length),
    )


def _short_context(model: ModelConfig, shorter: float) -> dict[str, Any]:
    """Returns the original context length of a rotary scaling, shortened; else the scaling would have little effect."""
    names = {"llama3": "rope_original_max_position", "yarn": "yarn_original_max_position_embeddings"}
    name = names.get(model.rope_scaling)
    return {} if name is None else {name: max(1, round(getattr(model, name) * shorter))}


def _few_heads(config: RunConfig) -> tuple[int, int]:
    """Returns (groups, heads) of the smaller model. A rank that had several groups, one, or a part of one still has
    that. A group with several queries keeps at least two."""
    model, parallel = config.model, config.parallel
    tp, unit = parallel.tensor_model_parallel_size, parallel.tensor_model_parallel_size
    if parallel.cp_attention == "a2a":
        unit *= parallel.context_parallel_size
    groups, queries = model.query_groups, model.num_attention_heads // model.query_groups
    few = unit if groups % unit == 0 else tp if groups % tp == 0 else groups
    fitting = [n for n in range(min(2, queries), queries + 1) if queries % n == 0 and few * n % unit == 0]
    if few == groups and few * queries % unit:
        return groups, model.num_attention_heads
    return (few, few * fitting[0]) if fitting else (groups, model.num_attention_heads)


def _few_layers(config: RunConfig) -> tuple[int, ParallelConfig]:
    """Returns the number of layers, and the settings that place them on stages. A stage that had more layers than
    another still has more."""
    parallel, layers = config.parallel, config.model.num_layers
    pp, stages = parallel.pipeline_model_parallel_size, stage_layers(config.model.num_layers, parallel)
    if config.moe.is_on and not config.moe.moe_layer_freq.strip().isdigit():
        return layers, parallel  # --moe-layer-freq lists every layer, so their number cannot change
    if stages.chunks > 1:
        chunks = min(2, stages.chunks)
        extra = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage
        each = 2 if extra else 1  # the first stage, the last stage or both have one layer less
        return pp * chunks * each - extra, replace(
            parallel,
            num_layers_per_virtual_pipeline_stage=parallel.num_layers_per_virtual_pipeline_stage and each,
            num_virtual_stages_per_pipeline_rank=parallel.num_virtual_stages_per_pipeline_rank and chunks,
            microbatch_group_size_per_virtual_pipeline_stage=group and min(group, pp + 1),
        )
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    counts = [len(stage) for stage in stages.stages]
    sizes = sorted(set(counts))
    few = {count: place + 1 for place, count in enumerate(sizes)} if sizes[1:] else {sizes[0]: min(2, sizes[0])}
    cut = replace(
        parallel,
        decoder_first_pipeline_num_layers=None if first is None else few[counts[0]],
        decoder_last_pipeline_num_layers=None if last is None else few[counts[-1]],
    )
    return sum(few[count] for count in counts), cut


def _small_experts(small: RunConfig, config: RunConfig) -> Any:
    moe, ep = config.moe, config.parallel.expert_model_parallel_size
    if moe.num_experts is None:
        return moe
    few = ep * max(2, -(-max(moe.moe_router_topk + 1, _FEW_EXPERTS) // ep))
    shrunk = small.model.hidden_size / config.model.hidden_size
    tp = config.parallel.tensor_model_parallel_size

    def narrower(width: int | None) -> int | None:
        return None if width is None else min(width, tp * max(2, round(width * shrunk / tp)))

    return replace(
        moe,
        num_experts=min(moe.num_experts, few),
        moe_ffn_hidden_size=narrower(moe.moe_ffn_hidden_size),
        moe_shared_expert_intermediate_size=narrower(moe.moe_shared_expert_intermediate_size),
    )


def _small_batch(config: RunConfig, ranks: int) -> Any:
    training, dp = config.training, ranks // config.parallel.model_parallel_size
    plan = BatchPlan(config, dp)
    micro, count = min(plan.micro_batch_size, 2), plan.micro_batches(plan.final_batch_size)
    pp, group = config.parallel.pipeline_model_parallel_size, config.parallel.micro_batch_group
    few = min(count, 2 * pp)
    if group is not None and group > pp:  # shrunk to pp + 1: still one group, several, or a smaller last one
        few = pp + 1 if count == group else 2 * (pp + 1) - (count % group > 0)
    return replace(
        training, micro_batch_size=micro, global_batch_size=micro * dp * few, gradient_accumulation_steps=None
    )
