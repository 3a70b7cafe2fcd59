"""What a run needs, before it is started: arithmetic on settings."""

from megatron.planner.memory import StateBytes, state_bytes

__all__ = ["StateBytes", "state_bytes"]
