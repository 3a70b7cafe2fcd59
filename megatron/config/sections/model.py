"""The model's architecture, for the families of GPT-2, GPT-NeoX, Llama/Qwen/Mistral and OLMo-2."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.flag import Need, excludes, flag
from megatron.utils.numerals import INT32, LAYERS, WIDTH

_NORMAL = Need("normally distributed initial weights", lambda run: not run.model.init_method_xavier_uniform)
ROPE = Need("rotary positions", lambda run: run.model.positions == "rope")
_LLAMA3 = Need("--use-rope-scaling", lambda run: run.model.rope_scaling == "llama3")
_YARN = Need("--position-embedding-type yarn", lambda run: run.model.rope_scaling == "yarn")
_LEARNED = Need(
    "--position-embedding-type learned_absolute",
    lambda run: run.given("position_embedding_type") and run.model.position_embedding_type == "learned_absolute",
)
_NO_POSITIONS = Need("--position-embedding-type none", lambda run: run.model.position_embedding_type == "none")
_ACTIVATION = {
    "why": "each chooses the activation",
    "way_out": "keep one (--swiglu=false turns off the --swiglu of a preset)",
}
_WIRINGS = "each sets another order of norms and residual additions"
_GELU = Need(
    "a GELU (and no --openai-gelu)", lambda run: run.model.activation.startswith("gelu") and not run.model.openai_gelu
)
_NO_BIAS = Need("--disable-bias-linear", lambda run: not run.model.add_bias_linear)
_QK_NORM = Need("--qk-layernorm", lambda run: run.model.qk_layernorm)
_DENSE_LAYER = Need(
    "a dense layer, or experts without --moe-ffn-hidden-size",
    lambda run: not run.moe.only_own_width(run.model.num_layers),
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model: str | None = flag(None, "Preset of model settings (gpt2-124m, llama3-8b, ...). Any flag overrides it.")
    num_layers: int = flag(0, "Number of transformer layers.", at_least=1, at_most=LAYERS, required=True)
    hidden_size: int = flag(0, "Width of the residual stream.", at_least=1, at_most=WIDTH, required=True)
    ffn_hidden_size: int | None = flag(
        None,
        "Width of the MLP. Unset: 4 x hidden, or int(4 x hidden x 2/3 / 64) x 64 with --swiglu.",
        at_least=1,
        at_most=WIDTH,
        needs=(_DENSE_LAYER,),
    )
    num_attention_heads: int = flag(0, "Number of query heads.", at_least=1, at_most=WIDTH, required=True)
    kv_channels: int | None = flag(None, "Width of one head. Unset: hidden size / heads.", at_least=1, at_most=WIDTH)
    group_query_attention: bool = flag(False, "Use grouped-query attention. Needs --num-query-groups.")
    num_query_groups: int | None = flag(
        None,
        "Number of key/value heads. Turns grouped-query attention on; 1 is multi-query attention.",
        at_least=1,
        at_most=WIDTH,
        aliases=("--num-key-value-heads",),
    )
    max_position_embeddings: int = flag(
        0,
        "Number of positions, at least --seq-length: rows of the learned table. With RoPE it is only recorded.",
        at_least=1,
        at_most=INT32,
    )
    position_embedding_type: str = flag(
        "learned_absolute",
        "Kind of position encoding.",
        choices=("learned_absolute", "rope", "yarn", "none"),
        refused={
            "relative": "T5's relative positions are not supported; use learned_absolute or rope",
            "mrope": "multimodal RoPE is not supported; use rope",
        },
    )
    add_position_embedding: bool = flag(
        True, "Omit the learned position table.", off="--no-position-embedding", excludes=excludes(_LEARNED)
    )
    use_rotary_position_embeddings: bool = flag(
        False,
        "Megatron-LM 23.06's spelling of --position-embedding-type rope, without a learned table.",
        excludes=excludes(_LEARNED, _NO_POSITIONS),
    )
    rotary_percent: float = flag(1.0, "Share of the head width that rotates.", above=0.0, at_most=1.0, needs=(ROPE,))
    rotary_base: float = flag(10000.0, "Base (theta) of the RoPE frequencies.", above=0.0, needs=(ROPE,))
    rotary_seq_len_interpolation_factor: float | None = flag(
        None,
        "Divisor of the positions, for linear position interpolation.",
        above=0.0,
        excludes=excludes(_YARN, "use_rope_scaling", why="they are different scalings of RoPE"),
    )
    use_rope_scaling: bool = flag(
        False,
        "Scale the RoPE frequencies as Llama 3.x does.",
        excludes=excludes(_YARN, why="they are different scalings of RoPE"),
    )
    rope_scaling_factor: float = flag(8.0, "Factor of --use-rope-scaling.", at_least=1.0, needs=(_LLAMA3,))
    rope_low_freq_factor: float = flag(1.0, "Llama-3.x scaling: low frequency factor.", above=0.0, needs=(_LLAMA3,))
    rope_high_freq_factor: float = flag(4.0, "Llama-3.x scaling: high frequency factor.", above=0.0, needs=(_LLAMA3,))
    rope_original_max_position: int = flag(
        8192, "Llama-3.x scaling: context of the original training.", at_least=1, at_most=INT32, needs=(_LLAMA3,)
    )
    yarn_factor: float = flag(
        1.0,
        "YaRN: context length divided by the original training's.",
        aliases=("--yarn-rotary-scaling-factor",),
        at_least=1.0,
        needs=(_YARN,),
    )
    yarn_original_max_position_embeddings: int = flag(
        4096, "YaRN: context of the original training.", at_least=1, at_most=INT32, needs=(_YARN,)
    )
    yarn_beta_fast: float = flag(32.0, "YaRN: rotations above which a frequency is kept.", above=0.0, needs=(_YARN,))
    yarn_beta_slow: float = flag(
        1.0, "YaRN: rotations below which a frequency is interpolated.", above=0.0, needs=(_YARN,)
    )
    yarn_attention_factor: float | None = flag(
        None, "YaRN: factor on cos and sin. Unset: 0.1 x ln(scaling factor) + 1.", above=0.0, needs=(_YARN,)
    )
    make_vocab_size_divisible_by: int = flag(
        128,
        "The vocabulary is padded to a multiple of this number x tensor-parallel size. Padding changes no result.",
        at_least=1,
        at_most=WIDTH,
    )
    normalization: str = flag(
        "LayerNorm",
        "Kind of normalisation.",
        choices=("LayerNorm", "RMSNorm"),
        also={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_epsilon: float = flag(1e-5, "Epsilon of the norms.", aliases=("--layernorm-epsilon",), above=0.0)
    apply_layernorm_1p: bool = flag(False, "Store gamma - 1, so that weight decay pulls the gain to 1.")
    qk_layernorm: bool = flag(False, "Normalise Q and K before RoPE.")
    qk_layernorm_scope: str = flag(
        "head",
        "Span of a --qk-layernorm norm: each head separately, or all heads together (OLMo-2).",
        choices=("head", "all"),
        needs=(_QK_NORM,),
    )
    norm_placement: str = flag(
        "before",
        "Position of a layer's norms: before attention and MLP, or after them, on the output that is added to the "
        "residual stream (OLMo-2).",
        choices=("before", "after"),
    )
    use_parallel_residual: bool = flag(
        False,
        "Run attention and MLP in parallel: both read the layer's input, each through its own norm, and both outputs "
        "are added to it (GPT-NeoX).",
        aliases=("--gpt-j-residual",),
        excludes=excludes("norm_placement", "apply_residual_connection_post_layernorm", why=_WIRINGS),
    )
    window_size: tuple[int, ...] | None = flag(
        None,
        "Sliding-window attention: each query sees LEFT tokens before and RIGHT tokens after its own. For Mistral's "
        "window of w tokens, give w-1 0.",
        nargs="+",
    )
    swiglu: bool = flag(False, "Use a gated SiLU MLP.", excludes=excludes("squared_relu", "openai_gelu", **_ACTIVATION))
    squared_relu: bool = flag(False, "Use a squared-ReLU MLP.", excludes=excludes("openai_gelu", **_ACTIVATION))
    openai_gelu: bool = flag(
        False,
        "Use the tanh form of GELU, also with --disable-bias-linear or --no-bias-gelu-fusion.",
    )
    bias_gelu_fusion: bool = flag(
        True,
        "Use the erf form of GELU, as Megatron's unfused path does.",
        off="--no-bias-gelu-fusion",
        needs=(_GELU,),
    )
    add_bias_linear: bool = flag(True, "Remove the biases of the linear layers.", off="--disable-bias-linear")
    add_qkv_bias: bool = flag(
        False, "Keep the bias of the QKV projection under --disable-bias-linear (Qwen2).", needs=(_NO_BIAS,)
    )
    untie_embeddings_and_output_weights: bool = flag(False, "Use an output head separate from the token embedding.")
    attention_dropout: float = flag(0.1, "Dropout on the attention probabilities.", at_least=0.0, below=1.0)
    hidden_dropout: float = flag(0.1, "Dropout on embeddings and residual branches.", at_least=0.0, below=1.0)
    init_method_std: float = flag(
        0.02,
        "Standard deviation of the initial weights, divided by sqrt(2 x layers) for output projections.",
        at_least=0.0,
        needs=(_NORMAL,),
    )
    init_method_xavier_uniform: bool = flag(False, "Draw Xavier-uniform instead of normal initial weights.")
    apply_residual_connection_post_layernorm: bool = flag(
        False,
        "Take the residual after the norm instead of before it (BERT).",
        excludes=excludes("norm_placement", why=_WIRINGS),
    )
    apply_query_key_layer_scaling: bool = flag(
        False, "Divide QK by the layer number and multiply back in the fp32 softmax. Off by default, unlike in 23.06."
    )
    fp32_residual_connection: bool = flag(False, "Keep the residual stream in fp32.")
    attention_softmax_in_fp32: bool = flag(
        False,
        "Compute the attention softmax in fp32.",
        status="no-op",
        note="the attention softmax is always computed in fp32",
    )

    @property
    def head_dim(self) -> int:
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups if self.num_query_groups is not None else self.num_attention_heads

    @property
    def gated(self) -> bool:
        return self.swiglu

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.swiglu:  # two thirds of 4h, so that the gated MLP has as many weights as the plain one
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size

    @property
    def activation(self) -> Literal["gelu_tanh", "gelu_erf", "swiglu", "squared_relu"]:
        if self.swiglu:
            return "swiglu"
        if self.squared_relu:
            return "squared_relu"
        # Megatron's fused bias+GELU is the tanh form, its unfused path the erf form. Without a bias there is nothing
        # to fuse, so --disable-bias-linear implies the unfused path. --openai-gelu is always tanh.
        fused = self.bias_gelu_fusion and self.add_bias_linear
        return "gelu_tanh" if fused or self.openai_gelu else "gelu_erf"

    @property
    def positions(self) -> Literal["learned", "rope", "none"]:
        if self.use_rotary_position_embeddings or self.position_embedding_type in ("rope", "yarn"):
            return "rope"
        if self.position_embedding_type == "none" or not self.add_position_embedding:
            return "none"
        return "learned"

    @property
    def rope_scaling(self) -> Literal["none", "linear", "llama3", "yarn"]:
        if self.position_embedding_type == "yarn":
            return "yarn"
        if self.use_rope_scaling:
            return "llama3"
        return "none" if self.rotary_seq_len_interpolation_factor is None else "linear"

    @property
    def window(self) -> tuple[int, int] | None:
        """(left, right) numbers of tokens that a query sees besides its own; None without a window."""
        return None if self.window_size is None else (self.window_size[0], self.window_size[1])

    @property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def linear_bias(self) -> bool:
        return self.add_bias_linear

    @property
    def qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias
