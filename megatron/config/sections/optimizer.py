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
    """The condition that one of these update rules is in use, also as --muon-scalar-optimizer, which updates what is no
    matrix under Muon."""
    return (
        Need(
            f"--optimizer {' or '.join(names)}",
            lambda run: run.optimizer.optimizer in names or run.optimizer.scalar_optimizer in names,
        ),
    )


_MUON = _is(*_MUONS)
_ADAFACTOR = _is("adafactor")
_SCALED = Need("a scale by the parameter", lambda run: run.optimizer.adafactor_scale_parameter)
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
    "a schedule that starts from it (this --lr-schedule has rates of its own)",
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
_muon_flag = partial(flag, needs=_MUON)
_adafactor_flag = partial(flag, needs=_ADAFACTOR)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    optimizer: str = flag(
        "adam",
        "adam is AdamW (decoupled decay), adam8bit the same with moments of 8 bits. muon orthogonalises the updates of "
        "matrices, each whole in every layout; dist_muon is the same here. adafactor keeps of a matrix's second moment "
        "the means of its rows and columns alone.",
        choices=("adam", "sgd", "lion", "adam8bit", "adafactor", *_MUONS),
        refused=dict.fromkeys(("adaptive_muon", "soap"), "not supported yet; use muon or adam"),
    )
    weight_decay: float = flag(
        0.01,
        "Weight decay (decoupled, but added to the gradient in SGD); biases and 1-D parameters have none.",
        at_least=0.0,
    )
    apply_wd_to_qk_layernorm: bool = flag(
        False, "Weight decay of the norms of queries and keys too (--qk-layernorm).", needs=(_QK_NORMS,)
    )
    weight_decay_incr_style: str = flag(
        "constant",
        "How weight decay moves from start to end.",
        choices=("constant", "linear", "cosine"),
        excludes=excludes("weight_decay", given=True, way_out="remove --weight-decay"),
    )
    start_weight_decay: float | None = flag(
        None, "Weight decay at the start of its ramp.", at_least=0.0, needs=(_GROWING,), insists=True
    )
    end_weight_decay: float | None = flag(
        None, "Weight decay at the end of its ramp.", at_least=0.0, needs=(_GROWING,), insists=True
    )
    clip_grad: float = flag(1.0, "Largest global L2 norm of the gradient; 0 is no clipping.", at_least=0.0)
    adam_beta1: float = flag(0.9, "Adam's first beta.", at_least=0.0, below=1.0, needs=_updates_with(*_ADAMS))
    adam_beta2: float = flag(0.999, "Adam's second beta.", at_least=0.0, below=1.0, needs=_updates_with(*_ADAMS))
    adam_eps: float = flag(1e-8, "Adam's epsilon.", above=0.0, needs=_updates_with(*_ADAMS))
    store_param_remainders: bool = flag(
        False,
        "Store the low 16 bits of the fp32 master weights beside the bf16 weights, instead of whole fp32 copies. "
        "Training is the same, except that a weight halfway between two bf16 numbers is rounded away from zero. Needs "
        "the native adamw of --kernels.",
        excludes=excludes("optimizer_cpu_offload", "optimizer_offload_directory", why="masters on the host are whole"),
    )
    sgd_momentum: float = flag(0.9, "Momentum of SGD.", at_least=0.0, below=1.0, needs=_is("sgd"))
    optimizer_cpu_offload: bool = flag(
        False,
        "Keep moments and fp32 masters of Adam in host memory, and update there: gradients come to the host, and "
        "weights go back, while the device is at other work.",
        excludes=excludes("optimizer_offload_directory", why="the optimizer's state is in memory or in a file"),
    )
    optimizer_offload_directory: str | None = flag(
        None,
        "Keep them in a file of this directory instead (a fast local disk), read ahead and written behind the update. "
        "The file has no name and is gone with the process.",
        path=True,
    )
    optimizer_offload_fraction: float = flag(
        1.0,
        "Share of the optimizer's state that is offloaded, in whole gradient buckets; above 0 at least one.",
        at_least=0.0,
        at_most=1.0,
        needs=(_OFFLOAD,),
    )
    decoupled_weight_decay: bool = flag(
        True,
        "Adam's weight decay is added to the gradient, and so to the moments (L2), as in the first Adam.",
        off="--no-decoupled-weight-decay",
        needs=_updates_with("adam"),
    )
    lion_beta1: float = flag(
        0.95,
        "Lion's first beta: the share of the momentum in the direction.",
        at_least=0.0,
        below=1.0,
        needs=_updates_with("lion"),
    )
    lion_beta2: float = flag(
        0.98, "Lion's second beta: of the momentum.", at_least=0.0, below=1.0, needs=_updates_with("lion")
    )
    muon_momentum: float = _muon_flag(0.9, "Momentum of Muon.", at_least=0.0, below=1.0)
    muon_nesterov: bool = _muon_flag(False, "Nesterov's form of Muon's momentum.", aliases=("--muon-use-nesterov",))
    muon_split_qkv: bool = _muon_flag(
        True,
        "Orthogonalise fused queries, keys and values as one matrix. Default: each apart.",
        off="--muon-no-split-qkv",
    )
    muon_num_ns_steps: int = _muon_flag(5, "Newton-Schulz steps of Muon.", at_least=1, at_most=99)
    muon_coefficient_type: str = _muon_flag(
        "quintic",
        "Coefficients of the Newton-Schulz steps; simple are those of torch.optim.Muon.",
        choices=("simple", "quintic", "polar_express", "aol"),
    )
    muon_scale_mode: str = _muon_flag(
        "spectral",
        "Factor on Muon's update of a matrix of m rows and n columns: spectral sqrt(max(m, n)), unit_rms_norm "
        "sqrt(m / n), shape_scaling sqrt(max(1, m / n)).",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
    )
    muon_extra_scale_factor: float = _muon_flag(1.0, "A further factor on Muon's updates.", above=0.0)
    muon_fp32_matmul_prec: str = _muon_flag(
        "medium",
        "Type of the Newton-Schulz products of fp32 momenta: medium is bf16, highest fp32.",
        choices=("medium", "highest"),
        refused={"low": "there is no such precision; use medium", "high": "use medium, or highest with --allow-tf32"},
    )
    muon_tp_mode: str = flag(
        "distributed",
        "How a matrix that tensor parallelism splits is orthogonalised: always whole, by one rank.",
        choices=("distributed", "duplicated"),
        refused={"blockwise": "each rank's part alone is another update in every layout; leave it out"},
        status="no-op",
        note="each matrix is orthogonalised whole, by one of the ranks that hold it",
    )
    muon_scalar_optimizer: str = _muon_flag(
        "adam",
        "With Muon, what updates the parameters that are no matrices, and the tables of words and positions.",
        choices=("adam", "lion"),
    )
    adafactor_beta1: float = _adafactor_flag(
        0.0,
        "Adafactor's first moment, of updates; 0 keeps none, which saves 4 bytes per parameter.",
        at_least=0.0,
        below=1.0,
    )
    adafactor_decay_rate: float = _adafactor_flag(
        -0.8,
        "Exponent of Adafactor's second moment: at update t, t to this power is the share of the new squares.",
        at_most=0.0,
    )
    adafactor_clip_threshold: float = _adafactor_flag(
        1.0, "Largest root mean square of an update of Adafactor, before its rate.", above=0.0
    )
    adafactor_eps1: float = _adafactor_flag(1e-30, "Added to Adafactor's squared gradients.", above=0.0)
    adafactor_eps2: float = flag(
        1e-3,
        "Smallest root mean square that Adafactor takes a parameter to have.",
        at_least=0.0,
        needs=(*_ADAFACTOR, _SCALED),
    )
    adafactor_scale_parameter: bool = _adafactor_flag(
        True,
        "Adafactor's rate is --lr. Default: --lr times the root mean square of the parameter.",
        off="--adafactor-no-scale-parameter",
    )
    adafactor_relative_step: bool = _adafactor_flag(
        False,
        "Adafactor's rate at update t is at most 1 / sqrt(t), as in torch.optim; with a constant --lr of 0.01 it is "
        "the paper's.",
    )
    use_precision_aware_optimizer: bool = flag(
        False, "Adam's moments in the types of --exp-avg-dtype and --exp-avg-sq-dtype.", needs=(*_is("adam"), _A_TYPE)
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
        """The rule beside Muon."""
        return self.muon_scalar_optimizer if self.uses_muon else None

    @property
    def has_narrow_moments(self) -> bool:
        return self.use_precision_aware_optimizer and "bf16" in self.moment_dtypes

    @property
    def moment_dtypes(self) -> tuple[str, str]:
        """As --use-precision-aware-optimizer has them."""
        return self.exp_avg_dtype, self.exp_avg_sq_dtype

    @property
    def is_plain_adamw(self) -> bool:
        """Whether the native kernel computes it."""
        return self.optimizer == "adam" and self.decoupled_weight_decay and not self.has_narrow_moments

    @property
    def offloads_optimizer(self) -> bool:
        return self.optimizer_cpu_offload or self.optimizer_offload_directory is not None


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    lr: float | None = flag(None, "Peak learning rate.", at_least=0.0, needs=(_TAKES_LR,))
    min_lr: float = flag(0.0, "Smallest learning rate.", at_least=0.0, needs=(_DECAY,))
    decoupled_lr: float | None = flag(
        None, "Peak learning rate of the word table and the output layer, in place of --lr.", at_least=0.0
    )
    decoupled_min_lr: float | None = flag(
        None,
        "Smallest learning rate of the word table and the output layer. Unset: --min-lr.",
        at_least=0.0,
        needs=(_DECOUPLED, _DECAY),
    )
    lr_decay_style: str = flag(
        "linear", "Shape of the decay.", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = flag(
        None, "Length of the decay in steps. Unset: --train-iters.", at_least=1, needs=(_DECAY_OR_SHARE,)
    )
    lr_decay_samples: int | None = flag(
        None, "Length of the decay in samples. Unset: --train-samples.", at_least=1, needs=(_DECAY_OR_SHARE,)
    )
    lr_warmup_fraction: float | None = flag(
        None,
        "Linear warm-up as a share of the decay length.",
        at_least=0.0,
        at_most=1.0,
        excludes=excludes("lr_warmup_iters", "lr_warmup_samples"),
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
        excludes=excludes("use_checkpoint_opt_param_scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "On resume take the schedule from the checkpoint.",
        spelling="--use-checkpoint-opt_param-scheduler",
        needs=(RESUME,),
    )
