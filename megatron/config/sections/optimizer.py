"""The optimizer and the schedules of learning rate and weight decay."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flag import Need, flag
from megatron.config.sections.checkpoint import RESUME

_ADAM = Need("--optimizer adam", lambda run: run.optimizer.optimizer == "adam")
_SGD = Need("--optimizer sgd", lambda run: run.optimizer.optimizer == "sgd")
_GROWING = Need(
    "--weight-decay-incr-style linear or cosine", lambda run: run.optimizer.weight_decay_incr_style != "constant"
)
_QK_NORMS = Need("--qk-layernorm", lambda run: run.model.qk_layernorm)
_DECAY = Need("a decay (--lr-decay-style other than constant)", lambda run: run.schedule.lr_decay_style != "constant")
_DECAY_OR_SHARE = Need(
    "a decay or --lr-warmup-fraction",
    lambda run: _DECAY.met(run) or run.schedule.lr_warmup_fraction is not None,
)
_WARMUP = Need(
    "a warm-up",
    lambda run: bool(run.schedule.lr_warmup_iters or run.schedule.lr_warmup_samples or run.schedule.lr_warmup_fraction),
)
_WSD = Need("--lr-decay-style WSD", lambda run: run.schedule.lr_decay_style == "WSD")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    optimizer: str = flag(
        "adam",
        "adam is AdamW (decoupled decay).",
        choices=("adam", "sgd"),
        refused=dict.fromkeys(
            ("muon", "dist_muon", "adaptive_muon", "lion", "soap"), "not supported yet; use adam or sgd"
        ),
    )
    weight_decay: float = flag(
        0.01,
        "Weight decay (decoupled in Adam, added to the gradient in SGD); biases and 1-D parameters have none.",
        at_least=0.0,
    )
    apply_wd_to_qk_layernorm: bool = flag(
        False, "Weight decay of the norms of queries and keys too (--qk-layernorm).", needs=(_QK_NORMS,)
    )
    weight_decay_incr_style: str = flag(
        "constant", "How weight decay moves from start to end.", choices=("constant", "linear", "cosine")
    )
    start_weight_decay: float | None = flag(
        None, "Weight decay at the start of its ramp.", at_least=0.0, needs=(_GROWING,), insists=True
    )
    end_weight_decay: float | None = flag(
        None, "Weight decay at the end of its ramp.", at_least=0.0, needs=(_GROWING,), insists=True
    )
    clip_grad: float = flag(1.0, "Largest global L2 norm of the gradient; 0 is no clipping.", at_least=0.0)
    adam_beta1: float = flag(0.9, "Adam's first beta.", at_least=0.0, below=1.0, needs=(_ADAM,))
    adam_beta2: float = flag(0.999, "Adam's second beta.", at_least=0.0, below=1.0, needs=(_ADAM,))
    adam_eps: float = flag(1e-8, "Adam's epsilon.", above=0.0, needs=(_ADAM,))
    store_param_remainders: bool = flag(
        False,
        "Store the low 16 bits of the fp32 master weights beside the bf16 weights, instead of whole fp32 copies. "
        "Training is the same, except that a weight halfway between two bf16 numbers is rounded away from zero. Needs "
        "the native adamw of --kernels.",
    )
    sgd_momentum: float = flag(0.9, "Momentum of SGD.", at_least=0.0, below=1.0, needs=(_SGD,))
    muon_momentum: float = flag(0.9, "Momentum of Muon.", status="later", note="leave it out")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    lr: float | None = flag(None, "Peak learning rate.", at_least=0.0)
    min_lr: float = flag(0.0, "Smallest learning rate.", at_least=0.0, needs=(_DECAY,))
    lr_decay_style: str = flag(
        "linear",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "Length of the decay in steps. Unset: --train-iters.", at_least=1, needs=(_DECAY_OR_SHARE,)
    )
    lr_decay_samples: int | None = flag(
        None, "Length of the decay in samples. Unset: --train-samples.", at_least=1, needs=(_DECAY_OR_SHARE,)
    )
    lr_warmup_fraction: float | None = flag(
        None, "Linear warm-up as a share of the decay length.", at_least=0.0, at_most=1.0
    )
    lr_warmup_iters: int = flag(0, "Steps of the linear warm-up.", at_least=0)
    lr_warmup_samples: int = flag(0, "Samples of the linear warm-up.", at_least=0)
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", at_least=0.0, needs=(_WARMUP,))
    lr_wsd_decay_style: str = flag(
        "exponential",
        "Shape of WSD's last part.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=(_WSD,),
    )
    lr_wsd_decay_iters: int | None = flag(None, "Length of WSD's last part in steps.", at_least=1, needs=(_WSD,))
    lr_wsd_decay_samples: int | None = flag(None, "Length of WSD's last part in samples.", at_least=1, needs=(_WSD,))
    override_opt_param_scheduler: bool = flag(
        False,
        "On resume take the schedule from the command line.",
        spelling="--override-opt_param-scheduler",
        needs=(RESUME,),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "On resume take the schedule from the checkpoint.",
        spelling="--use-checkpoint-opt_param-scheduler",
        needs=(RESUME,),
    )
