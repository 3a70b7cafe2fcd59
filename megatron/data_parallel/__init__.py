"""Data parallelism: stores of weights and gradients for replicas of a model. Works with any nn.Module."""

from megatron.data_parallel.broadcast import broadcast_parameters
from megatron.data_parallel.bucket_store import BucketStore, bucket_size
from megatron.data_parallel.fully_sharded import FullySharded
from megatron.data_parallel.sharding_units import Unit
from megatron.data_parallel.training_store import TrainingStore
