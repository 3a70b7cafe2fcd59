"""Choice of the implementation of each operation. No value changes the function that is computed."""

from dataclasses import dataclass

from megatron.config.flag import Need, excludes, flag
from megatron.config.sections.model import ROPE
from megatron.config.sections.precision import RECOMPUTES

_SWIGLU = Need("--swiglu", lambda run: run.model.swiglu)
_LAYER_NORM = Need("--normalization LayerNorm", lambda run: run.model.normalization == "LayerNorm")


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    kernels: str = flag(
        "auto", "Implementations: auto, native (csrc/) or ref (PyTorch). auto,-rope: without the rope kernel."
    )
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
            why="only layers that one rank computes, once per pass, can be compiled",
            way_out="remove --compile",
        ),
    )
    masked_softmax_fusion: bool = flag(
        True, "Unfuse softmax: add -softmax to --kernels.", off="--no-masked-softmax-fusion"
    )
    bias_swiglu_fusion: bool = flag(
        True, "Unfuse SwiGLU: add -swiglu to --kernels.", off="--no-bias-swiglu-fusion", needs=(_SWIGLU,)
    )
    bias_dropout_fusion: bool = flag(
        True,
        "Unfuse bias, dropout and residual addition: add -bias_dropout_add to --kernels.",
        off="--no-bias-dropout-fusion",
    )
    rope_fusion: bool = flag(True, "Unfuse RoPE: add -rope to --kernels.", off="--no-rope-fusion", needs=(ROPE,))
    gradient_accumulation_fusion: bool = flag(
        True,
        "Unfuse weight-gradient accumulation: add -wgrad_accumulation to --kernels.",
        off="--no-gradient-accumulation-fusion",
    )
    persist_layer_norm: bool = flag(
        True, "Unfuse LayerNorm: add -layer_norm to --kernels.", off="--no-persist-layer-norm", needs=(_LAYER_NORM,)
    )
    use_flash_attn: bool = flag(False, "Short for --attention-backend flash.")
    attention_backend: str = flag(
        "auto",
        "Core attention. flash: PyTorch's SDPA, preferring its flash kernel; fused: SDPA, preferring cuDNN; unfused, "
        "local: separate operations.",
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
                why="ranks communicate within a pass, which a graph does not capture",
            ),
            *excludes(
                "num_experts", why="the host splits the tokens by expert within a pass, which a graph does not capture"
            ),
            *excludes(
                "overlap_grad_reduce", why="gradient reductions start within a pass, which a graph does not capture"
            ),
            *excludes("overlap_param_gather", why="a pass waits for gathered weights, which a graph does not capture"),
            *excludes("compile", why="the combination is untested"),
            *excludes(
                "cpu_offloading_num_layers",
                why="activations leave the device within a pass, which a graph does not capture",
            ),
            *excludes(
                RECOMPUTES, why="recomputation reads the random state within a pass, which a graph does not capture"
            ),
        ),
    )

    @property
    def spec(self) -> str:
        """`--kernels` with "-OPERATION" added for each operation that a switch such as `--no-rope-fusion` unfuses."""
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
