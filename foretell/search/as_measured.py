"""A run is slower than its plan predicted: the planner asked again, with the machine as the run found it.

    seconds of its steps, those in messages ─► work × f, links ÷ g: the plan is predicted as long as it takes ─► the search ─► a better plan, or none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.profile import Profile
from foretell.hardware.types import Cluster, Link
from foretell.plan.recipe import source_of
from foretell.plan.types import Plan
from foretell.price.calibrate.corrections import COMPUTE, HOST, MEMORY, bounded, corrected
from foretell.search.other_ranks import PATIENCE_SECONDS, wishes_of
from foretell.search.profiles.learn import predictor_on
from foretell.search.solve.choose import choose
from foretell.simulate.plan import Options

LEAST_GAIN = 0.05
"""Share of a step that another plan must be predicted to save."""
NEAR = 0.2
"""A machine whose prediction for the plan is further from what was measured is not understood."""
BOUNDS = (0.05, 1000.0)
ROUNDS, HALVINGS = 4, 12


@dataclass(frozen=True, kw_only=True)
class SlowStep:
    """What a run measured of its steps."""

    seconds: float
    message_seconds: float = 0.0
    """Of that, what the rank that waits least waits for messages: the transfers themselves."""


@dataclass(frozen=True, kw_only=True)
class Replanned:
    """The answer: another plan, or why there is none."""

    plan: Plan | None
    why: str
    work: float = 1.0
    """How much longer than the profile says everything but messages takes."""
    messages: float = 1.0
    now_seconds: float | None = None
    """Predicted for the plan of the run, with the machine as measured."""
    best_seconds: float | None = None

    def words(self, measured: float) -> str:
        """Why the run goes over."""
        assert self.now_seconds is not None and self.best_seconds is not None
        slow = f"steps take {measured * 1e3:.3g} ms, longer than predicted, and with the machine as measured"
        return f"{slow} {self.best_seconds * 1e3:.3g} ms are predicted instead of {self.now_seconds * 1e3:.3g}"


def replanned(plan: Plan, seen: SlowStep, ranks: Sequence[int]) -> Replanned:
    """A plan for one of these numbers of ranks that is predicted to be at least `LEAST_GAIN` quicker on the machine as measured."""
    cluster = parse(plan.hardware)
    profile = find_profile(cluster.device.name)
    if profile is None:
        return Replanned(plan=None, why=f"nothing is known of the speed of {cluster.device.name}")
    try:
        machine = _as_measured(plan, cluster, profile, seen)
        if isinstance(machine, str):
            return Replanned(plan=None, why=machine)
        found = choose(
            source_of(plan), machine.cluster, plan.hardware, wishes_of(plan, ranks, plan.micro_batch), exact=None, patience=PATIENCE_SECONDS,
            options=Options(profile_of=lambda name: machine.profile if name == profile.device else find_profile(name)),
        )  # fmt: skip
    except UserError as error:
        return Replanned(plan=None, why=error.problem)
    best = found.best.plan if found.best is not None else None
    seconds = best.predicted.get("step_seconds") if best is not None else None
    known = Replanned(plan=None, why="", work=machine.work, messages=machine.messages, now_seconds=machine.seconds, best_seconds=seconds)
    if best is None or seconds is None or seconds > (1 - LEAST_GAIN) * machine.seconds:
        said = f"the best takes {seconds * 1e3:.3g} ms and this one {machine.seconds * 1e3:.3g}" if seconds is not None else "none was found"
        return replace(known, why=f"no plan is predicted to be {LEAST_GAIN:.0%} quicker on this machine as measured: {said}")
    return replace(known, plan=best)


@dataclass(frozen=True, kw_only=True)
class _Machine:
    cluster: Cluster
    profile: Profile
    work: float
    messages: float
    seconds: float
    """Predicted for the plan."""


def _as_measured(plan: Plan, cluster: Cluster, profile: Profile, seen: SlowStep) -> _Machine | str:
    """Factors on work and on messages with which the plan is predicted to take what it takes; in a few rounds, since a step is no plain sum."""
    work, best, predict = 1.0, None, predictor_on(plan, cluster)

    def of(messages: float) -> tuple[_Machine, float]:
        """The machine with this factor and the work of now, and seconds of messages that show."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        tried, slower = corrected(profile, dict.fromkeys((COMPUTE, MEMORY, HOST), work), run="this run", date=date), _slower(cluster, messages)
        time = predict(tried, slower)
        return _Machine(cluster=slower, profile=tried, work=work, messages=messages, seconds=time.step_seconds), time.exposed_communication_seconds

    for _ in range(ROUNDS):
        machine, exposed = of(1.0)
        low, high = 1.0, BOUNDS[1]
        for _ in range(HALVINGS if exposed < seen.message_seconds else 0):  # longer messages show more, though not at first where others hide them
            middle = (low * high) ** 0.5
            machine, exposed = of(middle)
            low, high = (middle, high) if exposed < seen.message_seconds else (low, middle)
        if best is None or abs(machine.seconds / seen.seconds - 1) < abs(best.seconds / seen.seconds - 1):
            best = machine
        work = bounded(work * (seen.seconds - seen.message_seconds) / max(1e-9, machine.seconds - exposed), BOUNDS)
    assert best is not None
    if abs(best.seconds / seen.seconds - 1) > NEAR:
        return (f"steps take {seen.seconds * 1e3:.3g} ms, and no factor on what is known of the machine predicts more or less than "
                f"{best.seconds * 1e3:.3g} ms for them")  # fmt: skip
    return best


def _slower(cluster: Cluster, factor: float) -> Cluster:
    """Links that take so many times as long; measured rates too."""

    def slower(link: Link | None) -> Link | None:
        if link is None:
            return None
        pair = link.pair_bytes_per_second
        return replace(
            link, bytes_per_second=link.bytes_per_second / factor, latency_seconds=link.latency_seconds * factor,
            pair_bytes_per_second=pair / factor if pair is not None else None,
        )  # fmt: skip

    if factor == 1:
        return cluster
    rates = cluster.matrix or (_rates(cluster) if cluster.device.backend != "cpu" and cluster.count > 1 and not cluster.groups else None)
    matrix = tuple(tuple(one / factor for one in row) for row in rates) if rates is not None else None
    return replace(cluster, intra=slower(cluster.intra), inter=slower(cluster.inter), matrix=matrix)


def _rates(cluster: Cluster) -> tuple[tuple[float, ...], ...] | None:
    """Bytes per second from device to device: a table of collectives that others measured says nothing about links that are slow here."""
    if cluster.intra is None or (cluster.nodes > 1 and cluster.inter is None):
        return None
    node, across = cluster.devices_per_node, cluster.inter.bytes_per_second if cluster.inter is not None else 0.0
    every = range(cluster.count)
    return tuple(tuple(cluster.intra.between_two if one // node == other // node else across for other in every) for one in every)
