"""Which device each rank of a mesh is on, from the rates between all pairs of devices (after Pipette).

    matrix of rates + what each axis sends ─► a first order: quickest devices side by side, heavy axes inside
                                           ─► swaps of devices and of whole groups, annealed with a fixed seed
                                           ─► branch and bound from there, where that ends: then it is the best of all

The seconds that are minimised are those of the messages of a step: on each axis the slowest group decides, since every
rank waits for it, and a group is as slow as its slowest pair: libraries choose rings by topology, not by measured
rates, so that the slowest pair is in use. Messages of different axes are added up. What overlaps compute is not known
here; give it a smaller `times`.

Equal nodes without a measured matrix need no search: the mesh already puts its inner axes side by side.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp

from foretell.errors import UserError
from foretell.hardware.types import Cluster
from foretell.plan.mesh import OWN_RANKS, groups
from foretell.plan.types import Mesh, Plan
from foretell.price.network.collectives import ALL_REDUCE, BROADCAST, P2P, reached
from foretell.simulate.parts import Collective

EXACT, SEARCHED, AS_IT_IS = "exact", "searched", "as it is"
MOST_FOR_EXACT = 16
"""Ranks up to which branch and bound is tried ..."""
MOST_TRIED = 60_000
"""... and the partial orders it may look at."""
MOST_DEVICES = 4096
"""A matrix of more pairs is not made."""
START_SECONDS = 10e-6
"""Assumed: seconds before the first byte of a message moves."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages that every group of one axis exchanges in a step."""

    axis: str
    operation: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or p2p (between neighbours on the axis)."""
    nbytes: float
    """The larger buffer of one message on one rank."""
    times: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """An order of devices, and what it gains."""

    order: tuple[int, ...]
    """Device of each rank: what `Plan.placement` takes."""
    seconds: float
    """Of the messages of a step."""
    seconds_before: float
    """The same with rank r on device r."""
    how: str
    """exact, searched or as it is."""

    @property
    def changes(self) -> bool:
        return self.seconds < self.seconds_before


def place(mesh: Mesh, traffic: Iterable[Traffic], rates: Sequence[Sequence[float]], *, seed: int = 0) -> Placement:
    """The order of devices with the least seconds of messages; `rates` are bytes per second from device to device."""
    world = mesh.world
    if len(rates) != world or any(len(row) != world for row in rates):
        raise UserError(
            f"a mesh of {world} ranks and a matrix of {len(rates)} devices do not match",
            f"a matrix of {world} rows of {world} rates",
        )
    for source, row in enumerate(rates):
        for target, rate in enumerate(row):
            if source != target and not 0 < rate <= float("inf"):
                raise UserError(f"the rate from device {source} to {target} is {rate}", "a number above 0")
    problem = _Problem(mesh, _checked(traffic, mesh), rates)
    plain = list(range(world))
    before = problem.seconds(plain)
    best = min((plain, problem.greedy()), key=problem.measure)
    best = problem.annealed(best, random.Random(seed))
    how = SEARCHED
    if world <= MOST_FOR_EXACT:
        better = problem.bounded(best)
        if better is not None:
            best, how = better, EXACT
    seconds = problem.seconds(best)
    if seconds >= before:
        best, seconds = plain, before
    return Placement(order=tuple(best), seconds=seconds, seconds_before=before, how=how)


def place_plan(plan: Plan, cluster: Cluster, traffic: Iterable[Traffic], *, seed: int = 0) -> tuple[Plan, Placement]:
    """The plan with the best placement on a cluster; as it is where all nodes are alike and nothing was measured."""
    world = plan.mesh.world
    alike = cluster.matrix is None and not cluster.groups
    if alike or world == 1 or world > MOST_DEVICES or world != cluster.count:
        order = plan.placement or tuple(range(world))
        return plan, Placement(order=order, seconds=0.0, seconds_before=0.0, how=AS_IT_IS)
    found = place(plan.mesh, traffic, rates_of(cluster), seed=seed)
    same = found.order == tuple(range(world))
    return plan.with_(placement=() if same else found.order), found


def traffic_of(collectives: Iterable[Collective]) -> tuple[Traffic, ...]:
    """What the messages of a costed plan (`RankCost.collectives`) are as traffic; those over all ranks do not matter."""
    found = []
    for one in collectives:
        operation = P2P if one.name in ("send", "receive") else one.name
        if one.axis in OWN_RANKS:
            found.append(Traffic(axis=one.axis, operation=operation, nbytes=one.nbytes, times=one.times))
    return tuple(found)


def rates_of(cluster: Cluster) -> tuple[tuple[float, ...], ...]:
    """Bytes per second between all pairs of devices: measured ones, else what their links reach."""
    if cluster.matrix is not None:
        return cluster.matrix
    where = [cluster.domain_of(rank) for rank in range(cluster.count)]
    parts = cluster.parts
    known: dict[tuple[tuple[int, int], tuple[int, int]], float] = {}
    rows = []
    for here in where:
        for there in set(where):
            if (here, there) not in known:
                known[here, there] = _rate(cluster, parts, here, there)
        rows.append(tuple(known[here, there] for there in where))
    return tuple(rows)


def _rate(cluster: Cluster, parts: Sequence[Cluster], here: tuple[int, int], there: tuple[int, int]) -> float:
    part = parts[here[0]]
    if here == there:
        link = part.intra
        return reached(link) * link.between_two / link.bytes_per_second if link is not None else float("inf")
    if here[0] != there[0]:
        part = cluster
    share, link = part.per_device_network_bytes_per_second, part.inter
    if share is None or link is None:
        raise UserError("it is not known what joins the nodes of the cluster", "give `inter`, such as Eth25, in the hardware file")
    return share * reached(link) / link.bytes_per_second


def _checked(traffic: Iterable[Traffic], mesh: Mesh) -> tuple[Traffic, ...]:
    found = tuple(traffic)
    for one in found:
        if one.axis not in OWN_RANKS:
            raise UserError(f"'{one.axis}' is no axis that sends", f"one of {', '.join(OWN_RANKS)}")
    return tuple(one for one in found if getattr(mesh, one.axis) > 1 and one.nbytes > 0 and one.times > 0)


class _CommGroup:
    """Positions that talk to each other, and how their slowest pair's rate becomes seconds."""

    __slots__ = ("axis", "fixed", "members", "pairs", "wire")

    def __init__(self, axis: int, members: tuple[int, ...], neighbours: bool, fixed: float, wire: float) -> None:
        self.axis, self.members, self.fixed, self.wire = axis, members, fixed, wire
        near = list(pairwise(members))
        self.pairs = near if neighbours else [(a, b) for i, a in enumerate(members) for b in members[i + 1 :]]


class _Problem:
    """One mesh, its messages and the devices' rates."""

    def __init__(self, mesh: Mesh, traffic: tuple[Traffic, ...], rates: Sequence[Sequence[float]]) -> None:
        self.mesh, self.world = mesh, mesh.world
        self.rates = [[min(rates[a][b], rates[b][a]) for b in range(self.world)] for a in range(self.world)]
        """Of the slower direction: rings go both ways, forward and backward messages too."""
        self.per_byte = [[1 / rate if rate else 0.0 for rate in row] for row in self.rates]
        self.groups: list[_CommGroup] = []
        self.kinds = sorted({(one.axis, one.operation == P2P) for one in traffic})
        for number, (axis, neighbours) in enumerate(self.kinds):
            mine = [one for one in traffic if (one.axis, one.operation == P2P) == (axis, neighbours)]
            fixed = sum(one.times * START_SECONDS for one in mine)
            wire = sum(one.times * one.nbytes * _wire(one.operation, getattr(mesh, axis)) for one in mine)
            self.groups += [_CommGroup(number, members, neighbours, fixed, wire) for members in groups(mesh, axis)]
        self.of: list[list[int]] = [[] for _ in range(self.world)]
        for index, group in enumerate(self.groups):
            for member in group.members:
                self.of[member].append(index)

    # ------------------------------------------------------------------ what an order costs

    def cost(self, group: _CommGroup, order: Sequence[int]) -> tuple[float, float]:
        """Seconds of a group by its slowest pair, and by its pairs on average."""
        per_byte = self.per_byte
        pairs = [per_byte[order[a]][order[b]] for a, b in group.pairs]
        return group.fixed + group.wire * max(pairs), group.fixed + group.wire * sum(pairs) / len(pairs)

    def seconds(self, order: Sequence[int]) -> float:
        return self.measure(order)[0]

    def measure(self, order: Sequence[int]) -> tuple[float, float]:
        """Seconds that count, and those of all groups by their average pair: of orders that are equally slow, the one
        that keeps nodes together is better."""
        return self._summed([self.cost(group, order) for group in self.groups])

    def _summed(self, costs: Sequence[tuple[float, float]]) -> tuple[float, float]:
        worst = [0.0] * len(self.kinds)
        average = 0.0
        for group, (cost, mean) in zip(self.groups, costs, strict=True):
            average += mean
            if cost > worst[group.axis]:
                worst[group.axis] = cost
        return sum(worst), average

    # ------------------------------------------------------------------ a first order

    def greedy(self) -> list[int]:
        """Clusters of devices grown axis by axis from the innermost: the nearest join first."""
        clusters = [[device] for device in range(self.world)]
        for axis in reversed(OWN_RANKS):
            size = getattr(self.mesh, axis)
            if size > 1:
                clusters = self._grown(clusters, size, chain=axis == "pp")
        return clusters[0]

    def _grown(self, clusters: list[list[int]], size: int, *, chain: bool) -> list[list[int]]:
        """Clusters joined `size` at a time; a chain needs only its neighbours near."""
        count = len(clusters)
        near = [[self._between(a, b) if a is not b else 0.0 for b in clusters] for a in clusters]
        left, found = set(range(count)), []
        for seed in sorted(range(count), key=lambda one: (sum(near[one]), one)):
            if seed not in left:
                continue
            joined = [seed]
            left.discard(seed)
            while len(joined) < size:
                looked = joined[-1:] if chain else joined
                best = max(left, key=lambda one: (min(near[one][other] for other in looked), -one))
                joined.append(best)
                left.discard(best)
            found.append([device for one in joined for device in clusters[one]])
        return found

    def _between(self, a: Sequence[int], b: Sequence[int]) -> float:
        """Of two clusters: the slowest of the pairs at the same place, which the outer axes join."""
        return min(self.rates[x][y] for x, y in zip(a, b, strict=True))

    # ------------------------------------------------------------------ swaps

    def annealed(self, start: list[int], draw: random.Random) -> list[int]:
        """Swaps of devices and of whole groups, worse ones less and less often; the best order that was seen."""
        if self.world < 2 or not self.groups:
            return start
        order, costs = list(start), [self.cost(group, start) for group in self.groups]
        now = best = self._summed(costs)
        kept = list(order)
        sizes = self._sizes()
        turns = max(600, min(12_000, 1_000_000 // self.world))
        heat = 0.1
        for turn in range(turns):
            size = draw.choice(sizes)
            one, other = draw.sample(range(self.world // size), 2)
            moved = [*range(one * size, (one + 1) * size), *range(other * size, (other + 1) * size)]
            self._swap(order, one * size, other * size, size)
            touched = {index for position in moved for index in self.of[position]}
            old = {index: costs[index] for index in touched}
            for index in touched:
                costs[index] = self.cost(self.groups[index], order)
            then = self._summed(costs)
            warm = heat * (1 - turn / turns)
            worse = (then[0] - now[0]) / now[0] + 0.1 * (then[1] - now[1]) / now[1]
            if worse <= 0 or (warm > 0 and draw.random() < exp(-worse / (warm * 0.1))):
                now = then
                if now < best:
                    best, kept = now, list(order)
            else:
                self._swap(order, one * size, other * size, size)
                for index, cost in old.items():
                    costs[index] = cost
        return kept

    def _sizes(self) -> list[int]:
        """How many neighbouring ranks move together: one, or a whole group of the inner axes."""
        sizes, product = [1], 1
        for axis in reversed(OWN_RANKS):
            product *= getattr(self.mesh, axis)
            if product < self.world and product not in sizes:
                sizes.append(product)
        return sizes

    @staticmethod
    def _swap(order: list[int], one: int, other: int, size: int) -> None:
        order[one : one + size], order[other : other + size] = order[other : other + size], order[one : one + size]

    # ------------------------------------------------------------------ all orders

    def bounded(self, start: list[int]) -> list[int] | None:
        """The best of all orders, by branch and bound from a good one; None where that takes too long.

        Seconds only grow as more ranks get a device, so that a partial order that is no better than the best is left.
        Of devices that can change places without any difference, only the first is tried.
        """
        classes = self._alike()
        best, kept = self.seconds(start), list(start)
        order = [-1] * self.world
        used = [False] * self.world
        tried = 0
        worst = [0.0] * len(self.kinds)

        def go(position: int, worst: list[float]) -> bool:
            nonlocal best, kept, tried
            if position == self.world:
                best, kept = sum(worst), list(order)
                return True
            seen = set()
            for device in range(self.world):
                if used[device] or classes[device] in seen:
                    continue
                seen.add(classes[device])
                tried += 1
                if tried > MOST_TRIED:
                    return False
                order[position] = device
                grown = self._grown_by(position, order, worst)
                if sum(grown) < best * (1 - 1e-12):
                    used[device] = True
                    ended = go(position + 1, grown)
                    used[device] = False
                    if not ended:
                        return False
            order[position] = -1
            return True

        return kept if go(0, worst) else None

    def _grown_by(self, position: int, order: Sequence[int], worst: Sequence[float]) -> list[float]:
        found = list(worst)
        for index in self.of[position]:
            group = self.groups[index]
            slowest = min(
                (self.rates[order[a]][order[b]] for a, b in group.pairs if a <= position and b <= position),
                default=float("inf"),
            )
            found[group.axis] = max(found[group.axis], group.fixed + group.wire / slowest)
        return found

    def _alike(self) -> list[int]:
        """Device → the first device it can change places with."""
        found: list[int] = []
        for device in range(self.world):
            same = next((other for other in dict.fromkeys(found) if self._interchangeable(device, other)), device)
            found.append(same)
        return found

    def _interchangeable(self, a: int, b: int) -> bool:
        return all(self.rates[a][other] == self.rates[b][other] for other in range(self.world) if other not in (a, b))


def _wire(operation: str, ranks: int) -> float:
    """Bytes over each link, over the buffer's bytes."""
    if operation in (P2P, BROADCAST):
        return 1.0
    return (2.0 if operation == ALL_REDUCE else 1.0) * (ranks - 1) / ranks
