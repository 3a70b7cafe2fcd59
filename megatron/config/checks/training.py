"""Checks of the length of the run, the batch sizes, and the schedules."""

from megatron.config.batch import parse_schedule
from megatron.config.notices import spelled, to_add
from megatron.config.run import RunConfig
from megatron.config.sections.deepspeed_scheduler import REQUIRED
from megatron.errors import ConfigError
from megatron.layout import SizesError, Way, divisors, multiples_around, nearest_multiples

_MOST_RAMP_STEPS = 1_000_000
"""Limit on the steps of a ramp-up, because a loop counts them."""


def check_length(config: RunConfig) -> None:
    training = config.training
    if training.train_iters is None and training.train_samples is None and not training.skip_train:
        raise ConfigError(
            "--train-iters or --train-samples: one is required; give it, or --skip-train to evaluate only"
        )


def check_batch(config: RunConfig) -> None:
    training = config.training
    micro, final = training.micro_batch_size, training.global_batch_size
    if final is not None and micro and final % micro:
        raise SizesError(
            f"{spelled(config, 'global_batch_size')} is not divisible by {spelled(config, 'micro_batch_size')} "
            "(it must be a multiple of --micro-batch-size x data-parallel ranks)",
            Way("use --global-batch-size {}", "--global-batch-size", final, multiples_around(final, micro)),
            Way("use --micro-batch-size {}", "--micro-batch-size", micro, divisors(final)),
        )
    if training.step_batch_size_schedule is not None:
        parse_schedule(training.step_batch_size_schedule)
    if training.rampup_batch_size is None:
        return
    start, increment, samples = training.rampup_batch_size
    ramp = spelled(config, "rampup_batch_size")
    if start < 1 or increment < 1 or samples < 0:
        raise ConfigError(f"{ramp}: needs START > 0, INCREMENT > 0, SAMPLES >= 0; correct the three numbers")
    if samples // start > _MOST_RAMP_STEPS:
        raise ConfigError(f"{ramp}: more than {_MOST_RAMP_STEPS} steps; raise START or lower SAMPLES")
    if final is None:
        raise ConfigError(f"{ramp}: needs the final batch size; add --global-batch-size")
    if final < start or (final - start) % increment:
        raise ConfigError(
            f"{ramp}: steps of {increment} from {start} do not reach {spelled(config, 'global_batch_size')}; choose an "
            "increment that divides the difference"
        )


def check_learning_rate(config: RunConfig) -> None:
    schedule = config.schedule
    if schedule.lr is None:
        if not config.training.skip_train and config.deepspeed_scheduler.takes_lr:
            raise ConfigError("--lr: required for training and not given; give the peak learning rate, as in --lr 1e-4")
        return
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(schedule, name) > schedule.lr:
            raise ConfigError(f"{spelled(config, name)} is above {spelled(config, 'lr')}; lower it, or raise --lr")
    if schedule.decoupled_lr is not None and (schedule.decoupled_min_lr or 0.0) > schedule.decoupled_lr:
        raise ConfigError(f"{spelled(config, 'decoupled_min_lr')} is above {spelled(config, 'decoupled_lr')}; lower it")


def check_warmup(config: RunConfig) -> None:
    schedule = config.schedule
    unit = "samples" if config.training.train_samples is not None else "iters"
    length = getattr(config.training, f"train_{unit}")
    decay = getattr(schedule, f"lr_decay_{unit}") or length
    warmup = getattr(schedule, f"lr_warmup_{unit}")
    if decay is None:
        return
    name = f"lr_decay_{unit}" if getattr(schedule, f"lr_decay_{unit}") else f"train_{unit}"
    if warmup >= decay:
        raise ConfigError(
            f"{spelled(config, f'lr_warmup_{unit}')} is not shorter than the decay of {spelled(config, name)}; "
            "shorten the warm-up"
        )
    if schedule.lr_warmup_fraction is not None and schedule.lr_warmup_fraction >= 1:
        raise ConfigError(f"{spelled(config, 'lr_warmup_fraction')}: leaves no steps for the decay; give less than 1")
    if schedule.lr_decay_style == "WSD":
        _check_wsd(config, unit, decay, warmup or (schedule.lr_warmup_fraction or 0) * decay)


def _check_wsd(config: RunConfig, unit: str, decay: int, warmup: float) -> None:
    wsd = getattr(config.schedule, f"lr_wsd_decay_{unit}")
    if wsd is None:
        raise ConfigError(f"--lr-decay-style WSD: needs the length of its final decay; add --lr-wsd-decay-{unit}")
    if wsd > decay:
        raise ConfigError(
            f"{spelled(config, f'lr_wsd_decay_{unit}')} is longer than the schedule of {decay} {unit}; shorten it"
        )
    if wsd > decay - warmup:
        raise ConfigError(
            f"{spelled(config, f'lr_wsd_decay_{unit}')} is more than the {decay - warmup:g} {unit} between warm-up and "
            "the end of the decay; lower it"
        )


def check_deepspeed_scheduler(config: RunConfig) -> None:
    """Checks that the parameters that DeepSpeed's schedule requires are given."""
    scheduler = config.deepspeed_scheduler
    if scheduler.lr_schedule is None:
        return
    chosen = spelled(config, "lr_schedule")
    for name in REQUIRED.get(scheduler.lr_schedule, ()):
        if getattr(scheduler, name) is None:
            raise ConfigError(f"{chosen}: needs {name}, which has no default; add {to_add(config, name)}")


def check_memory_log(config: RunConfig) -> None:
    every, log = config.logging.log_memory_interval, config.logging.log_interval
    if every is not None and every % log:
        raise ConfigError(
            f"{spelled(config, 'log_memory_interval')} is not a multiple of {spelled(config, 'log_interval')}; use "
            f"--log-memory-interval {' or '.join(map(str, nearest_multiples(every, log)))}"
        )


def check_weight_decay(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        return
    style = spelled(config, "weight_decay_incr_style")
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if start is None or end is None:
        raise ConfigError(f"{style}: needs both ends; add --start-weight-decay and --end-weight-decay")
    if end < start:
        raise ConfigError(
            f"{spelled(config, 'end_weight_decay')} is below {spelled(config, 'start_weight_decay')}: weight decay can "
            "only grow; raise the former"
        )


def check_profile(config: RunConfig) -> None:
    profile = config.profile
    if profile.profile and profile.profile_step_end <= profile.profile_step_start:
        raise ConfigError(
            f"{spelled(config, 'profile_step_end')} is not after {spelled(config, 'profile_step_start')}; raise it: "
            "the trace covers the iterations after the start, up to and including the end"
        )
    iterations = config.training.train_iters
    if profile.profile and iterations is not None and profile.profile_step_start >= iterations:
        raise ConfigError(
            f"{spelled(config, 'profile_step_start')}: {spelled(config, 'train_iters')} ends before the first traced "
            "iteration; lower --profile-step-start"
        )


def check_remainders(config: RunConfig) -> None:
    if config.optimizer.store_param_remainders and not config.precision.bf16:
        raise ConfigError(
            "--store-param-remainders: only bf16 weights lack 16 bits of their fp32 masters; add --bf16, or remove "
            "--store-param-remainders"
        )


def check_rule(config: RunConfig) -> None:
    optimizer = config.optimizer
    if optimizer.uses_muon:
        _check_newton_schulz(config)


def _check_newton_schulz(config: RunConfig) -> None:
    kind, steps = config.optimizer.muon_coefficient_type, config.optimizer.muon_num_ns_steps
    chosen = f"{spelled(config, 'muon_num_ns_steps')} with --muon-coefficient-type {kind}"
    if kind == "polar_express" and steps < 8:
        raise ConfigError(f"{chosen}: the 8 coefficients need 8 steps; use --muon-num-ns-steps 8 or more")
    length = {"quintic": 5, "aol": 4}.get(kind, 1)
    if steps % length:
        numbers = " or ".join(map(str, nearest_multiples(steps, length)))
        raise ConfigError(f"{chosen}: the coefficients repeat every {length} steps; use --muon-num-ns-steps {numbers}")


def check_offload(config: RunConfig) -> None:
    optimizer = config.optimizer
    if not optimizer.offloads_optimizer:
        return
    name = "optimizer_cpu_offload" if optimizer.optimizer_cpu_offload else "optimizer_offload_directory"
    if not optimizer.is_plain_adamw:
        raise ConfigError(
            f"{spelled(config, name)}: only the state of AdamW with fp32 moments can be offloaded; use --optimizer "
            "adam with decoupled weight decay, or remove this setting"
        )


CHECKS = (
    check_remainders,
    check_offload,
    check_rule,
    check_profile,
    check_length,
    check_batch,
    check_learning_rate,
    check_warmup,
    check_deepspeed_scheduler,
    check_weight_decay,
    check_memory_log,
)
