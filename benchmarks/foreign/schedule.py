"""Seconds of a pipeline's step from the seconds of its stages: gpipe, 1F1B, interleaved, zero-bubble.

    partition    layers of each stage, as the frameworks cut them
    run_through  micro-batches through the stages in a schedule's order; what is left of a long run is its slope

A stage has seconds for its forward, for the gradients of its inputs and for those of its weights. A message takes its
own time between two stages. Nothing is assumed alike: first and last stage may be longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from foretell.lower.pipeline.order import Event, in_turn, needs, orders

GPIPE, ONE_BY_ONE, ZB_1P, ZB_2P, ZB_V = "gpipe", "1f1b", "zb-1p", "zb-2p", "zb-v"
_FILLED = 3
"""Micro-batches that are run one by one, in depths of the pipeline; further ones cost the slope between them."""


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch at one stage."""

    forward: float
    inputs: float
    weights: float

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def schedule_of(text: str) -> str:
    """The schedule a table names; unknown names mean 1F1B."""
    name = text.lower().replace("_", "-").replace(" ", "")
    if "gpipe" in name or "afab" in name:
        return GPIPE
    if "zbv" in name or "zb-v" in name or "v-half" in name or "v-min" in name or "dualpipe" in name:
        return ZB_V
    if "zb" in name or "zero-bubble" in name or "zerobubble" in name:
        return ZB_2P if "2p" in name or "h2" in name else ZB_1P
    return ONE_BY_ONE


def partition(layers: int, stages: int) -> list[int]:
    """Layers of each stage: alike where they divide; else embedding and head take a slot each where that divides;
    else as many as the fullest stage needs, until none are left."""
    if layers % stages == 0:
        return [layers // stages] * stages
    if (layers + 2) % stages == 0 and stages > 1:
        each = (layers + 2) // stages
        return [each - 1, *([each] * (stages - 2)), each - 1]
    each, left, found = ceil(layers / stages), layers, []
    for stage in range(stages):
        mine = min(each, left - (stages - 1 - stage) * (left > stages))
        found.append(max(0, mine))
        left -= found[-1]
    return found


def run_through(stages: Sequence[StageSeconds], messages: Sequence[float], *, micros: int, ranks: int, schedule: str) -> float:
    """Seconds from the first forward to the last backward.

    `messages[i]` is from stage i to i+1 (and back). With more stages than ranks they are dealt out in turn, as the
    interleaved schedule does; stage i belongs to rank i mod ranks (for the V: there and back).
    """
    if ranks == 1:
        return micros * sum(stage.total for stage in stages)
    few = min(micros, _FILLED * ranks)
    seconds = _simulate(stages, messages, few, ranks, schedule)
    if few == micros:
        return seconds
    more = _simulate(stages, messages, few + ranks, ranks, schedule)
    return seconds + (more - seconds) / ranks * (micros - few)


def _simulate(stages: Sequence[StageSeconds], messages: Sequence[float], micros: int, ranks: int, schedule: str) -> float:
    if schedule == ZB_1P and len(stages) == ranks:
        return _ordered(stages, messages, orders("zero-bubble", ranks, ranks, micros))
    if schedule == ZB_2P and len(stages) == ranks:
        return _greedy(stages, messages, micros)
    if schedule == ZB_V and len(stages) == 2 * ranks:
        return _ordered(stages, messages, orders("zero-bubble-v", ranks, len(stages), micros))
    if schedule == GPIPE or len(stages) == ranks:
        name = "gpipe" if schedule == GPIPE else "1f1b"
        return _ordered(stages, messages, orders(name, ranks, len(stages), micros))
    whole = ceil(micros / ranks) * ranks
    seconds = _ordered(stages, messages, orders("interleaved", ranks, len(stages), whole))
    spare = (whole - micros) * max(_of_rank(stages, rank, ranks) for rank in range(ranks))
    return seconds - spare


def _of_rank(stages: Sequence[StageSeconds], rank: int, ranks: int) -> float:
    return sum(stage.total for stage in stages[rank::ranks])


def _ordered(stages: Sequence[StageSeconds], messages: Sequence[float], order: Sequence[Sequence[Event]]) -> float:
    """Every rank runs its events in its own order, each once its input has come."""
    done: dict[Event, float] = {}
    free = [0.0] * len(order)
    last = len(stages) - 1
    for rank, event in in_turn(order, last):
        need, stage = needs(event, last), stages[event.stage]
        ready = 0.0 if need is None else done[need] + (0.0 if need.stage == event.stage else messages[min(need.stage, event.stage)])
        long = {"F": stage.forward, "I": stage.inputs, "W": stage.weights}.get(event.kind, stage.inputs + stage.weights)
        done[event] = free[rank] = max(free[rank], ready) + long
    return max(free)


def _greedy(stages: Sequence[StageSeconds], messages: Sequence[float], micros: int) -> float:
    """Zero-bubble: backward of inputs first, then forwards while memory allows, weights' gradients when idle.

    A rank holds as many micro-batches as twice the depth of the pipeline, less one. A rank's next step begins when its
    own work is done, so that the longest rank counts, not the last one to finish.
    """
    ranks = len(stages)
    limit = [2 * ranks - 1] * ranks
    ahead = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    forwards, backwards, weights = [0] * ranks, [0] * ranks, [0] * ranks
    done_f = [[0.0] * micros for _ in range(ranks)]
    done_b = [[0.0] * micros for _ in range(ranks)]
    free = [0.0] * ranks
    begun = [0.0] * ranks
    while True:
        best: tuple[float, int, int] | None = None
        for rank in range(ranks):
            choice = _next(
                rank, ranks, micros, forwards, backwards, weights, done_f, done_b, free, messages, limit, ahead
            )
            if choice is not None and (best is None or choice < best):
                best = choice
        if best is None:
            return max(end - start for start, end in zip(begun, free, strict=True))
        start, what, rank = best
        stage = stages[rank]
        if what == 0:
            free[rank] = start + stage.inputs
            done_b[rank][backwards[rank]] = free[rank]
            backwards[rank] += 1
        elif what == 1:
            begun[rank] = begun[rank] if forwards[rank] else start
            free[rank] = start + stage.forward
            done_f[rank][forwards[rank]] = free[rank]
            forwards[rank] += 1
        else:
            free[rank] = start + stage.weights
            weights[rank] += 1


def _next(
    rank: int, ranks: int, micros: int, forwards: list[int], backwards: list[int], weights: list[int],
    done_f: list[list[float]], done_b: list[list[float]], free: list[float], messages: Sequence[float],
    limit: list[int], ahead: list[int],
) -> tuple[float, int, int] | None:  # fmt: skip
    """When this rank could start what, by preference: 0 inputs' gradients, 1 forward, 2 weights' gradients."""
    now, choices = free[rank], []
    micro = backwards[rank]
    if micro < forwards[rank]:
        if rank == ranks - 1:
            choices.append((max(now, done_f[rank][micro]), 0))
        elif backwards[rank + 1] > micro:
            choices.append((max(now, done_b[rank + 1][micro] + messages[rank]), 0))
    micro = forwards[rank]
    if micro < micros and micro - weights[rank] < limit[rank] and micro - backwards[rank] < ahead[rank]:
        if rank == 0:
            choices.append((now, 1))
        elif forwards[rank - 1] > micro:
            choices.append((max(now, done_f[rank - 1][micro] + messages[rank - 1]), 1))
    if weights[rank] < backwards[rank]:
        choices.append((now, 2))
    if not choices:
        return None
    start, what = min(choices)
    return start, what, rank
