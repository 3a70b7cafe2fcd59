"""Observable behaviour of a run: losses and weights in all digits, output, files, called modules."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import multiprocessing
import re
import shutil
import signal
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.checkpoint.run_state import RunHistory
from megatron.config import check_paths, check_world
from megatron.distributed.launch import LaunchInfo
from megatron.errors import MegatronError
from megatron.training import settings
from megatron.training.assemble import assemble
from megatron.training.hooks import Hook
from megatron.training.initialize import build_run
from megatron.training.metrics import EvalRecord, TrainRecord
from megatron.training.program import train_and_evaluate
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import pretrain_gpt, pretrain_here, same_numbers

OUT = Path("out")
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Look(Hook):
    """Records state during the run."""

    def __init__(self, seen: list[str]) -> None:
        self.seen, self.calls = seen, Counter[str]()
        self.collections = 0

    def on_start(self, run: Any, model: nn.Module) -> None:
        gc.callbacks.append(self._collected)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.calls.update([name]))

    def _collected(self, phase: str, _: object) -> None:
        self.collections += phase == "stop"

    def before_iteration(self, iteration: int) -> None:
        listens = [number.name for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_DFL]
        loaders = len(multiprocessing.active_children())
        self.seen.append(f"before {iteration}: gc {gc.isenabled()}, {listens}, {loaders} loaders")

    def after_iteration(self, iteration: int) -> None:
        if not gc.isenabled():  # else they come when they like
            self.seen.append(f"after {iteration}: {self.collections} collections")

    def on_step(self, record: TrainRecord, times: Any) -> None:
        self.seen.append(str(same_numbers(record.as_json())))

    def on_log(self, record: TrainRecord) -> None:
        self.seen.append(f"logged {record.iteration}")

    def on_evaluate(self, record: EvalRecord) -> None:
        self.seen.append(f"{record.split} {record.iteration}: {record.lm_loss!r} of {record.counted_tokens}")

    def on_end(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collected)
        self.seen.append(str(sorted(self.calls.items())))


def train(words: list[str]) -> list[str]:
    """Trains in this process; returns the output and files, or the rejection."""
    shutil.rmtree(OUT, ignore_errors=True)
    return [*_seen(words), *_written()]


def _seen(words: list[str], rank: int = 0, size: int = 1) -> list[str]:
    seen: list[str] = []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            _train(words, rank, size, seen)
        except MegatronError as error:
            seen += [f"refused: {line}" for line in error.lines]
    return [*seen, *map(_without_times, printed.getvalue().splitlines())]


def _train(words: list[str], rank: int, size: int, seen: list[str]) -> None:
    config, script, look = settings.read_settings(words), pretrain_gpt(), Look(seen)
    check_paths(config)
    check_world(config, size)
    launch = LaunchInfo(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
    run = build_run(config, launch, device=torch.device("cpu"))
    seen.append(f"tokenizer {run.tokenizer_fingerprint}")
    history = RunHistory(run.run_id)
    providers = (script.datasets_provider, script.model_provider, script.forward_step)
    with contextlib.closing(history), assemble(run, *providers, history, [look]) as parts:
        if parts.trainer_if_any is not None:
            seen.append(str([type(hook).__name__ for hook in parts.trainer.hooks]))
        reason = train_and_evaluate(run, parts)
        seen.append(f"{reason.kind} at {parts.progress}")
        for name, held in [*parts.engine.model.named_parameters(), *parts.engine.model.named_buffers()]:
            tensor = held.detach().to_local() if isinstance(held, DTensor) else held
            content = tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach()
            seen.append(f"{name} {list(tensor.shape)} {hashlib.md5(content.numpy().tobytes()).hexdigest()}")


def _without_times(line: str) -> str:
    if line.startswith("  ") and ("%" in line or " calls" in line):
        return ""  # a row of the profiler's table
    if re.match(r" ?(iteration|\[).*\d", line) or line.startswith(("    ", "(min, max)", "(max)", "times")):
        return re.sub(r"\d+", "#", line.partition("|")[0] if "|" in line else re.sub(r"[\d.]+", "#", line))
    return re.sub(r"[\d.]+ ?(s|ms|MB|MiB|GB|GiB|KB|KiB|B)\b", "#", line)


def _written() -> Iterator[str]:
    """Names of files, and contents that do not depend on time."""
    for path in sorted(OUT.rglob("*")):
        name = re.sub(r"\d{6,}", "#", str(path))
        if not path.is_file() or path.name in (".lock", "exit_reason.json"):
            continue
        if path.suffix == ".pt":
            content = torch.load(path, weights_only=True)
            name += f" {sorted(key for key, value in content.items() if value is not None)}"
        elif path.suffix == ".json" and "mp_rank" not in str(path) and path.name != "manifest.json":
            name += re.sub(r"[\d.e-]+", "#", path.read_text())[:2000]
        elif path.suffix in (".jsonl", ".txt"):
            name += str(len(path.read_text().splitlines()))
        elif path.name.endswith(".json.gz"):
            import gzip

            text = gzip.decompress(path.read_bytes()).decode()
            name += str([word for word in ("Input Dims", "python_function", "[memory]") if word in text])
        yield name


def on_ranks(words: list[str]) -> list[str]:
    """Trains on two gloo ranks; reads what they wrote when both have ended."""
    shutil.rmtree(OUT, ignore_errors=True)

    def body(rank: int) -> list[str]:
        torch.set_num_threads(1)
        return _seen(words, rank, 2)

    return [*(line for seen in run_ranks(2, body) for line in seen), *_written()]


def plan(words: list[str]) -> list[str]:
    """Runs --dry-run and records its effects on the process, a child, because some settings persist."""
    ours, theirs = multiprocessing.Pipe()

    def body() -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = pretrain_here([*words, *([] if "--print-config" in words else ["--dry-run"])])
        theirs.send([str(code), str(torch.are_deterministic_algorithms_enabled()), *printed.getvalue().splitlines()])

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    assert ours.poll(60), "the dry run did not end"
    said: list[str] = ours.recv()
    child.join()
    return [line for line in said if "has no effect without" not in line and "replaces" not in line]


class Writer:
    """Stand-in for TensorBoard's writer."""

    def __init__(self, **options: Any) -> None:
        print(f"tensorboard {options}")

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        del value
        print(f"tensorboard {tag} {step}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class WandbRun:
    def log(self, values: dict[str, Any], step: int) -> None:
        print(f"wandb {sorted(values)} {step}")

    def finish(self) -> None:
        print("wandb is left")


def wandb_module() -> types.ModuleType:
    def init(config: object, **options: Any) -> WandbRun:
        print(f"wandb {options}")
        return WandbRun()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Working folder of the runs: records what they write; nothing is sent over a network."""
    import torch.utils.tensorboard

    from megatron.data import source_datasets, sources

    map_tokens = sources.map_tokens

    def noted(path: Path, *rest: Any) -> Any:
        print(f"mapped {Path(path).name}")
        return map_tokens(path, *rest)

    folder, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(torch.utils.tensorboard, "SummaryWriter", Writer)
        patch.setattr(source_datasets, "_CACHED_FROM", 0)
        patch.setattr(sources, "map_tokens", noted)
        patch.setitem(sys.modules, "wandb", wandb_module())
        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()  # collections of --manual-gc then scan only their run
        yield folder
    gc.unfreeze()
    torch.set_num_threads(threads)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
