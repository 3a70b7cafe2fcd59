"""Model, gradients and optimizer behind one training step."""

from megatron.engine.engine import Batch, Engine, Evaluation, EvaluationResult, ForwardStep, Passes, StepResult

__all__ = ["Batch", "Engine", "Evaluation", "EvaluationResult", "ForwardStep", "Passes", "StepResult"]
