"""Learning rate and weight decay as pure functions of the consumed samples, with Megatron's or DeepSpeed's rules.

Steps are counted in samples, so a batch-size ramp-up does not distort the curves. Only applied updates increase the
count. The first step uses the values at 0 samples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron.config.sections.deepspeed_scheduler import DeepSpeedSchedulerConfig
from megatron.config.sections.optimizer import OptimizerConfig, ScheduleConfig
from megatron.errors import ConfigError
from megatron.optimizer.deepspeed_schedules import DeepSpeedCurve

ScheduleState = dict[str, Any]
_DEEPSPEED = "deepspeed_"
"""Prefix of a DeepSpeed schedule's settings in a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class WeightDecay:
    start_wd: float = 0.01
    end_wd: float = 0.01
    wd_incr_style: str = "constant"
    wd_incr_steps: float = 0

    def after(self, num_steps: float) -> float:
        """Weight decay after `num_steps` samples."""
        if self.wd_incr_style == "constant" or num_steps > self.wd_incr_steps:
            return self.end_wd
        ratio = num_steps / self.wd_incr_steps
        share = ratio if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        return self.start_wd + share * (self.end_wd - self.start_wd)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves of learning rate and weight decay. All lengths are in samples."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    lr_warmup_steps: float = 0
    lr_decay_steps: float
    lr_decay_style: str = "linear"
    wsd_decay_steps: float | None = None
    lr_wsd_decay_style: str = "exponential"
    decay: WeightDecay = WeightDecay()
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None
    deepspeed: DeepSpeedCurve | None = None
    """Learning-rate curve that replaces the fields about the learning rate."""

    def lr(self, num_steps: float) -> float:
        """Learning rate after `num_steps` samples."""
        if self.deepspeed is not None:
            return self.deepspeed.lr(num_steps)
        if self.lr_warmup_steps > 0 and num_steps <= self.lr_warmup_steps:
            return self.init_lr + (self.max_lr - self.init_lr) * num_steps / self.lr_warmup_steps
        return CURVES[self.lr_decay_style].after_warmup(self, num_steps)

    def decoupled_lr(self, num_steps: float) -> float | None:
        """Learning rate of the token embedding and the output layer; None if they use the common rate."""
        if self.decoupled_max_lr is None:
            return None
        low = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, max_lr=self.decoupled_max_lr, min_lr=low).lr(num_steps)


@dataclass(frozen=True)
class Curve:
    """Curve that one value of --lr-decay-style selects."""

    after_warmup: Callable[[Curves, float], float]
    """Function from the number of samples to the learning rate, after the warm-up."""
    parameters: tuple[str, ...] = ("min_lr", "lr_decay_steps")
    """Fields of `Curves` that this curve depends on, besides those that every curve uses."""


def _falling(share: Callable[[Curves, float], float]) -> Callable[[Curves, float], float]:
    """Returns a curve that falls from max_lr to min_lr and stays there. `share`: fraction of the difference that
    remains."""

    def after_warmup(curves: Curves, num_steps: float) -> float:
        if num_steps > curves.lr_decay_steps:
            return curves.min_lr
        return curves.min_lr + share(curves, num_steps) * (curves.max_lr - curves.min_lr)

    return after_warmup


def _shaped(curves: Curves, num_steps: float) -> float:
    ratio = (num_steps - curves.lr_warmup_steps) / (curves.lr_decay_steps - curves.lr_warmup_steps)
    return _SHAPES[curves.lr_decay_style](ratio)


def _stable_then_shaped(curves: Curves, num_steps: float) -> float:
    assert curves.wsd_decay_steps is not None
    start = curves.lr_decay_steps - curves.wsd_decay_steps
    return _SHAPES[curves.lr_wsd_decay_style](max(0.0, (num_steps - start) / curves.wsd_decay_steps))


def _inverse_square_root(curves: Curves, num_steps: float) -> float:
    if num_steps > curves.lr_decay_steps:
        return curves.min_lr
    factor = math.sqrt(max(curves.lr_warmup_steps, 1)) / math.sqrt(max(num_steps, 1))
    return max(curves.min_lr, curves.max_lr * factor)


CURVES = {
    "constant": Curve(lambda curves, _: curves.max_lr, ()),
    "linear": Curve(_falling(_shaped)),
    "cosine": Curve(_falling(_shaped)),
    "inverse-square-root": Curve(_inverse_square_root),
    "WSD": Curve(_falling(_stable_then_shaped), ("min_lr", "lr_decay_steps", "wsd_decay_steps", "lr_wsd_decay_style")),
}

_SHAPES = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}
"""Fraction that remains after `ratio` of the decay: 1 at 0, 0 at 1."""


class Schedule:
    """Curves of a run, and the rules for taking them from a checkpoint on resume.

    The schedule has no position: the trainer counts the samples consumed by applied updates.
    """

    def __init__(self, curves: Curves, *, override: bool = False, use_checkpoint: bool = False) -> None:
        """Takes --override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler; at most one may be set."""
        self.curves = curves
        self._override = override
        self._use_checkpoint = use_checkpoint

    def lr(self, num_steps: float) -> float:
        """Learning rate of the next update after `num_steps` samples."""
        return self.curves.lr(num_steps)

    def decoupled_lr(self, num_steps: float) -> float | None:
        """Learning rate of the token embedding and the output layer; None if they use the common rate."""
        return self.curves.decoupled_lr(num_steps)

    def weight_decay(self, num_steps: float) -> float:
        """Weight decay of the next update after `num_steps` samples."""
        return self.curves.decay.after(num_steps)

    def warning_at_zero(self, samples: range) -> str | None:
        """Warning if the updates after these numbers of samples all have a learning rate of 0, else None."""
        if any(self.lr(n) or self.decoupled_lr(n) for n in samples):
            return None
        way_out = "give --lr above 0, or a longer --lr-decay-iters, or --min-lr above 0"
        if self._use_checkpoint:
            way_out = "give --override-opt_param-scheduler in place of --use-checkpoint-opt_param-scheduler"
        return (
            "the learning rate is 0 in all remaining iterations, so they change no weights: the schedule has ended, or "
            f"its peak is 0; {way_out}"
        )

    def state(self, num_steps: int) -> ScheduleState:
        """Megatron's `opt_param_scheduler` entry, extended by the settings that it lacks."""
        return {**_plain(self.curves), "num_steps": num_steps}

    def load_state(self, state: ScheduleState) -> int:
        """Returns the saved `num_steps`. The constructor's flags select this run's settings or the saved settings;
        without a flag, raises if the two differ."""
        names = _plain(self.curves).keys()
        saved = {name: value for name, value in state.items() if name in names or name.startswith(_DEEPSPEED)}
        if self._use_checkpoint:
            self.curves = _curves_of(self.curves, saved)
        elif not self._override:
            _refuse_differences(self.curves, saved)
        return int(state["num_steps"])


def _plain(curves: Curves) -> dict[str, Any]:
    """Settings by name, as in a checkpoint."""
    settings = {name: value for name, value in vars(curves).items() if name not in ("decay", "deepspeed")}
    deepspeed = {} if curves.deepspeed is None else curves.deepspeed.plain()
    return settings | vars(curves.decay) | {f"{_DEEPSPEED}{name}": value for name, value in deepspeed.items()}


def _curves_of(curves: Curves, saved: dict[str, Any]) -> Curves:
    """Curves with the saved settings; settings that were not saved come from `curves`."""
    deepspeed = {name.removeprefix(_DEEPSPEED): value for name, value in saved.items() if name.startswith(_DEEPSPEED)}
    of_decay = {field.name for field in fields(WeightDecay)}
    decay = replace(curves.decay, **{name: value for name, value in saved.items() if name in of_decay})
    rest = {n: value for n, value in saved.items() if n not in of_decay and not n.startswith(_DEEPSPEED)}
    return replace(curves, **rest, decay=decay, deepspeed=DeepSpeedCurve.of_plain(deepspeed) if deepspeed else None)


_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "lr_warmup_steps": "warm-up length in samples (--lr-warmup-iters, -samples or -fraction)",
    "lr_decay_steps": "decay length in samples (--lr-decay-iters or -samples, else the length of training)",
    "lr_decay_style": "--lr-decay-style",
    "wsd_decay_steps": "WSD decay length in samples (--lr-wsd-decay-iters or -samples)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "--start-weight-decay (or --weight-decay)",
    "end_wd": "--end-weight-decay (or --weight-decay)",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "length of the weight decay ramp in samples (the length of training)",
    "decoupled_max_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    f"{_DEEPSPEED}base_lr": "--lr",
    f"{_DEEPSPEED}batch_size": "--global-batch-size",
}
_OF_LR = {"max_lr", "min_lr", "init_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style"}
_OF_LR |= {"wsd_decay_steps", "lr_wsd_decay_style", "decoupled_max_lr", "decoupled_min_lr"}


def _played_no_part(name: str, curves: Curves) -> bool:
    """True if the curves do not depend on `name`."""
    if curves.deepspeed is not None and name in _OF_LR:
        return True
    if any(name in curve.parameters for curve in CURVES.values()):
        return name not in CURVES[curves.lr_decay_style].parameters
    return name == "wd_incr_steps" and curves.decay.wd_incr_style == "constant"


def _refuse_differences(curves: Curves, saved: dict[str, Any]) -> None:
    differences, ours = {}, _plain(curves)
    kinds = [settings.get(f"{_DEEPSPEED}lr_schedule") for settings in (ours, saved)]
    if kinds[0] != kinds[1]:
        differences["lr_schedule"] = f"--lr-schedule is {kinds[0]} here and {kinds[1]} in the checkpoint"
        saved = {name: value for name, value in saved.items() if not name.startswith(_DEEPSPEED)}
    for name, value in saved.items():
        here = ours.get(name)
        if here != value and not _played_no_part(name, curves):
            flag = _FLAGS.get(name) or "--" + name.removeprefix(_DEEPSPEED).replace("_", "-")
            differences[name] = f"{flag} is {here} here and {value} in the checkpoint"
    if differences:
        longer = differences.keys() <= _LENGTHS and curves.lr_decay_steps > saved.get("lr_decay_steps", math.inf)
        way_out = _to_train_longer(_curves_of(curves, saved)) if longer else _EITHER
        raise ConfigError(f"the schedule differs from the checkpoint's: {'; '.join(differences.values())}. {way_out}")


_LENGTHS = {"lr_decay_steps", "lr_warmup_steps", "wd_incr_steps"}
"""Settings that follow from the length of training; the warm-up does with --lr-warmup-fraction."""
_EITHER = (
    "Give --override-opt_param-scheduler to use the settings of this run, or --use-checkpoint-opt_param-scheduler "
    "to use the saved settings"
)


def _to_train_longer(saved: Curves) -> str:
    return (
        "To train longer, give --override-opt_param-scheduler: the learning rate follows the schedule of this run. "
        "With --use-checkpoint-opt_param-scheduler it follows the saved schedule, and stays at "
        f"{saved.lr(saved.lr_decay_steps + 1)} after its end"
    )


def build_schedule(
    schedule: ScheduleConfig,
    optimizer: OptimizerConfig,
    deepspeed: DeepSpeedSchedulerConfig | None = None,
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
) -> Schedule:
    """Builds the schedule of `train_iters` steps or `train_samples` samples (one is set), from checked settings."""
    if train_iters is not None:
        unit, length, decay = global_batch_size, train_iters, schedule.lr_decay_iters
        warmup, wsd = schedule.lr_warmup_iters, schedule.lr_wsd_decay_iters
    else:
        assert train_samples is not None
        unit, length, decay = 1, train_samples, schedule.lr_decay_samples
        warmup, wsd = schedule.lr_warmup_samples, schedule.lr_wsd_decay_samples
    decay_steps = (length if decay is None else decay) * unit
    warmup_steps: float = warmup * unit
    if schedule.lr_warmup_fraction is not None:
        warmup_steps = schedule.lr_warmup_fraction * decay_steps
    start_wd, end_wd = optimizer.start_weight_decay, optimizer.end_weight_decay  # None if it is constant
    lr = schedule.lr or 0.0  # None if a DeepSpeed schedule has its own rates
    of_deepspeed = None
    if deepspeed is not None and deepspeed.lr_schedule is not None:
        of_deepspeed = DeepSpeedCurve(lr, global_batch_size, deepspeed)
    curves = Curves(
        max_lr=lr,
        min_lr=schedule.min_lr,
        init_lr=schedule.lr_warmup_init,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        wsd_decay_steps=None if wsd is None else wsd * unit,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        decay=WeightDecay(
            start_wd=optimizer.weight_decay if start_wd is None else start_wd,
            end_wd=optimizer.weight_decay if end_wd is None else end_wd,
            wd_incr_style=optimizer.weight_decay_incr_style,
            wd_incr_steps=length * unit,
        ),
        decoupled_max_lr=schedule.decoupled_lr,
        decoupled_min_lr=schedule.decoupled_min_lr,
        deepspeed=of_deepspeed,
    )
    return Schedule(
        curves,
        override=schedule.override_opt_param_scheduler,
        use_checkpoint=schedule.use_checkpoint_opt_param_scheduler,
    )
