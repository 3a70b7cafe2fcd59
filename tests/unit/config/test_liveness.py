"""P3.2: no setting is accepted and ignored. The program reads every supported field, or it is listed here with a
reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.run import all_settings
from tests.unit.config.liveness import live_fields

ROOT = Path(__file__).parents[3]

# Fields whose whole effect is inside megatron/config.
ACTS_IN_CONFIG = {
    "model": "names the preset that fills the other fields (cli.py)",
    "config": "names the file that fills the other fields (cli.py)",
    "deepspeed": "says that the file of --deepspeed_config is meant (deepspeed_file/source.py)",
    "deepspeed_config": "names the file that fills the other fields (deepspeed_file/source.py)",
    "ckpt_format": "torch, its only value, is what is written (checks on the choices)",
    "print_config_changed": "chooses the rows of --print-config (serialize.py)",
    "full_validation": "makes the plan of what each evaluation reads (validation.py)",
    "group_query_attention": "needs --num-query-groups, which is what acts (checks/model.py)",
    "validation_set_names": "names the sets of the plan, for data and records (validation.py)",
}


def unread(root: Path) -> list[str]:
    live = live_fields(root)
    return [
        s.name
        for s in all_settings()
        if s.flag.status == "works" and s.name not in live and s.name not in ACTS_IN_CONFIG
    ]


def test_every_field_that_works_is_read() -> None:
    assert unread(ROOT) == []


def test_the_exceptions_are_fields() -> None:
    assert set(ACTS_IN_CONFIG) <= {s.name for s in all_settings()}


PROGRAM = '''
"""This text talks about clip_grad."""
from megatron.config import BatchPlan, CheckpointConfig, RunConfig

def work(config: RunConfig, where: CheckpointConfig, other) -> None:
    print(config.training.seed, where.save, other.load, BatchPlan(config, 1).total_iterations, "a,b".split(","))
    if config.model.tied:
        print(getattr(config.schedule, "min_lr"))
'''


@pytest.mark.parametrize(
    ("name", "live"),
    [
        ("seed", True),  # through its section
        ("save", True),  # through an annotated parameter
        ("untie_embeddings_and_output_weights", True),  # through a property
        ("rampup_batch_size", True),  # through a function that a function calls
        ("min_lr", True),  # by name
        ("load", False),  # of something else
        ("split", False),  # of a string
        ("clip_grad", False),  # only in a docstring
        ("vocab_file", False),
    ],
)
def test_the_scan_tells_reading_from_mentioning(tmp_path: Path, name: str, live: bool) -> None:
    for folder in ("megatron/config/sections", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    for path in (ROOT / "megatron/config").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "pretrain_gpt.py").write_text(PROGRAM)
    assert (name in live_fields(tmp_path)) is live
