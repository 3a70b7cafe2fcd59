"""Compares steps of a model in parallel layouts and in one process, and measures pipeline bubbles.

    python benchmarks/parallel.py                  # two ranks of one thread each, and one process of two threads
    python benchmarks/parallel.py --only bubbles --bubble-steps 14
    python benchmarks/parallel.py --hidden 512 --heads 8 --seq 256 --vocab 8192 --rounds 3 --steps 5 --json result.json

Every contender is a whole run of pretrain_gpt.py, and the one process has as many threads as the ranks together. The
result is the median of its steps after the first. Contenders take turns, and a ratio is the median over rounds of times
within one round.

The bubble is idle time over working time of both ranks, from the start of the first pass to the end of the last. It
comes from the run's own times (--pipeline-trace), as the median of the steps after the first two. The stages cost the
same, because a vocabulary of 64 makes embedding and head negligible. Two numbers stand next to it: the theoretical
(p - 1) / (m v), and the bubble of the same passes if messages took no time. The difference to the latter is the cost of
messages; the rest comes from the unevenness of the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.report.pipeline_timeline import read_timelines, without_transfers

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
    Contender("DP2, ZeRO-1", 2, ("--zero-stage", "1")),
    Contender("DP2, overlapped", 2, ("--overlap-grad-reduce",)),
    Contender("DP2, ZeRO-1, overlapped", 2, ("--zero-stage", "1", "--overlap-grad-reduce", "--overlap-param-gather")),
    Contender("CP2", 2, ("--context-parallel-size", "2")),
)


def run(contender: Contender, shape: argparse.Namespace, folder: Path, *, trace: bool = False) -> float:
    """Runs a contender. Returns the median seconds per step from its metrics file."""
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
        raise SystemExit(f"{contender.name}: {done.stderr[-6000:]}")
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
            seconds = run(contender, shape, folder)
            times[contender.name].append(seconds)
            say(f"round {round_number + 1} of {shape.rounds}: {contender.name}, {1e3 * seconds:.0f} ms/step")
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
    equal = {"vocab": 64, "hidden": shape.bubble_hidden, "seq": shape.bubble_seq, "steps": shape.bubble_steps}
    equal |= {"heads": shape.bubble_hidden // 64, "micro_batch": 1, "batch": 8}
    one_thread_each = argparse.Namespace(**{**vars(shape), **equal})
    schedules = (
        Contender("1f1b", 2, (PP, "2")),
        Contender("gpipe", 2, (PP, "2", "--pipeline-schedule", "gpipe")),
        Contender("interleaved, 2 chunks", 2, (PP, "2", VIRTUAL, str(max(1, shape.layers // 4)))),
        Contender("zero-bubble", 2, (PP, "2", "--pipeline-schedule", "zero-bubble")),
    )
    rows: list[dict[str, object]] = []
    for contender in schedules:
        run(contender, one_thread_each, folder, trace=True)
        steps = read_timelines(folder / "trace")[2:]
        found = statistics.median(step.bubble for step in steps)
        theory = (steps[0].ranks - 1) / (steps[0].micro_batches * steps[0].chunks)
        prompt = statistics.median(without_transfers(step).bubble for step in steps)
        rows.append({"schedule": contender.name, "bubble": found, "theory": theory, "ratio": found / theory,
                     "without_delays": prompt, "of_that": found / prompt})  # fmt: skip
        say(f"bubble of {contender.name}: {found:.4f}, theory {theory:.4f}, without delays {prompt:.4f}")
    return rows


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def table(rows: list[dict[str, object]], headings: tuple[str, ...]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for row in rows:
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 8, "hidden": 256, "heads": 4, "seq": 128, "vocab": 2048, "micro-batch": 2, "batch": 16}
    sizes |= {"steps": 4, "rounds": 2, "bubble-hidden": 1024, "bubble-seq": 256, "bubble-steps": 10}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"({value})")
    parser.add_argument("--only", choices=("layouts", "bubbles"), help="measure only one of the two")
    parser.add_argument("--json", metavar="FILE", help="file for the results")
    shape = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layouts = measure_layouts(shape, Path(folder)) if shape.only != "bubbles" else []
        bubbles = measure_bubbles(shape, Path(folder)) if shape.only != "layouts" else []
    if layouts:
        print(table(layouts, ("layout", "ms/step", "of one process")), end="\n\n")
    if bubbles:
        print(table(bubbles, ("schedule, PP2", "bubble", "(p-1)/(m v)", "ratio", "without delays", "ratio")))
    if shape.json:
        content = {"shape": vars(shape), "layouts": layouts, "bubbles": bubbles}
        Path(shape.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
