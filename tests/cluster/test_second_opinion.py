"""Compares the prover with a second opinion, which has the same rules of NCCL but none of the prover's code. Inputs are
recorded schedules, seven kinds of faults at random places, and random harmless changes of the order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from megatron.config import parse_args
from megatron.pipeline_parallel.links import Links
from megatron.prove.order.agreement import disagreements
from megatron.prove.order.classes import representative
from megatron.prove.order.cluster import record_clusters
from megatron.prove.order.events import Communicator, Compute, Event, Op, Recording, Wait
from megatron.prove.order.waits import INDEPENDENT, ONE_QUEUE, STRICTEST, Rules, play
from tests.cluster.pipelines import record_pipeline
from tests.cluster.second_opinion import hangs, refusals
from tests.helpers.runs import flags, pretrain_gpt

Recordings = Mapping[int, Recording]
Fault = Callable[[Random, Recordings, int], Recordings | None]
RULES = (
    (STRICTEST, {"waits_block": True, "one_queue": True, "collectives_connect": True}),
    (ONE_QUEUE, {"waits_block": False, "one_queue": True}),
    (INDEPENDENT, {"waits_block": False, "one_queue": False}),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor, sequence and pipeline": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "overlap_grad_reduce": True,
    },
    "context and pipeline": {
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zero-bubble",
    },
}
FAULTS_A_KIND = 12  # on each recording
CHANGES = 15
FARTHEST = 40


def full_world(settings: dict[str, Any], ranks: int = 8) -> Recordings:
    torch.set_num_threads(1)
    config = parse_args(flags(**{"train_iters": 2, "eval_iters": 1, "eval_interval": 2, **settings}))
    layout = config.parallel.layout(ranks)
    the_rest = [rank for rank in range(ranks) if representative(layout, rank) != rank]
    run = record_clusters({"a run": config}, ranks, pretrain_gpt(), copies=the_rest)["a run"]
    return {**run.programs, **run.copies}


@pytest.fixture(scope="module")
def recorded() -> dict[str, Recordings]:
    pipelines = {
        name: record_pipeline(name, 4, 8, 2 if name == "interleaved" else 1, steps=2)
        for name in ("gpipe", "1f1b", "interleaved", "zero-bubble")
    }
    return pipelines | {name: full_world(settings) for name, settings in LAYOUTS.items()}


def test_both_find_nothing_in_what_is_right(recorded: dict[str, Recordings]) -> None:
    for name, recordings in recorded.items():
        assert (disagreements(recordings), refusals(recordings)) == ([], []), name
        for rules, ours in RULES:
            assert play(recordings, rules).stuck == [] and not hangs(recordings, **ours), (name, rules)


# Faults at random places. Each takes a rank's groups and events, and gives None if there is no such place.


def others_do_it(recordings: Recordings, rank: int, op: Op) -> bool:
    members = [message.peer for message in op.messages] or recordings[rank].groups[op.group].ranks
    return any(member != rank for member in members)


def places(recordings: Recordings, rank: int, fits: Callable[[Op], bool]) -> list[int]:
    events = recordings[rank].events
    return [n for n, e in enumerate(events) if isinstance(e, Op) and others_do_it(recordings, rank, e) and fits(e)]


def with_events(recordings: Recordings, rank: int, events: list[Event]) -> Recordings:
    return {**recordings, rank: replace(recordings[rank], events=events)}


def with_op(recordings: Recordings, rank: int, place: int, **changed: Any) -> Recordings:
    events = list(recordings[rank].events)
    events[place] = replace(events[place], **changed)  # type: ignore[type-var]
    return with_events(recordings, rank, events)


def missing(random: Random, recordings: Recordings, rank: int) -> Recordings | None:
    events = list(recordings[rank].events)
    gone = events[random.choice(places(recordings, rank, lambda op: True))]
    assert isinstance(gone, Op)
    its_wait = Wait(gone.number)
    return with_events(recordings, rank, [event for event in events if event is not gone and event != its_wait])


def other_size(random: Random, recordings: Recordings, rank: int) -> Recordings | None:
    place = random.choice(places(recordings, rank, lambda op: bool(op.messages) or op.size > 0))
    op = recordings[rank].events[place]
    assert isinstance(op, Op)
    if op.messages:
        first, *rest = op.messages
        return with_op(recordings, rank, place, messages=(replace(first, size=first.size + 1), *rest))
    return with_op(recordings, rank, place, size=op.size + 1)


def other_dtype(random: Random, recordings: Recordings, rank: int) -> Recordings | None:
    place = random.choice(places(recordings, rank, lambda op: bool(op.messages) or op.dtype != ""))
    op = recordings[rank].events[place]
    assert isinstance(op, Op)
    if op.messages:
        first, *rest = op.messages
        return with_op(recordings, rank, place, messages=(replace(first, dtype="other"), *rest))
    return with_op(recordings, rank, place, dtype="other")


def swapped(recordings: Recordings, rank: int, one: int, other: int, *names: str) -> Recordings:
    """Swaps the arguments of two operations; their places and waits stay."""
    events = list(recordings[rank].events)
    a, b = events[one], events[other]
    events[one] = replace(a, **{name: getattr(b, name) for name in names})  # type: ignore[type-var]
    events[other] = replace(b, **{name: getattr(a, name) for name in names})  # type: ignore[type-var]
    return with_events(recordings, rank, events)


def swapped_receive(random: Random, recordings: Recordings, rank: int) -> Recordings | None:
    events: Any = recordings[rank].events
    receives = places(recordings, rank, lambda op: [message.side for message in op.messages] == ["recv"])
    pairs = [
        (one, other)
        for one in receives
        for other in receives
        if one < other
        and (events[one].group, events[one].messages[0].peer) == (events[other].group, events[other].messages[0].peer)
        and events[one].messages != events[other].messages
    ]
    return swapped(recordings, rank, *random.choice(pairs), "messages") if pairs else None


def other_order(random: Random, recordings: Recordings, rank: int) -> Recordings | None:
    events: Any = recordings[rank].events
    collective = places(recordings, rank, lambda op: not op.messages)
    content = ("kind", "size", "dtype", "detail")
    pairs = [
        (one, other)
        for one, other in pairwise(collective)
        if events[one].group == events[other].group
        and any(getattr(events[one], name) != getattr(events[other], name) for name in content)
    ]
    return swapped(recordings, rank, *random.choice(pairs), *content) if pairs else None


def groups_in_another_order(random: Random, recordings: Recordings, rank: int) -> Recordings | None:
    groups = list(recordings[rank].groups.items())
    shared = [place for place, (_, group) in enumerate(groups) if len(group.ranks) > 1]
    if len(shared) < 2:
        return None
    one, other = random.sample(shared, 2)
    groups[one], groups[other] = groups[other], groups[one]
    return {**recordings, rank: replace(recordings[rank], groups=dict(groups))}


def crossed(random: Random, recordings: Recordings, rank: int) -> Recordings | None:
    """Swaps two collectives, each waited for at once; another rank issues them in the original order."""
    events: Any = list(recordings[rank].events)
    groups = recordings[rank].groups
    found = [
        place
        for place in places(recordings, rank, lambda op: not op.messages)
        if [type(event) for event in events[place + 1 : place + 4]] == [Wait, Op, Wait]
        and not events[place + 2].messages
        and events[place + 2].group != events[place].group
        and events[place + 1].op == events[place].number
        and events[place + 3].op == events[place + 2].number
        and len(set(groups[events[place].group].ranks) & set(groups[events[place + 2].group].ranks)) > 1
    ]
    if not found:
        return None
    place = random.choice(found)
    events[place : place + 4] = [*events[place + 2 : place + 4], *events[place : place + 2]]
    return with_events(recordings, rank, events)


REFUSED = (missing, other_size, other_dtype, swapped_receive, other_order, groups_in_another_order)


@pytest.mark.parametrize("fault", [*REFUSED, crossed], ids=lambda fault: fault.__name__)
def test_both_find_every_planted_fault(fault: Fault, recorded: dict[str, Recordings]) -> None:
    random, planted = Random(17), 0
    for name, recordings in recorded.items():
        for _ in range(FAULTS_A_KIND):
            rank = random.choice(list(recordings))
            wrong = fault(random, recordings, rank)
            if wrong is None:
                continue
            planted += 1
            if fault in REFUSED:
                assert disagreements(wrong) and refusals(wrong), (name, rank)
            else:
                assert disagreements(wrong) == refusals(wrong) == [], (name, rank)
                for rules, ours in RULES:
                    assert play(wrong, rules).stuck and hangs(wrong, **ours), (name, rank)
    assert planted >= FAULTS_A_KIND


def reordered(random: Random, recordings: Recordings) -> Recordings:
    """Moves an event of a rank later, but not past its own wait or the next operation of its communicator."""
    rank = random.choice(list(recordings))
    events = list(recordings[rank].events)
    begin = random.randrange(len(events) - 1)
    for place in range(begin, min(begin + FARTHEST, len(events) - 1)):
        one, other = events[place], events[place + 1]
        same = isinstance(one, Op) and isinstance(other, Op) and one.group == other.group
        its_wait = isinstance(one, Op) and isinstance(other, Wait) and other.op == one.number
        if same or its_wait:
            break
        events[place], events[place + 1] = other, one
    return with_events(recordings, rank, events)


def test_both_agree_on_whatever_order_there_is(recorded: dict[str, Recordings]) -> None:
    random, verdicts = Random(23), []
    for name, recordings in recorded.items():
        for number in range(CHANGES):
            changed = reordered(random, recordings)
            stuck = {rules: bool(play(changed, rules).stuck) for rules, _ in RULES}
            for rules, ours in RULES:
                assert stuck[rules] == hangs(changed, **ours), (name, number, rules)
            assert stuck[STRICTEST] or not any(stuck.values()), "what ends under the strictest rules ends under all"
            verdicts += stuck.values()
    assert {True, False} == set(verdicts)


def test_both_find_links_that_connect_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "connect", lambda self, device: None)
    recordings = record_pipeline("1f1b", 4, 8)
    for rules, ours in RULES:
        assert play(recordings, rules).stuck and hangs(recordings, **ours)


def test_both_find_collectives_that_connect_after_their_groups_first_use() -> None:
    """Two ranks issue two sums in opposite order, on communicators that both have used before."""
    groups = {name: Communicator(name, (0, 1)) for name in "ab"}

    def program(rank: int, order: str) -> Recording:
        ops = [Op(number, group, "all_reduce", 1, "float32") for number, group in enumerate(f"ab{order}", 1)]
        used = [event for op in ops[:2] for event in (op, Wait(op.number))]
        return Recording(rank, groups, [*used, *ops[2:], *(Wait(op.number) for op in ops[2:])])

    crossed = {0: program(0, "ab"), 1: program(1, "ba")}
    verdicts = {"waits_block": False, "one_queue": False}
    assert play(crossed, INDEPENDENT).stuck == [] and not hangs(crossed, **verdicts)
    found = play(crossed, Rules(collectives_connect=True)).stuck
    assert "rank 0 connects for all_reduce" in found[0] and hangs(crossed, **verdicts, collectives_connect=True)


def test_time_says_nothing_of_order(recorded: dict[str, Recordings]) -> None:
    """Durations of computations do not matter; only the order does."""
    recordings = {
        rank: replace(r, events=[Compute(0.0) if isinstance(event, Compute) else event for event in r.events])
        for rank, r in recorded["1f1b"].items()
    }
    assert play(recordings, STRICTEST).stuck == []
