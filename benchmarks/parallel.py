"""Steps of the same model in parallel layouts and in one process with as many threads, and a pipeline's bubble.

    python benchmarks/parallel.py                  # two ranks of one thread each against one process of two
    python benchmarks/parallel.py --rounds 5 --json result.json

Every contender is a whole run of pretrain_gpt.py as a user starts it; the median of its steps after the first counts.
The contenders take turns, and a ratio is the median over rounds of times taken within the same round. The bubble is
that of the last step's own times (--pipeline-trace), with stages of equal cost, beside (p - 1) / (m v) of the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.pipeline_parallel.simulate import bubble, theoretical_bubble
from megatron.pipeline_parallel.trace import read_trace

ROOT = Path(__file__).resolve().parent.parent
PP, VIRTUAL = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"


@dataclass(frozen=True)
class Contender:
    name: str
    ranks: int
    flags: tuple[str, ...] = ()


LAYOUTS = (
    Contender("one process, 2 threads", 1),
    Contender("TP2", 2, ("--tensor-model-parallel-size", "2")),
    Contender("TP2, sequence parallel", 2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    Contender("PP2, 1f1b", 2, (PP, "2")),
    Contender("PP2, zero-bubble", 2, (PP, "2", "--pipeline-schedule", "zero-bubble")),
    Contender("DP2", 2),
    Contender("CP2", 2, ("--context-parallel-size", "2")),
)


def run(contender: Contender, shape: argparse.Namespace, folder: Path, *, trace: bool = False) -> float:
    """Median seconds of a step, from the run's own metrics file."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    launcher = [sys.executable]
    if contender.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(contender.ranks)]
    command = [*launcher, str(ROOT / "pretrain_gpt.py"), *model_flags(shape), *contender.flags]
    command += ["--metrics-jsonl", str(metrics)]
    if trace:
        command += ["--pipeline-trace", str(folder / "trace")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contender.name}: {done.stderr[-2000:]}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [record["seconds_per_iteration"] for record in records if record["split"] == "train"]
    return statistics.median(seconds[1:])


def model_flags(shape: argparse.Namespace) -> list[str]:
    return [
        *("--num-layers", str(shape.layers), "--hidden-size", str(shape.hidden)),
        *("--num-attention-heads", str(shape.heads), "--seq-length", str(shape.seq)),
        *("--max-position-embeddings", str(shape.seq), "--vocab-size", str(shape.vocab), "--mock-data"),
        *("--micro-batch-size", str(shape.micro_batch), "--global-batch-size", str(shape.batch)),
        *("--train-iters", str(shape.steps), "--lr", "1e-4", "--log-interval", "1", "--eval-iters", "0"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--num-workers", "0", "--device", "cpu"),
    ]


def measure_layouts(shape: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    times: dict[str, list[float]] = {contender.name: [] for contender in LAYOUTS}
    for round_number in range(shape.rounds):
        for contender in LAYOUTS:
            times[contender.name].append(run(contender, shape, folder))
        print(f"round {round_number + 1} of {shape.rounds}", file=sys.stderr, flush=True)
    alone = times[LAYOUTS[0].name]
    return [
        {
            "layout": name,
            "ms_per_step": 1e3 * statistics.median(found),
            "of_one_process": statistics.median(mine / one for mine, one in zip(found, alone, strict=True)),
        }
        for name, found in times.items()
    ]


def measure_bubbles(shape: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Stages of equal cost: a vocabulary so small that embedding and head weigh nothing."""
    equal = argparse.Namespace(**{**vars(shape), "vocab": 64})
    virtual = max(1, shape.layers // 4)
    schedules = (
        (Contender("1f1b", 2, (PP, "2")), 1),
        (Contender("gpipe", 2, (PP, "2", "--pipeline-schedule", "gpipe")), 1),
        (Contender("interleaved, 2 chunks", 2, (PP, "2", VIRTUAL, str(virtual))), 2),
        (Contender("zero-bubble", 2, (PP, "2", "--pipeline-schedule", "zero-bubble")), 1),
    )
    rows: list[dict[str, object]] = []
    for contender, chunks in schedules:
        found = []
        for _ in range(shape.rounds):
            run(contender, equal, folder, trace=True)
            found.append(bubble(read_trace(folder / "trace").spans, 2))
        theory = theoretical_bubble(2, shape.batch // shape.micro_batch, chunks)
        rows.append({"schedule": contender.name, "bubble": statistics.median(found), "theory": theory})
    return rows


def table(rows: list[dict[str, object]], headings: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for row in rows:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("hidden", 512), ("heads", 8), ("seq", 256), ("vocab", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    shape = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layouts = measure_layouts(shape, Path(folder))
        bubbles = measure_bubbles(shape, Path(folder))
    print(table(layouts, ("layout", "ms/step", "of one process")))
    print()
    print(table(bubbles, ("schedule, PP2", "bubble", "(p-1)/(m v)")))
    if shape.json:
        content = {"shape": vars(shape), "layouts": layouts, "bubbles": bubbles}
        Path(shape.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
