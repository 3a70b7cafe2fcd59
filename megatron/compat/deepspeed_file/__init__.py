"""DeepSpeed's JSON as a source of settings: a file (`--deepspeed_config`) or a dict (`megatron.compat.initialize`)."""

from megatron.compat.deepspeed_file.read import read_deepspeed
from megatron.compat.deepspeed_file.reading import DeepSpeedSettings
