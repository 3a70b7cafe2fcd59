"""How the work is divided over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from megatron.config.flag import Need, flag
from megatron.layout import Layout

_SEVERAL_TENSOR_RANKS = Need("several tensor-parallel ranks", lambda run: run.parallel.tensor_model_parallel_size > 1)
_CONTEXT_RANKS = Need("--context-parallel-size", lambda run: run.parallel.context_parallel_size > 1)
_STAGES = Need(
    "several stages (--pipeline-model-parallel-size)", lambda run: run.parallel.pipeline_model_parallel_size > 1
)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = flag(
        1,
        "Ranks that share each layer.",
        aliases=("--model-parallel-size",),
        at_least=1,
    )
    pipeline_model_parallel_size: int = flag(1, "Pipeline stages.", at_least=1)
    pipeline_schedule: str | None = flag(
        None,
        "Order of the forward and backward passes. Unset: 1f1b, or interleaved with virtual stages.",
        choices=("gpipe", "1f1b", "interleaved", "zero-bubble"),
        needs=(_STAGES,),
        insists=True,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers per virtual stage: each rank has several, and the interleaved schedule.", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Virtual stages of each rank, instead of their number of layers; 1 is none.", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "Count the embedding as a layer when the layers are divided over the stages."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "Count the output layer and the loss as a layer when the layers are divided over the stages."
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Layers of the first stage.", at_least=1, needs=(_STAGES,), insists=True
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Layers of the last stage.", at_least=1, needs=(_STAGES,), insists=True
    )
    pipeline_trace: str | None = flag(
        None,
        "Directory where each rank records when the passes of its last steps ran, for tools/draw_pipeline.py.",
        needs=(_STAGES,),
        insists=True,
        path=True,
    )
    sequence_parallel: bool = flag(
        False,
        "Split norms and dropout over the tensor-parallel ranks, if there are several.",
        needs=(_SEVERAL_TENSOR_RANKS,),
    )
    context_parallel_size: int = flag(1, "Ranks that share each sequence.", at_least=1)
    cp_comm_type: tuple[str, ...] = flag(
        ("p2p",),
        "How context-parallel ranks share attention: p2p (ring attention), a2a (all-to-all: each rank attends with "
        "some of the heads), allgather (each rank gathers all keys and values).",
        nargs="+",
        choices=("p2p", "a2a", "allgather", "all_gather"),
        refused={"a2a+p2p": "the two are not combined here; use a2a where the heads divide, else p2p"},
        needs=(_CONTEXT_RANKS,),
    )
    expert_model_parallel_size: int = flag(1, "Ranks that share the experts.", at_least=1)
    expert_tensor_parallel_size: int | None = flag(
        None,
        "Ranks that each expert is split over.",
        at_least=1,
        status="no-op",
        note="experts are split over the tensor-parallel ranks, as all layers are",
    )
    check_replicas_every: int | None = flag(
        None,
        "Steps between bitwise comparisons of replicated parameters and optimizer state; a difference stops the run "
        "and names the parameter and the ranks.",
        at_least=1,
    )
    use_distributed_optimizer: bool = flag(
        False, "Shard optimizer state over the data-parallel ranks (ZeRO-1).", status="later", note="remove it"
    )
    overlap_grad_reduce: bool = flag(False, "Reduce gradients during the backward pass.")
    overlap_param_gather: bool = flag(
        False, "Gather parameters while the forward pass runs.", status="later", note="remove it"
    )
    use_torch_fsdp2: bool = flag(False, "Shard with torch's fully_shard.", status="later", note="remove it")
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "What is sharded over the data-parallel ranks.",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        status="later",
        note="use no_shard",
    )
    overlap_p2p_communication: bool = flag(
        True, "Do not overlap pipeline communication.", off="--no-overlap-p2p-communication", status="no-op",
        note="it always overlaps where it can, which changes no result",
    )  # fmt: skip
    tp_comm_overlap: bool = flag(
        False,
        "Overlap tensor-parallel communication.",
        status="no-op",
        note="it always overlaps with the products of the backward pass",
    )
    optimizer_cpu_offload: bool = flag(False, "Keep optimizer state in host memory.", status="later", note="remove it")
    optimizer_offload_fraction: float = flag(
        1.0, "Share of the optimizer state to offload.", status="later", note="leave it out"
    )

    @property
    def splits_sequence(self) -> bool:
        """--sequence-parallel where it has an effect."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def model_parallel_size(self) -> int:
        """Ranks that together hold and compute one replica; expert parallelism takes none of its own."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def fewest_ranks(self) -> int:
        """The smallest world size of this layout. Expert parallelism divides the context- and data-parallel ranks."""
        model, cp = self.model_parallel_size, self.context_parallel_size
        return lcm(model, model // cp * self.expert_model_parallel_size)

    def layout(self, world_size: int) -> Layout:
        """Which rank belongs to which group; sizes that do not fit are refused."""
        return Layout(
            world_size,
            tp=self.tensor_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
        )

    @property
    def cp_attention(self) -> str:
        """The one value of --cp-comm-type, in our spelling."""
        return self.cp_comm_type[0].replace("all_gather", "allgather")

    @property
    def schedule(self) -> str:
        """The pipeline schedule in force."""
        return self.pipeline_schedule or ("interleaved" if self.has_virtual_stages else "1f1b")

    @property
    def has_virtual_stages(self) -> bool:
        return bool(self.num_layers_per_virtual_pipeline_stage) or (self.num_virtual_stages_per_pipeline_rank or 1) > 1
