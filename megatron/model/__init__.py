"""A GPT in plain PyTorch, for the families of GPT-2, GPT-NeoX, Llama/Qwen/Mistral and OLMo-2."""

from megatron.model.flops import flops_per_token, peak_flops
from megatron.model.gpt import GPT
from megatron.model.init import initial_value, initialise
from megatron.model.kv_cache import KVCache
