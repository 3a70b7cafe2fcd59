"""Number formats, loss scaling, and activation recomputation."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.flag import Need, excludes, flag

_DYNAMIC = Need("--fp16 and a dynamic loss scale", lambda run: run.precision.fp16 and run.precision.loss_scale is None)
_FULL = Need("--recompute-granularity full", lambda run: run.recompute.full)
RECOMPUTES = Need("recomputation", lambda run: run.recompute.full or run.recompute.selective)
_SELECTIVE = Need("--recompute-granularity selective", lambda run: run.recompute.selective)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    fp16: bool = flag(False, "fp16 weights with fp32 masters and a loss scale.", excludes=excludes("bf16"))
    bf16: bool = flag(False, "bf16 weights with fp32 masters.")
    loss_scale: float | None = flag(None, "Constant loss scale. Unset: dynamic with --fp16, else 1.", above=0.0)
    initial_loss_scale: float = flag(2.0**32, "First dynamic loss scale.", above=0.0, needs=(_DYNAMIC,))
    min_loss_scale: float = flag(1.0, "Smallest dynamic loss scale.", above=0.0, needs=(_DYNAMIC,))
    loss_scale_window: int = flag(1000, "Good steps before the scale doubles.", at_least=1, needs=(_DYNAMIC,))
    hysteresis: int = flag(2, "Overflows before the scale halves.", at_least=1, needs=(_DYNAMIC,))
    consecutive_hysteresis: bool = flag(
        False, "Only overflows in a row use up the hysteresis: every good step refills it.", needs=(_DYNAMIC,)
    )
    allow_tf32: bool = flag(
        False,
        "On a GPU, round the factors of fp32 products to TF32, which has the mantissa of fp16: faster, and exact to "
        "three digits only.",
    )
    transformer_impl: str = flag(
        "local",
        "Which layers are used; there is one implementation, and --kernels picks its operations.",
        choices=("local", "transformer_engine", "inference_optimized"),
        status="no-op",
        note="there is one implementation; --kernels chooses its operations",
    )
    fp8_format: str | None = flag(
        None, "fp8 format of the linear layers.", choices=("e4m3", "hybrid"), status="later", note="use --bf16"
    )
    fp8_recipe: str = flag("delayed", "How fp8 scales are found.", status="later", note="leave it out")
    fp8_margin: int = flag(0, "Margin of delayed scaling.", status="later", note="leave it at 0")
    fp8_amax_history_len: int = flag(1, "History of delayed scaling.", status="later", note="leave it at 1")
    fp8_amax_compute_algo: str = flag(
        "most_recent", "Which maximum of the history is used.", status="later", note="leave it at most_recent"
    )

    @property
    def params_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        if self.fp16:
            return "float16"
        return "bfloat16" if self.bf16 else "float32"


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    recompute_activations: bool = flag(False, "Short for --recompute-granularity selective.", excludes=excludes(_FULL))
    recompute_granularity: str | None = flag(
        None, "full: whole layers; selective: the core attention.", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None,
        "With full: uniform chunks of layers, or the first layers (block).",
        choices=("uniform", "block"),
        needs=(_FULL,),
        insists=True,
    )
    recompute_num_layers: int = flag(
        1, "Layers per chunk (uniform) or recomputed layers (block).", at_least=1, needs=(_FULL,)
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "With selective: the parts to recompute (mlp: the MLP of layers without experts; moe: router and experts). "
        "Unset: core_attn.",
        nargs="+",
        choices=("core_attn", "mlp", "moe"),
        refused=dict.fromkeys(
            ("layernorm", "moe_act", "mla_up_proj", "shared_experts"),
            "not supported yet; use core_attn, mlp or moe, or --recompute-granularity full",
        ),
        needs=(_SELECTIVE,),
        insists=True,
    )
    moe_layer_recompute: bool = flag(
        False,
        "Short for --recompute-granularity selective, with moe among the --recompute-modules.",
        excludes=excludes(_FULL),
    )
    cpu_offloading_num_layers: int = flag(
        0,
        "Layers, the first of each stage, whose activations wait in host memory for the backward pass.",
        at_least=0,
        excludes=excludes(_FULL, why="a layer keeps its input alone, and computes the rest anew"),
    )
    distribute_saved_activations: bool = flag(
        False,
        "Shard saved activations over tensor-parallel ranks.",
        status="later",
        note="use --sequence-parallel, which divides them over these ranks too",
    )

    @property
    def full(self) -> bool:
        return self.recompute_granularity == "full"

    @property
    def selective(self) -> bool:
        return self.recompute_activations or self.moe_layer_recompute or self.recompute_granularity == "selective"

    @property
    def modules(self) -> tuple[str, ...]:
        """The parts of a layer that selective recomputation covers."""
        if not self.selective:
            return ()
        return (*(self.recompute_modules or ("core_attn",)), *(("moe",) if self.moe_layer_recompute else ()))
