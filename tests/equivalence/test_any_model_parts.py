"""Ranks that use different parts of a model, or leave parts out later, train what a plain torch loop trains on the
whole batch. An unused or frozen part does not move."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.compat.any_model import initialize
from megatron.compat.any_model.kept_gradients import GuardedWeights
from megatron.compat.any_model.usage import Usage
from megatron.data_parallel.buckets import Bucket
from megatron.errors import ConfigError
from tests.helpers.any_model import largest_difference
from tests.helpers.distributed import RankFailed, run_ranks

BOTH, ONE, OTHER, NONE = (1, 1), (1, 0), (0, 1), (0, 0)
Plan = list[tuple[tuple[int, int], tuple[int, int]]]
"""Parts that the first and the second rank use in each step."""
PLANS: dict[str, Plan] = {
    "one rank lacks a part from the start": [(BOTH, ONE)] * 4,
    "they take turns": [(ONE, OTHER), (OTHER, ONE), (BOTH, BOTH), (ONE, ONE)],
    "one lacks it later": [(BOTH, BOTH), (BOTH, ONE), (ONE, BOTH), (ONE, ONE)],
    "both lack it later": [(BOTH, BOTH), (ONE, ONE), (NONE, NONE), (BOTH, BOTH)],
}
FROZEN_IN = (1, 2)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.one, self.other = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, used: tuple[int, int]) -> Tensor:
        return self.base(x) + sum(part(x) for part, counts in zip((self.one, self.other), used, strict=True) if counts)


def made() -> tuple[Parts, torch.optim.Optimizer]:
    model = Parts().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def halves_of(step: int) -> tuple[Tensor, ...]:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(2)


def freeze(model: Parts, step: int) -> None:
    model.one.requires_grad_(step not in FROZEN_IN)


def trained(rank: int, stage: int, plan: Plan, freezes: bool = False) -> dict[str, Tensor]:
    model, optimizer = made()
    config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    for step, used in enumerate(plan):
        if freezes:
            freeze(model, step)
        x = halves_of(step)[rank]
        engine.backward(F.mse_loss(engine(x, used[rank]), x.flip(-1)))
        engine.step()
    return {name: one.clone() for name, one in engine.whole_state_dict().items()}


def expected(plan: Plan, freezes: bool = False) -> dict[str, Tensor]:
    model, optimizer = made()
    for step, used in enumerate(plan):
        if freezes:
            freeze(model, step)
        optimizer.zero_grad()
        for x, parts in zip(halves_of(step), used, strict=True):
            (F.mse_loss(model(x, parts), x.flip(-1)) / 2).backward()
        optimizer.step()
    return dict(model.state_dict())


PLANS_OF_STAGES = [(plan, stage) for plan in PLANS.values() for stage in (0, 1)]
PLANS_OF_STAGES += [(PLANS["both lack it later"], 2), (PLANS["both lack it later"], 3)]  # which want all ranks alike


def each_plan(rank: int) -> list[dict[str, Tensor]]:
    return [trained(rank, stage, plan) for plan, stage in PLANS_OF_STAGES]


def test_parts_that_are_left_out() -> None:
    wanted = [expected(plan) for plan, _ in PLANS_OF_STAGES]
    for found in run_ranks(2, each_plan):
        assert max(map(largest_difference, found, wanted)) < 1e-12


def each_stage(rank: int) -> list[dict[str, Tensor]]:
    return [trained(rank, stage, [(BOTH, BOTH)] * 4, freezes=True) for stage in (0, 1, 2, 3)]


def test_a_part_that_is_frozen_for_a_while() -> None:
    wanted = expected([(BOTH, BOTH)] * 4, freezes=True)
    for found in run_ranks(2, each_stage):
        assert max(largest_difference(one, wanted) for one in found) < 1e-12


def saved_while_frozen(rank: int, folder: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    pairs = []
    for stage in (0, 1, 2, 3):
        engines = []
        for loads in (False, True):
            model, optimizer = made()
            config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
            engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
            if loads:
                engine.load_checkpoint(folder, tag=f"stage{stage}")
            for step in range(2 if loads else 0, 4):
                freeze(model, step)
                engine.backward(F.mse_loss(engine(halves_of(step)[rank], BOTH), halves_of(step)[rank].flip(-1)))
                engine.step()
                if step == 1 and not loads:
                    engine.save_checkpoint(folder, tag=f"stage{stage}")
            engines.append({name: one.clone() for name, one in engine.whole_state_dict().items()})
        pairs.append((engines[0], engines[1]))
    return pairs


def test_the_state_of_a_frozen_part_is_saved(tmp_path: Path) -> None:
    for pairs in run_ranks(2, saved_while_frozen, str(tmp_path)):
        assert [largest_difference(resumed, whole) for whole, resumed in pairs] == [0.0] * 4


def replacing(rank: int) -> bool:
    model, optimizer = made()
    config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    model.base.weight.data = torch.zeros_like(model.base.weight)
    engine.backward(engine(halves_of(0)[rank], BOTH).sum())
    engine.step()
    return True


def test_weights_that_are_replaced_in_a_divided_buffer_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"base.weight.data was replaced, .* write into it: base.weight.data.copy_"):
        run_ranks(2, replacing)


def clipped_by_hand(rank: int) -> list[str]:
    said = []
    for stage in (0, 1, 2, 3):
        model, optimizer = made()
        config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
        engine.backward(engine(halves_of(0)[rank], BOTH).sum())
        try:
            said.append(str(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        except ConfigError as error:
            said.append(str(error))
    return said


def test_clipping_by_hand_is_refused_at_every_stage() -> None:
    """Clipping by hand would clip sums over the ranks at stage 3, and nothing elsewhere."""
    for said in run_ranks(2, clipped_by_hand):
        assert all('give "gradient_clipping" in the config' in line for line in said), said


def written_where_divided(rank: int) -> list[bool]:
    found = []
    for stage in (2, 3):
        for whole_engine in (True, False):
            model, optimizer = made()
            config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
            engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
            engine.backward(engine(halves_of(0)[rank], BOTH).sum())
            engine.step()
            wanted = {name: one + 3 for name, one in engine.whole_state_dict().items()}
            names = "module." if whole_engine else ""
            into = engine if whole_engine else model
            into.load_state_dict({names + name: one for name, one in wanted.items()})
            found.append(largest_difference(dict(engine.whole_state_dict()), wanted) == 0)
        model.base.weight.data = torch.zeros(6, 6, dtype=torch.float64)
        engine.backward(engine(halves_of(1)[rank], BOTH).sum())
        with pytest.raises(ConfigError, match=r"base.weight.data was replaced, .* use engine.load_state_dict"):
            engine.step()
    return found


def test_weights_that_are_written_at_stages_2_and_3_are_taken_or_refused() -> None:
    assert run_ranks(2, written_where_divided) == [[True] * 4] * 2


class Sharing(nn.Module):
    """Layers that share a weight, a layer with two names, and one that two containers hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        one, two, held = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        two.weight = one.weight
        self.layers = nn.ModuleList([one, nn.Sequential(nn.Linear(6, 6), nn.Tanh(), held), two])
        self.again, self.others = self.layers[1], nn.Sequential(held, nn.Tanh(), nn.Linear(6, 6), held)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.again, self.others):
            x = x + torch.tanh(layer(x))
        return x


def shared_layers(rank: int) -> list[dict[str, Tensor]]:
    found = []
    for stage in (None, 2, 3):
        model = Sharing().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if stage is not None:
            config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
            engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
        for step in range(3):
            halves = halves_of(step)
            if stage is None:
                optimizer.zero_grad()
                F.mse_loss(model(torch.cat(halves)), torch.cat(halves).flip(-1)).backward()
                optimizer.step()
            else:
                engine.backward(F.mse_loss(engine(halves[rank]), halves[rank].flip(-1)))
                engine.step()
        weights = model.state_dict() if stage is None else engine.whole_state_dict()
        found.append({name: one.clone() for name, one in weights.items()})
    return found


def test_layers_that_share_weights_or_have_two_names_are_divided() -> None:
    for plain, second, third in run_ranks(2, shared_layers):
        assert max(largest_difference(second, plain), largest_difference(third, plain)) < 1e-12


def test_planted_bug_gradients_of_shards_are_not_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedWeights, "withhold", lambda self: None)
    with pytest.raises(AssertionError):
        test_clipping_by_hand_is_refused_at_every_stage()


def test_planted_bug_what_no_rank_has_used_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Usage, "_start_comparing", lambda *_: tuple)
    with pytest.raises(AssertionError):
        test_parts_that_are_left_out()


def comparisons(rank: int) -> list[bool]:
    """Returns for each step whether the ranks compare."""
    found: list[bool] = []
    compare = Usage._start_comparing

    def counted(self: Usage, grads: Any) -> Any:
        found[-1] = True
        return compare(self, grads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Usage, "_start_comparing", counted)
        model, optimizer = made()
        engine, *_ = initialize(model=model, optimizer=optimizer, config={"train_batch_size": 4})
        for step, used in enumerate(PLANS["both lack it later"]):
            found.append(False)
            x = halves_of(step)[rank]
            engine.backward(F.mse_loss(engine(x, used[rank]), x.flip(-1)))
            engine.step()
    return found


def test_ranks_compare_in_steps_in_which_one_lacks_a_gradient() -> None:
    """A second message in every step would make a small model slower than torch's DDP."""
    assert run_ranks(2, comparisons) == [[False, True, True, False]] * 2


def test_planted_bug_a_missing_gradient_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Bucket.start_sum
    monkeypatch.setattr(Bucket, "start_sum", lambda self, lacks=False: start(self))
    with pytest.raises(AssertionError):
        test_parts_that_are_left_out()


def test_planted_bug_the_count_of_an_earlier_step_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Bucket.start_sum
    monkeypatch.setattr(Bucket, "start_sum", lambda self, lacks=False: start(self, lacks or self.lacked))
    with pytest.raises(AssertionError):
        test_ranks_compare_in_steps_in_which_one_lacks_a_gradient()


def test_planted_bug_ranks_compare_before_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank already sums in its backward pass, while the other lacks a gradient."""

    def reduce(self: Usage) -> None:
        grads: Any = self._grads
        absent = self._start_comparing(grads)
        grads.reduce()
        self._absent = absent()

    monkeypatch.setattr(Usage, "reduce", reduce)
    with pytest.raises(RankFailed, match=r"SIGABRT|Connection closed"):
        test_parts_that_are_left_out()


class TrustRatio(torch.optim.SGD):
    """The LARS update."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.grad.mul_(one.norm() / one.grad.norm().clamp(min=1e-9))
        super().step()


def with_a_trust_ratio(rank: int) -> tuple[list[str], float]:
    """Messages at stages 1 to 3, without and with the key, and the largest difference from a plain loop at stage 0."""
    said = []
    plain, _ = made()
    updates = TrustRatio(plain.parameters(), lr=0.1)
    for stage, allowed in ((0, False), (1, False), (2, False), (3, False), (1, True)):
        model, _ = made()
        config: dict[str, Any] = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
        config["zero_allow_untested_optimizer"] = allowed
        with redirect_stdout(io.StringIO()) as lines:
            try:
                optimizer = TrustRatio(model.parameters(), lr=0.1)
                engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
            except ConfigError as error:
                said.append(str(error))
                continue
        said += [line for line in lines.getvalue().splitlines() if "TrustRatio" in line]
        engine.backward(F.mse_loss(engine(halves_of(0)[rank], BOTH), halves_of(0)[rank].flip(-1)))
        engine.step()
        if stage == 0:
            F.mse_loss(plain(torch.cat(halves_of(0)), BOTH), torch.cat(halves_of(0)).flip(-1)).backward()
            updates.step()
            difference = largest_difference(engine.whole_state_dict(), dict(plain.state_dict()))
    return said, difference


def test_an_optimizer_that_needs_whole_parameters_is_refused_or_allowed() -> None:
    for rank, (said, difference) in enumerate(run_ranks(2, with_a_trust_ratio)):
        assert difference < 1e-12
        assert all("zero_allow_untested_optimizer to true" in line for line in said[:3])
        assert len(said) == 3 + (rank == 0)
        assert rank or "true: TrustRatio updates a parameter differently when it is given in pieces" in said[3]
