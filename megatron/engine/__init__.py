"""Runs one training step over a model, its gradients and its optimizer."""

from megatron.engine.assembly import build_engine
from megatron.engine.engine import Engine, StepResult
from megatron.engine.evaluation import Evaluation, EvaluationResult
from megatron.engine.graphs import GraphedPasses
from megatron.engine.routers import RouterSteps
from megatron.model.passes import Batch, ForwardStep
