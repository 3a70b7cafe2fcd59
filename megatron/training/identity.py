"""Identity of a rank's settings and data, which must be equal on all ranks; compared when the ranks meet."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.checkpoint.local.replica_folder import Copies
from megatron.config import RunConfig
from megatron.config.run import all_settings
from megatron.data.datasets import Datasets
from megatron.distributed.identity import DATA, Identity
from megatron.distributed.launch import LaunchInfo
from megatron.distributed.meeting import TOLD_EVERY, Patience, wait_for_all
from megatron.tokenizer import Tokenizer
from megatron.training.checks import copies_of
from megatron.utils.durable import hash_of_files

_PACKAGE = Path(__file__).resolve().parents[1]


def started_with(config: RunConfig, launch: LaunchInfo, tokenizer: Tokenizer | None = None) -> dict[str, str]:
    """Facts that ranks must share, by name. Settings are listed by flag, without paths (machines may differ) and
    launch-only settings. Other facts are which checkpoint directories are set (on one machine also the paths of --load
    and --save), the destination of replicated shards, and torch's version. Hashes identify the package, the script and
    the tokenizer's files."""
    compared = (setting for setting in all_settings() if not setting.flag.path and not setting.flag.cli_only)
    values = {setting.spelling: config.value(setting) for setting in compared}
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    return {
        **{name: str(value) for name, value in values.items() if value is not None},
        **_checkpoints(config, one_machine=launch.single_node),
        **_copies(config, launch),
        "the code of megatron": hash_of_files(_PACKAGE, _PACKAGE.rglob("*.py"))[:12],
        "the script": hash_of_files(script.parent, [script])[:12] if script.is_file() else "none",
        "the tokenizer": "none" if tokenizer is None else f"{tokenizer.name} {tokenizer.fingerprint[:12]}",
        "torch": torch.__version__,
    }


def _checkpoints(config: RunConfig, *, one_machine: bool) -> dict[str, str]:
    """Checkpoint settings that ranks must share: which directories are set decides which collectives a rank calls."""
    places = [setting for setting in all_settings() if setting.flag.path and setting.section == "checkpoint"]
    given = {setting.spelling: "given" for setting in places if config.value(setting) is not None}
    if one_machine:
        shared = {"--load": config.checkpoint.load, "--save": config.checkpoint.save}
        given |= {flag: str(Path(path).resolve()) for flag, path in shared.items() if path is not None}
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is not None and save is not None and Path(load).resolve() == Path(save).resolve():
        given["--load"] = "the directory of --save"
    return given


def _copies(config: RunConfig, launch: LaunchInfo) -> dict[str, str]:
    """Number of ranks per machine, if it decides where replicas are sent: it must then be equal on all machines."""
    if config.checkpoint.replication_jump is not None or (copies := copies_of(config, launch)) == Copies():
        return {}
    return {"--replication-jump (default: the ranks per machine; give the same number everywhere)": str(copies.jump)}


def meet_over_data(datasets: Datasets, store: dist.Store, launch: LaunchInfo, told_every: float = TOLD_EVERY) -> None:
    """Waits until every rank has its datasets, and rejects ranks that read other data. There is no time limit, because
    a rank may build indices for hours."""
    here = Identity(launch.rank, *_compared(datasets), subject=DATA)
    wait_for_all(
        dist.PrefixStore("data", store), here, launch, Patience(timedelta.max, told_every), did="opened the data"
    )


def _compared(datasets: Datasets) -> tuple[dict[str, str], dict[str, str]]:
    """Compared values by name, and the texts by which messages show them. Values contain no paths, because paths may
    differ between machines."""
    values: dict[str, str] = {}
    shown: dict[str, str] = {}
    for number, source in enumerate(datasets.sources, start=1):
        tokens, record = f"source {number}", f"the record of source {number}"
        values |= {tokens: source.content, record: source.record}
        shown |= {tokens: f"{source.prefix} ({source.content[:12]})", record: source.record[:12] or "not there"}
    together = "the order and the weights of all sources"
    return {**values, together: datasets.fingerprint}, {**shown, together: datasets.fingerprint[:12]}
