"""Measures a rank's memory at each stage of ZeRO, against our formula and torch's fully_shard.

    python benchmarks/memory.py                             # stages 0 to 3 on 2, 4 and 8 ranks
    python benchmarks/memory.py --ranks 2 --stages 2 3 --layers 4 --hidden 256 --json result.json

Every case trains two steps of a GPT on gloo ranks of this machine. The first table counts the bytes of tensors. Between
two steps these are parameters, gradients and optimizer state. At the end of a forward pass they are gathered weights,
and activations without the logits, next to the formula.

The second table has the growth of the process (RSS) since before the model was made. It is read after the build, and
after forward, backward and update of the second step, next to the formula's sum of the state between steps.

For RSS, freed blocks of 1 MiB and more return to the system at once. Glibc's own threshold would grow with freed sizes,
and gathered weights would leave holes of twice the memory in use. After the update, smaller free blocks return too.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # fully_shard imports it at first use: 100 MB per process
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config import RunConfig, parse_args
from megatron.distributed.launch import LaunchInfo
from megatron.engine import Engine
from megatron.model import GPT, initialise
from megatron.model.passes import Batch
from megatron.ops import resolve
from megatron.prove.check_layout.check import load_script
from megatron.prove.check_layout.ranks import run_ranks
from megatron.training.activation_bytes import activation_bytes
from megatron.training.assemble import Parts, assemble
from megatron.training.initialize import build_run
from megatron.training.state_bytes import StateBytes, state_bytes
from megatron.utils.cpu import set_allocator
from megatron.utils.log import RankLog
from megatron.utils.process import resident_bytes

ALONE = "fully_shard alone"


@dataclass(frozen=True)
class Measured:
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Weights that a pass needs besides the stored ones, counted like activations at the end of a forward pass."""
    activations: int
    resident: dict[str, int]
    """Growth of RSS since before the model, at each moment of the second step."""


MOMENTS = ("build", "forward", "backward", "step")
"""Moments after which RSS is read. Before the build it counts as 0."""


class Watch:
    """Counts tensors' bytes after every forward pass, and reads RSS at each moment of a step. Keeps the last step's."""

    def __init__(self) -> None:
        self.gathered = self.activations = 0
        self.resident: dict[str, int] = {}
        self._before = resident_bytes()

    def moment(self, name: str) -> None:
        if name == "step":
            gc.collect()
            give_free_memory_back()
        self.resident[name] = resident_bytes() - self._before

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        kept: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        weights = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
        shared = {storage(weight) for weight in weights}
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            self.gathered = storage_bytes(weights)
        self.activations = storage_bytes(tensor for tensor in kept if storage(tensor) not in shared)
        self.moment("forward")


def give_free_memory_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors if tensor is not None]
    return sum({storage(tensor): tensor.untyped_storage().nbytes() for tensor in local}.values())


def make_parts(config: RunConfig, rank: int, ranks: int, watch: Watch) -> Parts:
    script = load_script(None)

    def forward_step(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        with watch.forward(model):
            result: tuple[Tensor, Tensor] = script.forward_step(model, batch)
        return result

    launch = LaunchInfo(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks)
    run = build_run(config, launch, device=torch.device("cpu"), log=RankLog(rank, io.StringIO()), needs_data=False)
    return assemble(run, script.datasets_provider, script.model_provider, forward_step)


def measure_ours(config: RunConfig, rank: int, ranks: int) -> Measured:
    watch = Watch()
    with make_parts(config, rank, ranks, watch) as parts:
        watch.moment("build")
        engine = parts.trainer.engine
        optimizer = engine.optimizer
        start_step = optimizer.start_step

        def watched(*arguments: Any, **named: Any) -> Tensor:
            watch.moment("backward")
            return start_step(*arguments, **named)

        optimizer.start_step = watched  # type: ignore[method-assign]
        parts.trainer.fit()
        watch.moment("step")
        with torch.no_grad():
            state = [tensor for kinds in engine.optimizer.state().values() for tensor in kinds.values()]
            weights = weights_of(engine)
            masters = {storage(weight) for weight in weights}
            return Measured(
                storage_bytes(weights),
                storage_bytes(grad for _, grad in engine.store.grads()),
                storage_bytes(tensor for tensor in state if storage(tensor) not in masters),
                watch.gathered,
                watch.activations,
                watch.resident,
            )


def weights_of(engine: Engine) -> list[Tensor]:
    if engine.divided is None:
        return list(engine.model.parameters())
    return [engine.divided.weight(name) for name in engine.divided.all_names]


def measure_alone(config: RunConfig, rank: int, ranks: int) -> Measured:
    """Measures one rank of the same model with torch's fully_shard and torch's optimizer."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    watch = Watch()
    vocabulary, micro, seq = config.tokenizer.vocab_size, config.training.micro_batch_size, config.data.seq_length
    assert vocabulary is not None and micro is not None
    model = GPT(config.model, vocab_size=vocabulary, kernels=resolve("ref", "cpu"))
    initialise(model, 1)
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch.moment("build")
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.randint(vocabulary, (micro, seq))
        with watch.forward(model):
            loss = model(tokens, labels=tokens).mean()
        loss.backward()
        watch.moment("backward")
        optimizer.step()
    watch.moment("step")
    state = [tensor for kinds in optimizer.state.values() for tensor in kinds.values() if tensor.dim()]
    gradients = storage_bytes(parameter.grad for parameter in model.parameters())
    kept = storage_bytes(model.parameters()), gradients, storage_bytes(state)
    return Measured(*kept, watch.gathered, watch.activations, watch.resident)


Measure = Callable[[RunConfig, int, int], Measured]


def measure(ranks: int, config: RunConfig, how: Measure) -> Measured:
    """Measures all ranks. Returns the result of the rank that stores the most parameters, gradients and state."""

    def body(rank: int) -> bytes:
        set_allocator("system")
        return json.dumps(asdict(how(config, rank, ranks))).encode()

    results = [Measured(**json.loads(result)) for result in run_ranks(ranks, body, timedelta(minutes=10))]
    return max(results, key=lambda one: one.parameters + one.gradients + one.optimizer)


def config_of(shape: argparse.Namespace, ranks: int, stage: int) -> RunConfig:
    words = f"""
        --num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads}
        --seq-length {shape.seq}
        --max-position-embeddings {shape.seq} --vocab-size {shape.vocab} --make-vocab-size-divisible-by 1
        --micro-batch-size {shape.micro} --global-batch-size {ranks * shape.micro} --train-iters 2
        --lr 1e-4 --mock-data --num-workers 0
        --eval-iters 0 --device cpu --kernels {shape.kernels} --zero-stage {stage} {"--bf16" if shape.bf16 else ""}
        --hidden-dropout 0 --attention-dropout 0"""
    return parse_args(words.split())


def parameters_of(config: RunConfig) -> int:
    with torch.device("meta"):
        model = GPT(config.model, vocab_size=config.tokenizer.vocab_size or 0, kernels=resolve("ref", "cpu"))
    return sum(parameter.numel() for parameter in model.parameters())


def layer_bytes(config: RunConfig) -> float:
    """Bytes that layers keep for the backward pass, by the formula."""
    kernels, micro = resolve(config.kernels.kernels, "cpu"), config.training.micro_batch_size or 1
    found = activation_bytes(config, 0, micro_batch=micro, micro_batches=1, vocabulary=0, backend=kernels.backend)
    return found.layers


MOST_OFF, CONSTANT = 0.05, 50_000_000
"""Largest difference of RSS after a step from the formula's sum: this share of it, plus these bytes. The bytes cover
code that a first step loads, threads, buffers of gloo and of products, and the batch."""


def off(measured: Measured, formula: StateBytes) -> float:
    """Returns the largest relative difference between stored bytes and the formula, over the kinds of tensors."""
    kinds = ("parameters", "gradients", "optimizer")
    return max(abs(getattr(measured, kind) / getattr(formula, kind) - 1) for kind in kinds)


def compare(shape: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for ranks in shape.ranks:
        for stage in shape.stages:
            config = config_of(shape, ranks, stage)
            formula = state_bytes(config, parameters_of(config), ranks)
            ours = measure(ranks, config, measure_ours)
            predicted = layer_bytes(config)
            found = {"off": off(ours, formula), "formula": formula.total, "predicted": predicted}
            rows.append({"ranks": ranks, "case": f"stage {stage}", **asdict(ours), **found})
        if not shape.bf16:
            alone = measure(ranks, config_of(shape, ranks, 0), measure_alone)
            rows.append({"ranks": ranks, "case": ALONE, **asdict(alone), "off": None, "formula": None})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    kinds = ("parameters", "gradients", "optimizer", "gathered", "activations")
    print(f"{'ranks':>5}  {'':18}" + "".join(f"{kind:>13}" for kind in kinds) + "   off the formula   (MB)")
    for row in rows:
        numbers = "".join(f"{row[kind] / 1e6:13.2f}" for kind in kinds)
        print(
            f"{row['ranks']:>5}  {row['case']:18}{numbers}   {'' if row['off'] is None else format(row['off'], '.2%')}"
        )
    print(f"\n{'ranks':>5}  {'RSS after':18}" + "".join(f"{name:>13}" for name in (*MOMENTS, "formula")) + "   (MB)")
    for row in rows:
        numbers = "".join(f"{row['resident'][name] / 1e6:13.1f}" for name in MOMENTS)
        if row["formula"] is not None:
            kept, near = row["resident"]["step"], row["formula"]
            within = "" if abs(kept - near) <= MOST_OFF * near + CONSTANT else "   DIFFERS by more than the limit"
            numbers += f"{near / 1e6:13.1f}{within}"
        print(f"{row['ranks']:>5}  {row['case']:18}{numbers}")
    for row in (row for row in rows if row.get("predicted")):
        share = row["predicted"] / row["activations"]
        predicted = f"{row['predicted'] / 1e6:.2f} MB of activations predicted"
        print(f"{row['ranks']} ranks, {row['case']}: {predicted}, {share:.1%} of the measured ones")
    print("\nDeepSpeed: " + ("installed, not measured here" if find_spec("deepspeed") else "not installed, left out"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3], choices=(0, 1, 2, 3))
    for name, default in (
        ("layers", 4), ("hidden", 256), ("heads", 4), ("seq", 64), ("vocab", 4096), ("micro", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--kernels", default="ref", help="value of --kernels for the run and for the prediction")
    parser.add_argument("--json", type=Path)
    shape = parser.parse_args()
    rows = compare(shape)
    show(rows)
    if shape.json is not None:
        shape.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
