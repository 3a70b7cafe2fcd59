"""Text generation with a trained model."""

from megatron.inference.generate import Continuation, generate
from megatron.inference.load import LoadedModel, load_model
from megatron.inference.sampling import Sampling

__all__ = ["Continuation", "LoadedModel", "Sampling", "generate", "load_model"]
