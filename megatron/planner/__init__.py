"""What a run needs, before it is started: arithmetic on settings."""

from megatron.planner.activations import ActivationBytes, activation_bytes
from megatron.planner.memory import StateBytes, copy_bytes, state_bytes

__all__ = ["ActivationBytes", "StateBytes", "activation_bytes", "copy_bytes", "state_bytes"]
