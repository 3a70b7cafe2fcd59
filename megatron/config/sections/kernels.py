"""The implementation of each operation. No value changes the function that is computed."""

from dataclasses import dataclass

from megatron.config.flag import Need, excludes, flag
from megatron.config.sections.model import ROPE
from megatron.config.sections.precision import RECOMPUTES

_SWIGLU = Need("--swiglu", lambda run: run.model.swiglu)
_LAYER_NORM = Need("--normalization LayerNorm", lambda run: run.model.normalization == "LayerNorm")


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    kernels: str = flag("auto", "auto, native (csrc/) or ref (plain PyTorch). auto,-rope: without the rope kernel.")
    compile: bool = flag(
        False,
        "Compile every transformer layer with torch.compile. This fuses elementwise operations; the first step takes "
        "longer.",
        excludes=excludes(
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            RECOMPUTES,
            "cpu_offloading_num_layers",
            "overlap_param_gather",
            "num_experts",
            why="only layers that a single rank computes, once per pass, are compiled",
            way_out="leave --compile out",
        ),
    )
    masked_softmax_fusion: bool = flag(True, "Unfuse softmax: -softmax in --kernels.", off="--no-masked-softmax-fusion")
    bias_swiglu_fusion: bool = flag(
        True, "Unfuse SwiGLU: -swiglu in --kernels.", off="--no-bias-swiglu-fusion", needs=(_SWIGLU,)
    )
    bias_dropout_fusion: bool = flag(True, "Unfuse it: -bias_dropout_add in --kernels.", off="--no-bias-dropout-fusion")
    rope_fusion: bool = flag(True, "Unfuse RoPE: -rope in --kernels.", off="--no-rope-fusion", needs=(ROPE,))
    gradient_accumulation_fusion: bool = flag(
        True, "Unfuse it: -wgrad_accumulation in --kernels.", off="--no-gradient-accumulation-fusion"
    )
    persist_layer_norm: bool = flag(
        True, "Unfuse LayerNorm: -layer_norm in --kernels.", off="--no-persist-layer-norm", needs=(_LAYER_NORM,)
    )
    use_flash_attn: bool = flag(False, "Short for --attention-backend flash.")
    attention_backend: str = flag(
        "auto",
        "Core attention. flash, fused: PyTorch's SDPA, flash or cuDNN first; unfused, local: the plain formula.",
        choices=("auto", "flash", "fused", "unfused", "local"),
        excludes=excludes("use_flash_attn", own=lambda run: run.kernels.attention_backend not in ("auto", "flash")),
    )

    cuda_graphs: bool = flag(
        False,
        "Capture forward and backward of a micro-batch as CUDA graphs and replay them. Requires one rank per model "
        "and no experts.",
        excludes=(
            *excludes(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                why="ranks communicate within a pass, which is not recorded",
            ),
            *excludes("num_experts", why="the host splits the tokens by expert within a pass"),
            *excludes("overlap_grad_reduce", why="reductions start within a pass"),
            *excludes("overlap_param_gather", why="a pass waits for weights"),
            *excludes("compile", why="the combination is untested"),
            *excludes("cpu_offloading_num_layers", why="activations leave the device within a pass"),
            *excludes(RECOMPUTES, why="it reads the random state within a pass"),
        ),
    )

    @property
    def spec(self) -> str:
        """`--kernels` with the operations that the `--no-*-fusion` switches leave out."""
        switches = {
            "softmax": self.masked_softmax_fusion,
            "swiglu": self.bias_swiglu_fusion,
            "bias_dropout_add": self.bias_dropout_fusion,
            "rope": self.rope_fusion,
            "wgrad_accumulation": self.gradient_accumulation_fusion,
            "layer_norm": self.persist_layer_norm,
        }
        parts = self.kernels.split(",")
        return ",".join([*parts, *(f"-{op}" for op, on in switches.items() if not on and f"-{op}" not in parts)])

    @property
    def attention(self) -> str:
        return "flash" if self.use_flash_attn else self.attention_backend
