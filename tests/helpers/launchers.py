"""The launch scripts of examples/, and data small enough to try them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.chats import write_chat_tokenizer
from tests.helpers.runs import REPOSITORY
from tests.helpers.warm import warm_python
from tests.unit.data.oracle import random_documents, write_dataset

_NOT_OURS = ("TORCHELASTIC", "SLURM_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "OMP_", "GLOO_", "NNODES",
             "NODE_RANK", "GPUS_PER_NODE", "DATA_PATH", "CHECKPOINT_PATH", "TOKENIZER_MODEL",
             "HF_MODEL", "VOCAB_FILE", "MERGE_FILE")  # fmt: skip

# The shape, the batch and the length of a run that takes two steps; the layout and all else are the launcher's own.
SMALL = shlex.split("""--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 2
    --lr-warmup-iters 1 --save-interval 2 --log-interval 1 --eval-iters 1""")


@dataclass(frozen=True)
class Material:
    """Files that launchers read, under the environment variables that name them."""

    folder: Path

    @staticmethod
    def made_in(folder: Path) -> Material:
        vocabulary = write_chat_tokenizer(folder / "tokenizer", None)
        write_dataset(folder / "data", [d for d in random_documents(7, 60, 200, vocabulary) if d])
        model = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        (folder / "merges.txt").write_text("".join(f"{' '.join(pair)}\n" for pair in model["merges"]))
        return Material(folder)

    @property
    def names(self) -> dict[str, Path]:
        files = {"VOCAB_FILE": "vocab.json", "MERGE_FILE": "merges.txt", "DATA_PATH": "data"}
        return {name: self.folder / file for name, file in {**files, "TOKENIZER_MODEL": "tokenizer"}.items()}

    def environment(self, run: str, **changes: object) -> dict[str, str]:
        """Environment of a launcher; `run` names the folder of its checkpoints."""
        return clean_environment(**self.names, CHECKPOINT_PATH=self.folder / run, **changes)


def clean_environment(**changes: object) -> dict[str, str]:
    """This process's environment without variables that a launcher would read."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_OURS)}
    return {**own, "PYTHON": warm_python(), **{name: str(value) for name, value in changes.items()}}


def start(launcher: str, flags: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(REPOSITORY / "examples" / f"{launcher}.sh"), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def printed_command(launcher: str, **changes: object) -> tuple[list[str], list[str]]:
    """Command that --dry-run prints where no data exists: (the launch, the flags behind pretrain_gpt.py)."""
    done = start(launcher, ["--dry-run"], clean_environment(**changes))
    assert done.returncode == 0, done.stdout + done.stderr
    command, *others = done.stdout.splitlines()
    assert others and all(line.startswith("before a launch: --") for line in others), done.stdout
    words = shlex.split(command)
    behind = words.index("pretrain_gpt.py")
    return words[:behind], words[behind + 1 :]
