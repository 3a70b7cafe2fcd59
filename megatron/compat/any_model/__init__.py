"""The engine for any nn.Module: DeepSpeed's calls over the same buckets, optimizer step and checkpoints as our
GPT's."""

from megatron.compat.any_model.engine import ModelEngine
from megatron.compat.any_model.initialize import add_config_arguments, initialize
from megatron.compat.any_model.ranks import init_distributed
