"""Kernels with a mistake planted in them: the comparison that the real ones pass must fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.policy.rules import ROOT

FUZZ = """
import sys
import torch
from megatron.ops import native
from megatron.ops.proof import CPU_SUBJECTS, SUBJECTS, Draw, check
path, namespace, name = sys.argv[1:]
torch.ops.load_library(path)
native.register(namespace)
subject = (SUBJECTS | CPU_SUBJECTS)[name]
for dtype in subject.dtypes[:2]:
    for call in subject.calls(Draw(dtype, torch.Generator().manual_seed(1))):
        for finding in check(subject, call, getattr(torch.ops, namespace), "cpu"):
            if finding.wrong:
                sys.exit(f"{call.name}: {finding.tensor}: {finding.wrong}")
"""


@dataclass(frozen=True)
class Mistake:
    """A text of csrc/ and what is put in its place. CUDA runs in the emulator, and so does what CPU and GPU share."""

    file: str
    old: str
    new: str
    op: str
    seen: str = ""  # in what the comparison says, which says something
    on_cpu: bool | None = None  # None: as the file's folder says

    def must_be_seen(self, folder: Path) -> None:
        """By the comparison that the real kernels pass."""
        root = planted_checkout(folder, self.file, self.old, self.new)
        on_cpu = self.file.startswith("cpu/") if self.on_cpu is None else self.on_cpu
        said = what_the_comparison_says(root, self.op, emulated=not on_cpu)
        assert said and self.seen in said, said or "nothing is found"


def planted_checkout(folder: Path, file: str, old: str, new: str, occurrence: int = 0) -> Path:
    """csrc/ with one text replaced; its objects come from the checkout's own cache."""
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "build").symlink_to(ROOT / "build")
    text = (folder / "csrc" / file).read_text()
    parts = text.split(old)
    assert len(parts) > occurrence + 1, f"{file} no longer has {old!r}"
    before, after = old.join(parts[: occurrence + 1]), old.join(parts[occurrence + 1 :])
    (folder / "csrc" / file).write_text(before + new + after)
    return folder


def what_the_comparison_says(root: Path, op: str, *, emulated: bool) -> str:
    """Of the kernels of a planted checkout, on the CPU or as emulated CUDA; empty where nothing is wrong with them."""
    if emulated:
        command, path, namespace = ["--emulated", "out"], root / "out" / "_kernels.so", "megatron_emulated"
    else:
        (root / "megatron" / "ops").mkdir(parents=True)
        command, path, namespace = [], root / "megatron" / "ops" / "_kernels.so", "megatron_native"
    subprocess.run([sys.executable, "csrc/build.py", *command], cwd=root, check=True, capture_output=True)
    arguments = [sys.executable, "-c", FUZZ, str(path), namespace, op]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""
