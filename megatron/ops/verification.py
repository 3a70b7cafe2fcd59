"""Verification of CUDA kernels on the user's own GPU, once, before `auto` first uses them.

Separate processes compare every operation with fp64 on small odd shapes. A kernel that is wrong in one dtype is still
used in the others. The outcome is stored in the user's cache, keyed by sources, proofs, GPU and torch version.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.ops.registry import kernels_in
from megatron.utils.device import device_name
from megatron.utils.durable import hash_of_files, try_lock, write_atomically

if TYPE_CHECKING:
    from megatron.ops.library import Library

HERE = Path(__file__).resolve().parent
SECONDS = 120.0
"""Time limit, in seconds. If a folder is not judged by then, this run does not use its kernels."""
_SAID = 300  # largest number of characters of an error, which ranks send to each other
WAIT = 2 * SECONDS
"""Longest wait, in seconds, for another process that verifies the same kernels."""


@dataclass(frozen=True)
class RejectedKernels:
    """The outcome of verifying one folder of csrc/: names of kernels (`kernel_name`) that must not be used, with the
    reason. It is cached only if all kernels could be judged."""

    wrong: Mapping[str, str] = field(default_factory=dict)
    judged: bool = True


Judge = Callable[[Sequence[str], torch.device], Mapping[str, RejectedKernels]]
Say = Callable[[str], None]


def user_cache() -> Path | None:
    try:
        return Path.home() / ".cache" / "megatron-anywhere" / "kernels"
    except RuntimeError:  # a user without a home
        return None


def judged_apart(folders: Sequence[str], device: torch.device) -> dict[str, RejectedKernels]:
    from megatron.ops.proof import PROOFS, SMALL, doubts  # loaded only for verification
    from megatron.ops.proof.apart import judge_apart

    verdicts = list(judge_apart(folders, str(device), seed=1, seconds=SECONDS, largest=SMALL))
    outcomes = {}
    for folder in folders:
        own = [verdict for verdict in verdicts if verdict.folder == folder]
        judged = bool(own) and all(verdict.tensors for verdict in own)
        wrong = doubts(folder, PROOFS.values(), own)
        outcomes[folder] = RejectedKernels({kernel: why[:_SAID] for kernel, why in wrong.items()}, judged)
    return outcomes


def verified(
    native: Library, device: torch.device, say: Say, *, cache: Path | None, judge: Judge = judged_apart
) -> Library:
    """Returns the library with its CUDA kernels marked as verified if they are correct on this device."""
    folders = [one for one in native.cuda_sources if not native.unverified.keys().isdisjoint(kernels_in(one))]
    keys = {folder: _key(native, folder, device) for folder in folders}
    with _alone(cache, say):
        known = {folder: kept for folder, key in keys.items() if (kept := _kept(cache, key)) is not None}
        for folder, outcome in known.items():
            if outcome.wrong:
                say(f"kernels: {_one_line(outcome)}, on this GPU; {_file(cache, keys[folder])} has all reasons")
        left = sorted(keys.keys() - known.keys())
        if left:
            begin = time.monotonic()
            found = judge(left, device)
            where = _keep(cache, {folder: (keys[folder], found[folder]) for folder in left if found[folder].judged})
            say(_line(found, device, time.monotonic() - begin, where))
            known |= found
    reasons = [(kernel, _doubt(one), why) for one in known.values() for kernel, why in one.wrong.items()]
    return replace(native, unverified={kernel: f"{doubt} on this GPU ({why})" for kernel, doubt, why in reasons})


def _doubt(outcome: RejectedKernels) -> str:
    return "found wrong" if outcome.judged else "not verified"


def _one_line(outcome: RejectedKernels) -> str:
    """Lists all kernels that are not used, with the first reason."""
    why = next(iter(outcome.wrong.values()))
    return f"{', '.join(outcome.wrong)} {_doubt(outcome)} and not used ({why})"


def agreed(native: Library, of_every_rank: Sequence[Mapping[str, str]]) -> Library:
    """Returns the library with the kernels marked that are unverified on any rank."""
    theirs = {
        kernel: f"{why}, rank {rank}" for rank, doubts in enumerate(of_every_rank) for kernel, why in doubts.items()
    }
    return replace(native, unverified=theirs | dict(native.unverified))


def _line(found: Mapping[str, RejectedKernels], device: torch.device, seconds: float, where: str) -> str:
    right = sorted(folder for folder, outcome in found.items() if not outcome.wrong)
    wrong = [_one_line(outcome) for _, outcome in sorted(found.items()) if outcome.wrong]
    results = [f"{', '.join(right)} verified" if right else "no folder of csrc/ has only correct kernels", *wrong]
    return f"kernels: {'; '.join(results)}, on {device_name(device)} in {seconds:.0f} s; {where}"


# ---------------------------------------------------------------- the cache


def _key(native: Library, folder: str, device: torch.device) -> dict[str, str]:
    """Everything that an outcome depends on."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    return {
        "folder": folder,
        "sources": native.cuda_sources[folder],
        "compiled": "" if native.needs is None else str(native.needs.cuda),
        # The outcome also depends on this package, which assembles gradients and defines inputs and tolerances.
        "proof": hash_of_files(HERE, (*HERE.glob("*.py"), *HERE.glob("proof/*.py"))),
        "gpu": device_name(device),
        "capability": ".".join(map(str, capability)),
        "torch": torch.__version__,
    }


def _file(cache: Path | None, key: Mapping[str, str]) -> Path:
    assert cache is not None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache / f"{key['folder']}-{digest[:24]}.json"


def _kept(cache: Path | None, key: Mapping[str, str]) -> RejectedKernels | None:
    """Returns the outcome of an earlier run; None if there is none, or its file is damaged or has another key."""
    if cache is None:
        return None
    try:
        record = json.loads(_file(cache, key).read_bytes())
        right, wrong = record["key"] == key, record["wrong"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = isinstance(wrong, dict) and all(isinstance(why, str) and why for why in wrong.values())
    return RejectedKernels(wrong) if right and texts else None


def _keep(cache: Path | None, outcomes: Mapping[str, tuple[Mapping[str, str], RejectedKernels]]) -> str:
    """Writes the outcomes. Returns a text with their place, or with the reason why they are not kept."""
    if cache is None:
        return "outcomes are not kept, because this user has no home directory: every start verifies again"
    if not outcomes:
        return "nothing to keep"
    try:
        for key, outcome in outcomes.values():
            text = json.dumps({"key": key, "wrong": dict(outcome.wrong)}, indent=1)
            write_atomically(_file(cache, key), [f"{text}\n".encode()])
    except OSError as error:
        return (
            f"outcomes are not kept, because {cache} cannot be written ({error.strerror}): every start verifies again"
        )
    return f"kept in {cache}"


@contextmanager
def _alone(cache: Path | None, say: Say) -> Iterator[None]:
    """Lets one process of this user verify at a time; the others read its outcomes. Without a lock, each process
    verifies for itself."""
    descriptor = None
    with suppress(OSError):
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(cache / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            _wait_for_lock(descriptor, say)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # also releases the lock


def _wait_for_lock(descriptor: int, say: Say) -> None:
    until, said = time.monotonic() + WAIT, False
    while time.monotonic() < until:
        try:
            try_lock(descriptor)
            return
        except BlockingIOError:
            if not said:
                say("kernels: waiting for another process that verifies them")
                said = True
        time.sleep(0.1)
