"""Made `checkpoint_schema_3` and `local_schema_3` with the last commit that wrote schema 3: the files of a run on two
ranks that stopped after its third iteration. Also recorded how the run would have continued.

    python -m tests.golden.make_schema_3 FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.checkpoint import lineage, manifest
from megatron.checkpoint.reader import StepReader
from tests.helpers.distributed import run_ranks
from tests.helpers.runs import Recorder, flags, make_parts

RANKS, STOPS_AFTER = 2, 3
SHAPE: dict[str, Any] = {
    **{"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8},
    **{"vocab_size": 29, "global_batch_size": 4, "hidden_dropout": 0.1, "train_iters": 6, "kernels": "ref"},
    **{"normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "rope"},
}
KINDS: dict[str, dict[str, Any]] = {
    "checkpoint_schema_3": {"non_persistent_ckpt_type": "global"},
    "local_schema_3": {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": "local"},
}
NEWEST = {"checkpoint_schema_3": "save/non_persistent/iter_0000003", "local_schema_3": "save/iter_0000002"}


def command(kind: str) -> list[str]:
    """Command of a run in its working directory: it saves step 2, and step 3 as a non-persistent step."""
    often = {"save": "save", "load": "save", "save_interval": 2, "non_persistent_save_interval": 1}
    return flags(**{**SHAPE, "bf16": True, "optimizer": "adam", "zero_stage": 1, **often, **KINDS[kind]})


def of_the_token(text: bytes) -> Any:
    """A save directory's token depends on its path; the files in git have a fixed one."""
    return hashlib.sha256(text.partition(b"\0")[0])


def train(rank: int, folder: Path, argv: list[str], iterations: int | None) -> tuple[int, dict[str, str]]:
    """The iteration at which it resumes, and the losses."""
    os.chdir(folder)
    lineage.hashlib = SimpleNamespace(sha256=of_the_token)  # type: ignore[attr-defined]  # in this process alone
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    _, parts = make_parts(argv, hooks=[Recorder(records)], rank=rank, world_size=RANKS)
    with parts:
        start = parts.progress.iteration
        parts.trainer.fit(iterations)
        parts.checkpoints.history.close()
    return start, {str(record["iteration"]): repr(record["lm_loss"]) for record in records}


def digests(step: Path) -> dict[str, str]:
    """Digest of each logical tensor, as a reader returns it."""
    reader = StepReader(step, manifest.read(step))
    tensors = [(("model", name), name, record) for name, record in reader.manifest.model.items()]
    tensors += [
        (("optimizer", name, kind), name, record)
        for name, kinds in reader.manifest.optimizer.items()
        for kind, record in kinds.items()
    ]
    found = {" ".join(key): reader.logical(name, record) for key, name, record in tensors}
    return {
        key: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest() for key, tensor in found.items()
    }


def main() -> None:
    for kind in KINDS:
        folder = Path(sys.argv[1]).resolve() / kind
        folder.mkdir(parents=True)
        run_ranks(RANKS, train, folder, command(kind), STOPS_AFTER, timeout=120.0)
        for leftover in [*folder.rglob(".lock"), *folder.rglob("*.txt")]:
            if leftover.name != "latest_checkpointed_iteration.txt":
                leftover.unlink()
        whole = run_ranks(
            RANKS, train, folder, flags(**{**SHAPE, "bf16": True, "optimizer": "adam", "zero_stage": 1}), None
        )
        told = {"losses": whole[0][1], "tensors": digests(folder / NEWEST[kind])}
        (folder / "expected.json").write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
