"""Training FLOPs by Megatron's formula (arXiv 2205.05198), and the peak FLOP/s of devices.

Model FLOPs count forward and backward (twice the forward) of every matrix product, the full square of attention, and no
recomputation. For plain GPT-2 shapes this is 72 B s L h^2 (1 + s / 6h + V / 12Lh); the code below covers every option.
MoE layers count a token's top-k experts (none dropped), the shared expert and the router.
"""

from megatron.config import ModelConfig, MoEConfig


def flops_per_token(
    config: ModelConfig, *, seq_length: int, padded_vocab_size: int, moe: MoEConfig | None = None
) -> float:
    """Training FLOPs per token of a sequence of `seq_length`."""
    hidden, width = config.hidden_size, config.head_dim
    query_width, kv_width = config.num_attention_heads * width, config.query_groups * width
    qkv = hidden * (query_width + 2 * kv_width)
    core = 2 * seq_length * query_width  # QK and PV
    dense = query_width * hidden
    per_layer = qkv + core + dense  # multiply-adds of the forward pass
    moe = moe or MoEConfig()
    with_experts = len(moe.expert_layers(config.num_layers))
    mlps = (config.num_layers - with_experts) * _mlp(config, config.ffn_size) + with_experts * _experts(config, moe)
    head = hidden * padded_vocab_size
    return 2.0 * 3.0 * (config.num_layers * per_layer + mlps + head)


def _mlp(config: ModelConfig, width: int) -> int:
    return config.hidden_size * width * (3 if config.gated else 2)


def _experts(config: ModelConfig, moe: MoEConfig) -> int:
    hidden, topk = config.hidden_size, moe.moe_router_topk
    router = hidden * (moe.num_experts or 0)
    chosen = topk * (_mlp(config, moe.moe_ffn_hidden_size or config.ffn_size) + hidden)  # and the weighted sum
    return router + chosen + _mlp(config, moe.moe_shared_expert_intermediate_size or 0)


# Dense (not sparse) peak FLOP/s of one device, by a part of its name, most specific first. Half precision is bf16 and
# fp16. Only numbers published by the vendor are listed; an unknown device has no MFU.
_PEAKS: tuple[tuple[str, float, float | None], ...] = (  # in half precision, in float32
    ("GB300", 2500e12, None),
    ("GB200", 2500e12, None),
    ("B300", 2250e12, None),
    ("B200", 2250e12, None),
    ("GH200", 989.4e12, 66.9e12),
    ("H200 NVL", 835.5e12, 66.9e12),
    ("H200", 989.4e12, 66.9e12),
    ("H100 NVL", 835.5e12, 66.9e12),
    ("H100 PCIe", 756.0e12, 51.2e12),
    ("H100", 989.4e12, 66.9e12),
    ("H800", 989.4e12, None),
    ("H20", 148.0e12, None),
    ("A100", 312.0e12, 19.5e12),
    ("A800", 312.0e12, 19.5e12),
    ("A40", 149.7e12, None),
    ("A30", 165.0e12, None),
    ("L40S", 362.0e12, None),
    ("L4", 121.0e12, None),
    ("V100", 125.0e12, 15.7e12),
    ("MI300X", 1307.4e12, None),
    ("MI325X", 1307.4e12, None),
    ("MI250X", 383.0e12, None),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of `device_name` (torch's name) in `dtype`; None if unknown."""
    if dtype not in ("bfloat16", "float16", "float32"):
        return None
    if dtype == "bfloat16" and "V100" in device_name:
        return None  # has no bf16
    words = device_name.replace("-", " ").split()
    for known, half, full in _PEAKS:
        if all(part in words for part in known.split()):
            return full if dtype == "float32" else half
    return None
