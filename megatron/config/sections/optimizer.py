"""The optimizer and the schedules of learning rate and weight decay."""

from dataclasses import dataclass
from functools import partial

from megatron.config.flag import Need, excludes, flag
from megatron.config.sections.checkpoint import RESUME

_ADAMS = ("adam", "adam8bit")
_MUONS = ("muon", "dist_muon")


def _is(*names: str) -> tuple[Need, ...]:
    return (Need(f"--optimizer {' or '.join(names)}", lambda run: run.optimizer.optimizer in names),)


def _updates_with(*names: str) -> tuple[Need, ...]:
    """The condition that one of these update rules is in use, as --optimizer or as --muon-scalar-optimizer."""
    return (
        Need(
            f"--optimizer {' or '.join(names)}",
            lambda run: run.optimizer.optimizer in names or run.optimizer.scalar_optimizer in names,
        ),
    )


_MUON = _is(*_MUONS)
_ADAFACTOR = _is("adafactor")
_SCALED = Need("a rate that is scaled by the parameter", lambda run: run.optimizer.adafactor_scale_parameter)
_PRECISION_AWARE = Need("--use-precision-aware-optimizer", lambda run: run.optimizer.use_precision_aware_optimizer)
_A_TYPE = Need("--exp-avg-dtype or --exp-avg-sq-dtype bf16", lambda run: "bf16" in run.optimizer.moment_dtypes)
_NARROW = {"fp16": "a scale for each tensor would depend on the layout; use bf16", "fp8": "use bf16"}
_OFFLOAD = Need(
    "--optimizer-cpu-offload or --optimizer-offload-directory", lambda run: run.optimizer.offloads_optimizer
)
_GROWING = Need(
    "--weight-decay-incr-style linear or cosine", lambda run: run.optimizer.weight_decay_incr_style != "constant"
)
_QK_NORMS = Need("--qk-layernorm", lambda run: run.model.qk_layernorm)
_TAKES_LR = Need(
    "a schedule that uses it (this --lr-schedule defines its own rates)",
    lambda run: run.deepspeed_scheduler.takes_lr or run.deepspeed_scheduler.warmup_max_lr == run.schedule.lr,
)
_DECOUPLED = Need("--decoupled-lr", lambda run: run.schedule.decoupled_lr is not None)
_DECAY = Need("a decay (--lr-decay-style other than constant)", lambda run: run.schedule.lr_decay_style != "constant")
_DECAY_OR_SHARE = Need(
    "a decay or --lr-warmup-fraction", lambda run: _DECAY.met(run) or run.schedule.lr_warmup_fraction is not None
)
_WARMUP = Need(
    "a warm-up",
    lambda run: bool(run.schedule.lr_warmup_iters or run.schedule.lr_warmup_samples or run.schedule.lr_warmup_fraction),
)
_WSD = Need("--lr-decay-style WSD", lambda run: run.schedule.lr_decay_style == "WSD")
_OTHER_OPTIMIZERS = {
    **dict.fromkeys(("adaptive_muon", "soap"), "not supported yet; use muon or adam"),
    **dict.fromkeys(
        ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"), "AdamW has the name adam here; use adam"
    ),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit"), "8-bit AdamW has the name adam8bit here; use adam8bit"),
}
_OTHER_CURVES = {
    "cosine_with_min_lr": "use cosine with --min-lr",
    "cosine_with_restarts": "restarts are not supported; use cosine",
    "constant_with_warmup": "use constant with --lr-warmup-iters",
    "inverse_sqrt": "use inverse-square-root",
    "warmup_stable_decay": "use WSD with --lr-wsd-decay-iters",
    "polynomial": "not supported; use linear or cosine",
}
"""Values of other trainers -> the answer."""
_muon_flag = partial(flag, needs=_MUON)
_adafactor_flag = partial(flag, needs=_ADAFACTOR)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    optimizer: str = flag(
        "adam",
        "Update rule. adam: AdamW; adam8bit: AdamW with 8-bit moments; muon: orthogonalised updates of matrices "
        "(dist_muon is the same); adafactor: a second moment of row and column means.",
        choices=("adam", "sgd", "lion", "adam8bit", "adafactor", *_MUONS),
        refused=_OTHER_OPTIMIZERS,
    )
    weight_decay: float = flag(
        0.01,
        "Weight decay, decoupled except in SGD. Biases and 1-D parameters have none.",
        at_least=0.0,
    )
    apply_wd_to_qk_layernorm: bool = flag(
        False, "Apply weight decay to the query and key norms too (--qk-layernorm).", needs=(_QK_NORMS,)
    )
    weight_decay_incr_style: str = flag(
        "constant",
        "Shape of the weight decay's ramp from start to end.",
        choices=("constant", "linear", "cosine"),
        excludes=excludes("weight_decay", given=True, way_out="remove --weight-decay"),
    )
    start_weight_decay: float | None = flag(
        None, "Weight decay at the start of its ramp.", at_least=0.0, needs=(_GROWING,), insists=True
    )
    end_weight_decay: float | None = flag(
        None, "Weight decay at the end of its ramp.", at_least=0.0, needs=(_GROWING,), insists=True
    )
    clip_grad: float = flag(1.0, "Largest global L2 norm of the gradient. 0 turns clipping off.", at_least=0.0)
    adam_beta1: float = flag(0.9, "Adam's first beta.", at_least=0.0, below=1.0, needs=_updates_with(*_ADAMS))
    adam_beta2: float = flag(0.999, "Adam's second beta.", at_least=0.0, below=1.0, needs=_updates_with(*_ADAMS))
    adam_eps: float = flag(1e-8, "Adam's epsilon.", above=0.0, needs=_updates_with(*_ADAMS))
    store_param_remainders: bool = flag(
        False,
        "Store only the low 16 bits of the fp32 master weights beside the bf16 weights. Needs the native adamw of "
        "--kernels. Only weights halfway between two bf16 numbers round differently, away from zero.",
        excludes=excludes(
            "optimizer_cpu_offload",
            "optimizer_offload_directory",
            why="an offloaded optimizer stores whole fp32 masters",
        ),
    )
    sgd_momentum: float = flag(0.9, "Momentum of SGD.", at_least=0.0, below=1.0, needs=_is("sgd"))
    optimizer_cpu_offload: bool = flag(
        False,
        "Keep Adam's moments and fp32 masters in host memory and update them there. Gradient and weight copies overlap "
        "with other work of the device.",
        excludes=excludes("optimizer_offload_directory", why="the optimizer's state is either in memory or in a file"),
    )
    optimizer_offload_directory: str | None = flag(
        None,
        "Directory on a fast local disk for Adam's moments and fp32 masters. Reads and writes overlap with the update. "
        "The file has no name and is deleted when the process ends.",
        path=True,
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        "Share of the optimizer's state that is offloaded, rounded to whole gradient buckets, at least one if above 0.",
        at_least=0.0,
        at_most=1.0,
        needs=(_OFFLOAD,),
    )
    decoupled_weight_decay: bool = flag(
        True,
        "Add Adam's weight decay to the gradient (L2), as the original Adam does.",
        off="--no-decoupled-weight-decay",
        needs=_updates_with("adam"),
    )
    lion_beta1: float = flag(
        0.95,
        "Lion's first beta: weight of the momentum in the update.",
        at_least=0.0,
        below=1.0,
        needs=_updates_with("lion"),
    )
    lion_beta2: float = flag(
        0.98, "Lion's second beta: decay of the momentum.", at_least=0.0, below=1.0, needs=_updates_with("lion")
    )
    muon_momentum: float = _muon_flag(0.9, "Momentum of Muon.", at_least=0.0, below=1.0)
    muon_nesterov: bool = _muon_flag(False, "Use Nesterov momentum in Muon.", aliases=("--muon-use-nesterov",))
    muon_split_qkv: bool = _muon_flag(
        True,
        "Orthogonalise fused queries, keys and values as one matrix, not separately.",
        off="--muon-no-split-qkv",
    )
    muon_num_ns_steps: int = _muon_flag(5, "Number of Newton-Schulz steps of Muon.", at_least=1, at_most=99)
    muon_coefficient_type: str = _muon_flag(
        "quintic",
        "Coefficients of the Newton-Schulz steps. simple: as in torch.optim.Muon.",
        choices=("simple", "quintic", "polar_express", "aol"),
    )
    muon_scale_mode: str = _muon_flag(
        "spectral",
        "Factor on Muon's update of an m x n matrix. spectral: sqrt(max(m, n)); unit_rms_norm: sqrt(m / n); "
        "shape_scaling: sqrt(max(1, m / n)).",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = _muon_flag(1.0, "Additional factor on Muon's updates.", above=0.0)
    muon_fp32_matmul_prec: str = _muon_flag(
        "medium",
        "Precision of the Newton-Schulz products of fp32 momenta. medium: bf16; highest: fp32.",
        choices=("medium", "highest"),
        refused={"low": "there is no such precision; use medium", "high": "use medium, or highest with --allow-tf32"},
    )
    muon_tp_mode: str = flag(
        "distributed",
        "Method for matrices that tensor parallelism splits. There is one: a single rank orthogonalises the whole "
        "matrix.",
        choices=("distributed", "duplicated"),
        refused={"blockwise": "updates of each rank's part would depend on the layout; remove the flag"},
        status="no-op",
        note="each matrix is orthogonalised whole, by one of the ranks that hold it",
    )
    muon_scalar_optimizer: str = _muon_flag(
        "adam",
        "Update rule, under Muon, of the embeddings, the output head and all parameters that are not matrices.",
        choices=("adam", "lion"),
    )
    adafactor_beta1: float = _adafactor_flag(
        0.0,
        "Beta of Adafactor's first moment, which averages updates. 0 keeps none and saves 4 bytes per parameter.",
        at_least=0.0,
        below=1.0,
    )
    adafactor_decay_rate: float = _adafactor_flag(
        -0.8,
        "Exponent of Adafactor's second moment. The squares of update t get the weight t to this power.",
        at_most=0.0,
    )
    adafactor_clip_threshold: float = _adafactor_flag(
        1.0, "Largest root mean square of an Adafactor update, before the learning rate.", above=0.0
    )
    adafactor_eps1: float = _adafactor_flag(1e-30, "Constant added to Adafactor's squared gradients.", above=0.0)
    adafactor_eps2: float = flag(
        1e-3,
        "Lower bound on a parameter's root mean square in Adafactor's rate.",
        at_least=0.0,
        needs=(*_ADAFACTOR, _SCALED),
    )
    adafactor_scale_parameter: bool = _adafactor_flag(
        True,
        "Use --lr as Adafactor's rate, not --lr times the root mean square of the parameter.",
        off="--adafactor-no-scale-parameter",
    )
    adafactor_relative_step: bool = _adafactor_flag(
        False,
        "Limit Adafactor's rate at update t to 1 / sqrt(t), as torch.optim does. A constant --lr of 0.01 then gives "
        "the paper's rate.",
    )
    use_precision_aware_optimizer: bool = flag(
        False, "Store Adam's moments as --exp-avg-dtype and --exp-avg-sq-dtype.", needs=(*_is("adam"), _A_TYPE)
    )
    exp_avg_dtype: str = flag(
        "fp32", "Type of Adam's first moment.", choices=("fp32", "bf16"), refused=_NARROW, needs=(_PRECISION_AWARE,)
    )
    exp_avg_sq_dtype: str = flag(
        "fp32", "Type of Adam's second moment.", choices=("fp32", "bf16"), refused=_NARROW, needs=(_PRECISION_AWARE,)
    )

    @property
    def uses_muon(self) -> bool:
        return self.optimizer in _MUONS

    @property
    def scalar_optimizer(self) -> str | None:
        """The update rule of parameters that Muon does not update."""
        return self.muon_scalar_optimizer if self.uses_muon else None

    @property
    def has_narrow_moments(self) -> bool:
        return self.use_precision_aware_optimizer and "bf16" in self.moment_dtypes

    @property
    def moment_dtypes(self) -> tuple[str, str]:
        """Types of the first and second moment under --use-precision-aware-optimizer."""
        return self.exp_avg_dtype, self.exp_avg_sq_dtype

    @property
    def is_plain_adamw(self) -> bool:
        """True for AdamW with fp32 moments, the update that the native kernel computes."""
        return self.optimizer == "adam" and self.decoupled_weight_decay and not self.has_narrow_moments

    @property
    def offloads_optimizer(self) -> bool:
        return self.optimizer_cpu_offload or self.optimizer_offload_directory is not None


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    lr: float | None = flag(None, "Peak learning rate.", at_least=0.0, needs=(_TAKES_LR,))
    min_lr: float = flag(0.0, "Smallest learning rate.", at_least=0.0, needs=(_DECAY,))
    decoupled_lr: float | None = flag(
        None, "Peak learning rate of the token embedding and the output layer, in place of --lr.", at_least=0.0
    )
    decoupled_min_lr: float | None = flag(
        None,
        "Smallest learning rate of the token embedding and the output layer. Unset: --min-lr.",
        at_least=0.0,
        needs=(_DECOUPLED, _DECAY),
    )
    lr_decay_style: str = flag(
        "linear",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        refused=_OTHER_CURVES,
    )
    lr_decay_iters: int | None = flag(
        None, "Length of the decay in steps. Unset: --train-iters.", at_least=1, needs=(_DECAY_OR_SHARE,)
    )
    lr_decay_samples: int | None = flag(
        None, "Length of the decay in samples. Unset: --train-samples.", at_least=1, needs=(_DECAY_OR_SHARE,)
    )
    lr_warmup_fraction: float | None = flag(
        None,
        "Length of the linear warm-up as a share of the decay length.",
        at_least=0.0,
        at_most=1.0,
        excludes=excludes("lr_warmup_iters", "lr_warmup_samples"),
    )
    lr_warmup_iters: int = flag(0, "Length of the linear warm-up in steps.", at_least=0)
    lr_warmup_samples: int = flag(0, "Length of the linear warm-up in samples.", at_least=0)
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", at_least=0.0, needs=(_WARMUP,))
    lr_wsd_decay_style: str = flag(
        "exponential",
        "Shape of WSD's final decay.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=(_WSD,),
    )
    lr_wsd_decay_iters: int | None = flag(None, "Length of WSD's final decay in steps.", at_least=1, needs=(_WSD,))
    lr_wsd_decay_samples: int | None = flag(None, "Length of WSD's final decay in samples.", at_least=1, needs=(_WSD,))
    override_opt_param_scheduler: bool = flag(
        False,
        "Use the command line's learning-rate schedule on resume.",
        spelling="--override-opt_param-scheduler",
        needs=(RESUME,),
        excludes=excludes("use_checkpoint_opt_param_scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "Use the checkpoint's learning-rate schedule on resume.",
        spelling="--use-checkpoint-opt_param-scheduler",
        needs=(RESUME,),
    )
