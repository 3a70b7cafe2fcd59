"""A run on several machines reports one without kernels before it trains."""

from __future__ import annotations

import pytest

from megatron.distributed.parallel_state import ParallelState
from megatron.errors import ConfigError
from megatron.layout import Layout
from megatron.ops import resolve
from megatron.ops.library import Library
from megatron.training import kernels
from megatron.training.kernels import RankKernels, check_same_kernels

BUILT, MISSING = Library(), Library("not built: python setup.py build_ext --inplace")


@pytest.mark.parametrize("missing_on", [0, 1, None])
def test_ranks_with_other_kernels_are_refused(missing_on: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [resolve("auto", "cpu", native=MISSING if rank == missing_on else BUILT) for rank in range(2)]
    everyone = [RankKernels({choice.op: choice.backend for choice in table.choices}, table.note) for table in tables]
    monkeypatch.setattr(kernels, "all_gather_json", lambda mine, axis, kind: everyone)
    parallel = ParallelState.plan(Layout(world_size=2), 0)
    if missing_on is None:
        check_same_kernels("auto", tables[0], parallel)
        return
    with pytest.raises(ConfigError) as caught:
        check_same_kernels("auto", tables[0], parallel)
    said = str(caught.value)
    backends = ("native", "torch") if missing_on == 0 else ("torch", "native")
    first = tables[0].choices[0].op
    assert said.startswith(f"--kernels auto: {first} would be {backends[0]} on rank 1 and {backends[1]} on rank 0 (")
    assert "not built: python setup.py" in said and said.endswith("on every machine, or give --kernels ref")
