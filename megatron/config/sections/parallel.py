"""Parallel layouts: the division of the work over ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from megatron.config.flag import Exclude, Need, excludes, flag
from megatron.layout import Layout
from megatron.pipeline_schedules import SCHEDULES
from megatron.utils.numerals import LARGEST_WORLD

_SEVERAL_TENSOR_RANKS = Need("several tensor-parallel ranks", lambda run: run.parallel.tensor_model_parallel_size > 1)
_CONTEXT_RANKS = Need("--context-parallel-size above 1", lambda run: run.parallel.context_parallel_size > 1)
_STAGES = Need(
    "several stages (--pipeline-model-parallel-size)", lambda run: run.parallel.pipeline_model_parallel_size > 1
)
_VIRTUAL_STAGES = Need(
    "virtual stages (--num-layers-per-virtual-pipeline-stage)", lambda run: run.parallel.has_virtual_stages
)
_EXPERTS = Need("--num-experts", lambda run: run.moe.is_on)
_BF16 = Need("--bf16", lambda run: run.precision.bf16)
_BUCKETS = Need("stage 0 or 1 of ZeRO (--zero-stage)", lambda run: run.parallel.zero < 2)
_ZERO_1 = Need("--zero-stage 1 (--use-distributed-optimizer)", lambda run: run.parallel.zero == 1)
_ZERO_3 = Need("stage 3 of ZeRO (--zero-stage 3)", lambda run: run.parallel.zero == 3)
_FSDP2 = Need("--use-torch-fsdp2", lambda run: run.parallel.use_torch_fsdp2)
_FP32_GRADIENTS = "gradients are accumulated and reduced in fp32, unless --grad-reduce-in-bf16 is given"
_STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_ON_HOST = Need("--remote-device cpu", lambda run: run.parallel.parameters_on_host)
_DEFERS = Need(
    f"--pipeline-schedule {' or '.join(name for name, schedule in SCHEDULES.items() if schedule.defers_wgrads)}",
    lambda run: SCHEDULES[run.parallel.schedule].defers_wgrads,
)


def _gathering(asking: str) -> Iterator[Exclude]:
    """Yields the exclusions that the setting `asking` needs if it selects ZeRO stage 2 or 3."""
    for other, why in (
        (_DEFERS, "the schedule computes weight gradients after the layer's gradients were reduced"),
        ("cuda_graphs", "a graph needs weights at fixed addresses, and gathered weights have none"),
        ("compile", "the combination is untested"),
        ("store_param_remainders", "the sharded weights are the fp32 masters themselves"),
        (
            "optimizer_offload_fraction",
            "with sharded weights, either all or none of the optimizer's state is offloaded",
        ),
    ):
        yield Exclude(other=other, why=why, own=lambda run: run.parallel.zero_asked.get(asking, 0) >= 2)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = flag(
        1,
        "Number of ranks that split each layer.",
        aliases=("--model-parallel-size",),
        at_least=1,
        at_most=LARGEST_WORLD,
    )
    pipeline_model_parallel_size: int = flag(1, "Number of pipeline stages.", at_least=1, at_most=LARGEST_WORLD)
    pipeline_schedule: str | None = flag(
        None,
        "Order of the forward and backward passes. Unset: 1f1b, or interleaved with virtual stages.",
        choices=tuple(SCHEDULES),
        needs=(_STAGES,),
        insists=True,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Layers per virtual stage. Each rank gets several stages and runs the interleaved schedule.", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Virtual stages per rank, instead of layers per virtual stage. 1: no virtual stages.", at_least=1
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Micro-batches that a virtual stage runs before the next one begins (interleaved schedule); the last group may "
        "be smaller. Unset: --pipeline-model-parallel-size, which is also the minimum.",
        at_least=1,
        needs=(_VIRTUAL_STAGES,),
    )
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "Count the embedding as a layer when dividing the layers over the stages."
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "Count the output layer and the loss as a layer when dividing the layers over the stages."
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "Number of layers of the first stage.", at_least=1, needs=(_STAGES,), insists=True
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "Number of layers of the last stage.", at_least=1, needs=(_STAGES,), insists=True
    )
    pipeline_trace: str | None = flag(
        None,
        "Directory for the start and end times of each rank's last passes, drawn by tools/draw_pipeline.py.",
        needs=(_STAGES,),
        insists=True,
        path=True,
    )
    sequence_parallel: bool = flag(
        False,
        "Split norms and dropout along the sequence over the tensor-parallel ranks.",
        needs=(_SEVERAL_TENSOR_RANKS,),
    )
    context_parallel_size: int = flag(1, "Number of ranks that split each sequence.", at_least=1, at_most=LARGEST_WORLD)
    cp_comm_type: tuple[str, ...] = flag(
        ("p2p",),
        "Method of context-parallel attention. p2p, a2a+p2p: ring attention; a2a: each rank computes some of the "
        "heads; allgather: each rank gathers all keys and values.",
        nargs="+",
        choices=("p2p", "a2a", "allgather", "all_gather", "a2a+p2p"),
        needs=(_CONTEXT_RANKS,),
    )
    expert_model_parallel_size: int = flag(
        1, "Number of ranks that divide the experts.", at_least=1, at_most=LARGEST_WORLD
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "Number of ranks that each expert is split over.",
        at_least=1,
        status="no-op",
        note="experts are split over the tensor-parallel ranks, as all layers are",
        needs=(_EXPERTS,),
    )
    check_replicas_every: int | None = flag(
        None,
        "Steps between bitwise comparisons of replicated parameters and optimizer state. A difference stops the run; "
        "the error names the parameter and the ranks.",
        at_least=1,
    )
    zero_stage: int | None = flag(
        None,
        "Stage of ZeRO: state sharded over the data-parallel ranks. 1: optimizer state (masters, moments); 2: "
        "gradients too; 3: parameters too. Unset: 0, unless another flag sets a stage.",
        choices=(0, 1, 2, 3),
        excludes=(*_gathering("zero_stage"),),
    )
    use_distributed_optimizer: bool = flag(
        False, "Shard the optimizer's state over the data-parallel ranks, as --zero-stage 1."
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        "Number of equal groups of neighbouring data-parallel ranks. ZeRO shards within each group, and gradients are "
        "also summed between groups (HSDP).",
        at_least=1,
        at_most=LARGEST_WORLD,
        excludes=excludes(_ON_HOST, why="gradients in host memory are not summed between instances"),
    )
    overlap_grad_reduce: bool = flag(
        False,
        "Reduce gradients during the backward pass. Always on where the device is asynchronous, unless --cuda-graphs "
        "or --no-overlap-grad-reduce is given.",
        needs=(_BUCKETS,),
    )
    no_overlap_grad_reduce: bool = flag(
        False,
        "Reduce gradients after the last backward pass of a step, on a GPU too.",
        needs=(_BUCKETS,),
        excludes=excludes("overlap_grad_reduce"),
    )
    grad_reduce_in_bf16: bool = flag(
        False,
        "Accumulate and reduce the gradients of bf16 parameters in bf16. This halves memory and traffic, but keeps "
        "only three digits.",
        needs=(_BF16, _BUCKETS),
        insists=True,
        excludes=excludes(
            "ddp_reduce_scatter_with_fp32_accumulation",
            "ddp_param_name_patterns_for_fp32_local_accumulation",
            why="the former accumulates and reduces all gradients in bf16, the latter asks for fp32",
        ),
    )
    ddp_reduce_scatter_with_fp32_accumulation: bool = flag(
        False, "Sum reduced gradients in fp32.", status="no-op", note=_FP32_GRADIENTS
    )
    ddp_param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] | None = flag(
        None, "Parameters whose gradients are accumulated in fp32.", nargs="+", status="no-op", note=_FP32_GRADIENTS
    )
    ddp_bucket_size: int | None = flag(
        None,
        "Number of gradients per bucket. Unset: 40 million, or a million per data-parallel rank if that is more.",
        at_least=1,
        needs=(_BUCKETS,),
    )
    overlap_param_gather: bool = flag(
        False, "Gather the updated weights during the next forward pass.", needs=(_ZERO_1,)
    )
    use_torch_fsdp2: bool = flag(
        False,
        "Shard parameters, gradients and optimizer state over the data-parallel ranks, as --zero-stage 3.",
        excludes=(*_gathering("use_torch_fsdp2"),),
    )
    torch_fsdp2_reshard_after_forward: bool = flag(
        True,
        "Keep weights gathered until they are updated, as --zero-stage 2.",
        off="--torch-fsdp2-no-reshard-after-forward",
        needs=(_FSDP2,),
    )
    data_parallel_sharding_strategy: str | None = flag(
        None,
        "Megatron's names for --zero-stage 0 to 3.",
        choices=tuple(_STRATEGIES),
        excludes=(*_gathering("data_parallel_sharding_strategy"),),
    )
    remote_device: str = flag(
        "none",
        "Place of each rank's parameter shard between passes, with --zero-stage 3. cpu: host memory, also for "
        "gradients, masters and moments; the CPU then computes the update.",
        choices=("none", "cpu", "nvme"),
        needs=(_ZERO_3,),
    )
    overlap_p2p_communication: bool = flag(
        True, "Do not overlap pipeline communication.", off="--no-overlap-p2p-communication", status="no-op",
        note="pipeline communication always overlaps where it can, which changes no result",
    )  # fmt: skip
    tp_comm_overlap: bool = flag(
        False,
        "Overlap tensor-parallel communication.",
        status="no-op",
        note="tensor-parallel communication always overlaps with the products of the backward pass",
    )

    @property
    def zero_asked(self) -> Mapping[str, int]:
        """Setting -> the ZeRO stage that it selects. Settings that select no stage are omitted."""
        asked = {
            "zero_stage": self.zero_stage,
            "use_distributed_optimizer": 1 if self.use_distributed_optimizer else None,
            "use_torch_fsdp2": (3 if self.torch_fsdp2_reshard_after_forward else 2) if self.use_torch_fsdp2 else None,
            "data_parallel_sharding_strategy": _STRATEGIES.get(self.data_parallel_sharding_strategy or ""),
        }
        return {name: stage for name, stage in asked.items() if stage is not None}

    @property
    def zero(self) -> int:
        return max(self.zero_asked.values(), default=0)

    @property
    def parameters_on_host(self) -> bool:
        """True if ranks on an accelerator keep their parameter shards in host memory."""
        return self.zero == 3 and self.remote_device == "cpu"

    @property
    def splits_sequence(self) -> bool:
        """True if --sequence-parallel is given and has an effect."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks per model replica. Expert parallelism adds none: it reuses data-parallel ranks."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def fewest_ranks(self) -> int:
        """The smallest world size of this layout. The context- and data-parallel ranks must be divisible by the size of
        expert parallelism times the number of optimizer instances."""
        model, cp = self.model_parallel_size, self.context_parallel_size
        return lcm(model, model // cp * self.expert_model_parallel_size * self.num_distributed_optimizer_instances)

    def layout(self, world_size: int) -> Layout:
        """Returns the layout of `world_size` ranks. Raises a ConfigError if the sizes do not fit."""
        return Layout(
            world_size,
            tp=self.tensor_model_parallel_size,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            instances=self.num_distributed_optimizer_instances,
        )

    @property
    def cp_attention(self) -> str:
        """The value of --cp-comm-type, with its synonyms resolved."""
        return {"all_gather": "allgather", "a2a+p2p": "p2p"}.get(self.cp_comm_type[0], self.cp_comm_type[0])

    @property
    def schedule(self) -> str:
        """The pipeline schedule that is used."""
        return self.pipeline_schedule or ("interleaved" if self.has_virtual_stages else "1f1b")

    @property
    def micro_batch_group(self) -> int | None:
        """Micro-batches per group of the interleaved schedule; None for other schedules."""
        given = self.microbatch_group_size_per_virtual_pipeline_stage or self.pipeline_model_parallel_size
        return given if SCHEDULES[self.schedule].interleaves else None

    @property
    def has_virtual_stages(self) -> bool:
        return bool(self.num_layers_per_virtual_pipeline_stage) or (self.num_virtual_stages_per_pipeline_rank or 1) > 1
