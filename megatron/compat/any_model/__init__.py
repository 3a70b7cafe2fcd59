"""Engine for any nn.Module: DeepSpeed's calls, on the gradient buckets, optimizer step and checkpoints of the GPT."""

from megatron.compat.any_model.engine import ModelEngine
from megatron.compat.any_model.initialize import add_config_arguments, initialize
from megatron.compat.any_model.ranks import init_distributed
