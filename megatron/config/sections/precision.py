"""Number formats, loss scaling, and activation recomputation."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.flag import Need, excludes, flag

_DYNAMIC = Need("--fp16 and a dynamic loss scale", lambda run: run.precision.fp16 and run.precision.loss_scale is None)
_FULL = Need("--recompute-granularity full", lambda run: run.recompute.full)
RECOMPUTES = Need("recomputation", lambda run: run.recompute.full or run.recompute.selective)
_SELECTIVE = Need("--recompute-granularity selective", lambda run: run.recompute.selective)

_NO_FP8 = "fp8 is not built; remove the flag"


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    fp16: bool = flag(False, "Train fp16 weights with fp32 masters and a loss scale.", excludes=excludes("bf16"))
    bf16: bool = flag(False, "Train bf16 weights with fp32 masters.")
    loss_scale: float | None = flag(None, "Constant loss scale. Unset: dynamic with --fp16, else 1.", above=0.0)
    initial_loss_scale: float = flag(2.0**32, "Initial dynamic loss scale.", above=0.0, needs=(_DYNAMIC,))
    min_loss_scale: float = flag(1.0, "Smallest dynamic loss scale.", above=0.0, needs=(_DYNAMIC,))
    loss_scale_window: int = flag(
        1000, "Steps without overflow before the loss scale doubles.", at_least=1, needs=(_DYNAMIC,)
    )
    hysteresis: int = flag(2, "Overflows before the loss scale halves.", at_least=1, needs=(_DYNAMIC,))
    consecutive_hysteresis: bool = flag(
        False,
        "Reset the hysteresis after each step without overflow, so that only consecutive overflows count.",
        needs=(_DYNAMIC,),
    )
    allow_tf32: bool = flag(
        False,
        "Allow TF32 in fp32 products on a GPU. This is faster, but exact to only three digits.",
    )
    transformer_impl: str = flag(
        "local",
        "Implementation of the layers. There is one; --kernels chooses its operations.",
        choices=("local", "transformer_engine", "inference_optimized"),
        status="no-op",
        note="there is one implementation; --kernels chooses its operations",
    )
    fp8_format: str | None = flag(
        None, "fp8 format of the linear layers.", choices=("e4m3", "hybrid"), status="later", note=_NO_FP8
    )
    fp8_recipe: str = flag("delayed", "Method to compute fp8 scales.", status="later", note=_NO_FP8)
    fp8_margin: int = flag(0, "Margin of delayed scaling.", status="later", note=_NO_FP8)
    fp8_amax_history_len: int = flag(1, "History of delayed scaling.", status="later", note=_NO_FP8)
    fp8_amax_compute_algo: str = flag(
        "most_recent", "Choice of the maximum from the history.", status="later", note=_NO_FP8
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
        None,
        "Parts to recompute. full: whole layers; selective: the --recompute-modules.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "Layers to recompute under full. uniform: chunks of layers; block: the first layers of each stage.",
        choices=("uniform", "block"),
        needs=(_FULL,),
        insists=True,
    )
    recompute_num_layers: int = flag(
        1, "Layers per chunk (uniform) or number of recomputed layers (block).", at_least=1, needs=(_FULL,)
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "Parts to recompute under selective. mlp: the MLP of layers without experts; moe: router and experts; moe_act: "
        "the activation function of experts; layernorm: the norms before attention and MLP. Unset: core_attn.",
        nargs="+",
        choices=("core_attn", "layernorm", "mlp", "moe", "moe_act"),
        refused=dict.fromkeys(
            ("mla_up_proj", "shared_experts"),
            "not supported yet; use core_attn, layernorm, mlp, moe or moe_act, or --recompute-granularity full",
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
        "Number of layers, the first of each stage, whose activations are offloaded to host memory.",
        at_least=0,
        excludes=excludes(_FULL, why="a recomputed layer keeps only its input"),
    )
    distribute_saved_activations: bool = flag(
        False,
        "Shard saved activations over tensor-parallel ranks.",
        status="later",
        note="use --sequence-parallel, which also shards them over these ranks",
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
