"""Model, gradients and optimizer behind one training step."""

from megatron.engine.engine import (
    Batch,
    Engine,
    Evaluation,
    EvaluationResult,
    ForwardStep,
    Passes,
    StartedStep,
    StepResult,
)
from megatron.engine.routers import RouterSteps

__all__ = [
    "Batch",
    "Engine",
    "Evaluation",
    "EvaluationResult",
    "ForwardStep",
    "Passes",
    "RouterSteps",
    "StartedStep",
    "StepResult",
]
