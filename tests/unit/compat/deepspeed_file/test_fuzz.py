"""Random configurations are read, or rejected in single lines that name the file; there is never a traceback."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from megatron.compat.deepspeed_file import read_deepspeed
from megatron.compat.deepspeed_file.table import keys_by_path
from megatron.config import RunConfig, check_world
from megatron.errors import ConfigError
from tests.helpers.other_programs import parse_args
from tests.unit.config.commands import SMALL, argv, without

PATHS = list(keys_by_path())
SCALARS: list[Any] = [
    *(None, "auto", True, False, 0, 1, 2, 3, -1, 16, 0.5, 1e-3, 1e9, -0.0, 1e308, float("inf"), float("nan")),
    *(
        10**30,
        -(10**400),
        "",
        "cpu",
        "nvme",
        "AdamW",
        "SGD",
        "OneCycle",
        "fp16",
        "x" * 3000,
        "a\nb",
        "\udcff",
        "ü",
        b"x",
    ),
    *([], [1, 2], [0.9, 0.999], ["a", None], {}, {"enabled": True}, {"enabled": False}, {"device": "cpu"}, {1: 2}),
]
TYPICAL: dict[str, Any] = {
    **{"text": ["AdamW", "cpu", "WarmupLR", "fp32", "auto"], "switch": [True, False, "auto"], "list": [[0.9, 0.95]]},
    **{"whole": [1, 2, 16, 1000], "number": [0.0, 0.1, 1], "block": [{}, {"enabled": False}]},
}


def made_up(rng: random.Random) -> dict[str, Any]:
    content: dict[Any, Any] = {}
    for _ in range(rng.randrange(1, 9)):
        path = rng.choice(PATHS)
        value = copy.deepcopy(rng.choice(TYPICAL[keys_by_path()[path].kind] if rng.random() < 0.7 else SCALARS))
        *blocks, name = path.split(".")
        inner: Any = content
        for one in blocks:
            inner = inner.setdefault(one, {}) if isinstance(inner, dict) else {}
        if rng.random() < 0.1:
            name = rng.choice(["", "x", name[:-1], name + "s", name.upper(), "a.b", "\x1b[31m", 7, None])
        if isinstance(inner, dict):
            inner[name] = value
    return content


def lines_of(refusal: ConfigError, name: str) -> None:
    for line in refusal.lines:
        assert line.isprintable() and name in line and len(line) < 700, line


def test_a_made_up_dict_is_read_or_refused() -> None:
    rng = random.Random(20261122)
    read = 0
    for _ in range(4000):
        content = made_up(rng)
        try:
            settings = read_deepspeed(content, name="ds.json")
        except ConfigError as refusal:
            lines_of(refusal, "ds.json")
            continue
        read += 1
        assert all(line.isprintable() and line.startswith("ds.json: ") for line in settings.notices)
        assert settings.values.keys() == settings.spelled.keys()
    assert 400 < read < 3600


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(14)
    file = tmp_path / "ds.json"
    for turn in range(300):
        command = SMALL if turn % 2 else without(SMALL, "--micro-batch-size", "--lr")
        text = bytearray(json.dumps(made_up_json(rng)).encode())
        for _ in range(rng.randrange(4)):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(3)] = bytes(rng.choice(b'{}[]",:/#0e-\xff ntf\x00') for _ in range(2))
        file.write_bytes(bytes(text))
        try:
            config = parse_args(argv(command, "--deepspeed --deepspeed_config", str(file)))
            check_world(config, rng.choice((1, 2, 3, 8)))
        except ConfigError as refusal:
            assert all(line.isprintable() for line in refusal.lines)
        else:
            assert isinstance(config, RunConfig) and all(line.isprintable() for line in config.notices)


def made_up_json(rng: random.Random) -> dict[str, Any]:
    """A configuration that JSON can hold."""
    while True:
        content = made_up(rng)
        try:
            json.dumps(content)
        except (TypeError, ValueError):
            continue
        return content
