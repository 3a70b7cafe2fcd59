"""CUDA kernels are verified on the user's own GPU before `auto` takes them: at first use, once.

Every operation is compared with fp64 on small odd shapes, in processes of their own. The outcome is kept in the user's
cache, by what was compiled, what it is compared with, the GPU and torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.utils.device import device_name
from megatron.utils.durable import hash_of_files, try_lock, write_atomically

if TYPE_CHECKING:
    from megatron.ops.library import Library

HERE = Path(__file__).resolve().parent
SECONDS = 120.0
"""After which a folder that is not judged yet is not used in this run."""
_SAID = 300  # characters of what is wrong: enough, and ranks send it to each other
WAIT = 2 * SECONDS
"""For another process that verifies the same kernels."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of verifying one folder of csrc/: `wrong` is None or says what is wrong. It is kept in the cache only
    if the kernels could be judged."""

    wrong: str | None = None
    judged: bool = True


Judge = Callable[[Sequence[str], torch.device], Mapping[str, Outcome]]
Say = Callable[[str], None]


def user_cache() -> Path | None:
    try:
        return Path.home() / ".cache" / "megatron-anywhere" / "kernels"
    except RuntimeError:  # a user without a home
        return None


def judged_apart(folders: Sequence[str], device: torch.device) -> dict[str, Outcome]:
    from megatron.ops.proof import SMALL  # not loaded where nothing is verified
    from megatron.ops.proof.apart import judge_apart

    verdicts = list(judge_apart(folders, str(device), seed=1, seconds=SECONDS, largest=SMALL))
    outcomes = {}
    for folder in folders:
        own = [verdict for verdict in verdicts if verdict.folder == folder]
        wrong = [f"{verdict.op} {verdict.dtype}: {text}" for verdict in own for text in verdict.wrong]
        judged = bool(own) and all(verdict.tensors for verdict in own)
        outcomes[folder] = Outcome(wrong[0][:_SAID] if wrong else None if judged else "nothing judges it", judged)
    return outcomes


def verified(
    native: Library, device: torch.device, say: Say, *, cache: Path | None, judge: Judge = judged_apart
) -> Library:
    """The library with as many of its CUDA kernels taken for verified as are right on this device."""
    keys = {folder: _key(native, folder, device) for folder in native.unverified}
    with _alone(cache, say):
        known = {folder: kept for folder, key in keys.items() if (kept := _kept(cache, key)) is not None}
        for folder in (folder for folder, outcome in known.items() if outcome.wrong is not None):
            say(f"kernels: {folder} was found wrong on this GPU and is not used; {_file(cache, keys[folder])} says how")
        left = sorted(keys.keys() - known.keys())
        if left:
            begin = time.monotonic()
            found = judge(left, device)
            where = _keep(cache, {folder: (keys[folder], found[folder]) for folder in left if found[folder].judged})
            say(_line(found, device, time.monotonic() - begin, where))
            known |= found
    wrong = {folder: outcome for folder, outcome in known.items() if outcome.wrong is not None}
    return replace(
        native, unverified={folder: f"{_doubt(one)} on this GPU ({one.wrong})" for folder, one in wrong.items()}
    )


def _doubt(outcome: Outcome) -> str:
    return "found wrong" if outcome.judged else "not verified"


def agreed(native: Library, of_every_rank: Sequence[Mapping[str, str]]) -> Library:
    """The library with what is unverified on any rank."""
    theirs = {
        folder: f"{why}, rank {rank}" for rank, doubts in enumerate(of_every_rank) for folder, why in doubts.items()
    }
    return replace(native, unverified=theirs | dict(native.unverified))


def _line(found: Mapping[str, Outcome], device: torch.device, seconds: float, where: str) -> str:
    right = sorted(folder for folder, outcome in found.items() if outcome.wrong is None)
    wrong = [
        f"{folder} is {_doubt(one)} and not used ({one.wrong})" for folder, one in sorted(found.items()) if one.wrong
    ]
    results = [f"{', '.join(right)} verified" if right else "none verified", *wrong]
    return f"kernels: {'; '.join(results)}, on {device_name(device)} in {seconds:.0f} s; {where}"


# ---------------------------------------------------------------- what is kept


def _key(native: Library, folder: str, device: torch.device) -> dict[str, str]:
    """All that an outcome depends on."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    return {
        "folder": folder,
        "sources": native.cuda_sources[folder],
        "compiled": "" if native.needs is None else str(native.needs.cuda),
        # Of this package: gradients are put together in it, and proofs have their inputs and tolerances here.
        "proof": hash_of_files(HERE, (*HERE.glob("*.py"), *HERE.glob("proof/*.py"))),
        "gpu": device_name(device),
        "capability": ".".join(map(str, capability)),
        "torch": torch.__version__,
    }


def _file(cache: Path | None, key: Mapping[str, str]) -> Path:
    assert cache is not None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache / f"{key['folder']}-{digest[:24]}.json"


def _kept(cache: Path | None, key: Mapping[str, str]) -> Outcome | None:
    """What an earlier run has found; None also for a file that is damaged, or not about this."""
    if cache is None:
        return None
    try:
        record = json.loads(_file(cache, key).read_bytes())
        right, wrong = record["key"] == key, record["wrong"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Outcome(wrong) if right and (wrong is None or (isinstance(wrong, str) and wrong)) else None


def _keep(cache: Path | None, outcomes: Mapping[str, tuple[Mapping[str, str], Outcome]]) -> str:
    """Writes what was found; says where it is kept, or why not."""
    if cache is None:
        return "not kept, for this user has no home: every start verifies again"
    if not outcomes:
        return "nothing to keep"
    try:
        for key, outcome in outcomes.values():
            text = json.dumps({"key": key, "wrong": outcome.wrong}, indent=1)
            write_atomically(_file(cache, key), [f"{text}\n".encode()])
    except OSError as error:
        return f"not kept, for {cache} cannot be written ({error.strerror}): every start verifies again"
    return f"kept in {cache}"


@contextmanager
def _alone(cache: Path | None, say: Say) -> Iterator[None]:
    """One process of this user verifies at a time, and the others find its outcomes. Where there is no lock to be had,
    each verifies for itself."""
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
            os.close(descriptor)  # and the lock with it


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
