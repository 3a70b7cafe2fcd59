"""What a run needs, before it is started: arithmetic on settings."""

from megatron.planner.memory import StateBytes, copy_bytes, state_bytes

__all__ = ["StateBytes", "copy_bytes", "state_bytes"]
