"""Model, gradients and optimizer behind one training step."""

from megatron.engine.engine import (
    Batch,
    Engine,
    Evaluation,
    EvaluationResult,
    ForwardStep,
    Passes,
    SinglePass,
    StartedStep,
    StepResult,
)
from megatron.engine.graphs import GraphedPasses
from megatron.engine.routers import RouterSteps

__all__ = [
    "Batch",
    "Engine",
    "Evaluation",
    "EvaluationResult",
    "ForwardStep",
    "GraphedPasses",
    "Passes",
    "RouterSteps",
    "SinglePass",
    "StartedStep",
    "StepResult",
]
