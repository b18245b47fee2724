"""Seconds and bytes of one piece of a step in one residency, on one kind of device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from foretell.lower.fsdp.units import COLLECTIVES
from foretell.price.energy import DENSE_FLOPS_PER_BYTE as DENSE
from foretell.price.energy import GATHERS
from foretell.price.host import AGAIN, WATCHED
from foretell.price.kernels.features import FREE, Shape
from foretell.price.kernels.shapes import short
from foretell.price.network.overlap import LOST_OTHERS
from foretell.price.speeds import axis_of, message
from foretell.price.time import COMPUTE_KINDS, MARKS, Machine, op_prices, shape_of
from foretell.search.block_costs.compiled import CompileGain
from foretell.search.block_costs.residency import Phases
from foretell.simulate.memory.replay import Sizes
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, Trace

DETACH = "aten.detach.default"
ROUND = 512
PLAIN_HOST = (1.0, 1.0, 1.0)
SPLIT_HOST = (1.5, 1.3, 2.0)
"""How much longer the host takes over forward and backward of a split model, its views of parts included: counted in
traces of GPT-2 over 2 ranks and Llama 3 8B over 8. The third: how many times as many ops forward has, views included."""
SHARED_HOST, SHARED_SPLIT_HOST = (1.38, 1.22, 1.83), (2.15, 1.72, 3.8)
SPREAD_HOST = (1.03, 1.01, 1.09)
"""The same where ranks share positions, and where layers are split besides: traces of GPT-2 and Llama 3.2 1B, cp 2 and 8.
Where they share experts: traces of a small Mixtral, ep 2 and 4."""


Same = tuple[str, int, int]
"""Name of an op, and which tuples of tensors it has."""


class Message(NamedTuple):
    """A message between the ranks of a split model."""

    kind: str
    nbytes: int
    times: int
    axis: str = "tp"


@dataclass(frozen=True)
class Half:
    """Forward, or backward with what is computed again."""

    seconds: float
    """On the device, messages apart."""
    host: float
    product: float
    attention: float
    messages: tuple[Message, ...]
    peak: int
    """Most bytes above what was there when it began."""
    net: int
    """Bytes that are there when it ends and were not when it began; below zero where it frees."""
    flops: float
    """Seconds that products would take at the device's peak rates."""
    moved: float
    """Bytes read and written."""


@dataclass(frozen=True)
class Work:
    """A piece of a step in one residency."""

    forward: Half
    backward: Half
    again: float
    """Seconds of `backward` that compute again what forward did."""
    gradients: int
    """Bytes of whole gradients that backward makes, part of its `net`."""
    weights_seconds: float
    """Seconds of `backward` that make gradients of weights alone."""
    both_seconds: float
    """Seconds of ops that make gradients of weights and of inputs."""
    left: int = 0
    """Bytes that stand between gradients of inputs and those of weights, where the two are apart."""
    lingering: int = 0
    """Bytes that go when all of forward has ended."""


class Prices:
    """Prices ops on one machine, and walks over their memory."""

    def __init__(self, machine: Machine | None, sizes: Sizes) -> None:
        self.machine, self.sizes = machine, sizes
        self._cool = replace(machine, clocks=None) if machine is not None else None
        """Prices of single ops, before what is computed around them slows them down."""
        self._known: dict[Shape, tuple[str, float]] = {}
        self._same: dict[Same, tuple[Op, str, float]] = {}
        """The same ops come back in each residency, on the same tuples of tensors."""
        self._scratch: dict[Same, tuple[Op, int]] = {}
        self._issued: dict[tuple[str, str], float] = {}

    def of(self, programs: Iterable[Sequence[Op]]) -> dict[int, tuple[str, float]]:
        """Family and seconds of every op, by its id."""
        if self.machine is None:
            return {id(op): ("", 0.0) for ops in programs for op in ops}
        found: dict[int, tuple[str, float]] = {}
        left: list[Op] = []
        for ops in programs:
            for op in ops:
                same = self._same.get((op.name, id(op.inputs), id(op.outputs)))
                if same is not None:
                    found[id(op)] = same[1:]
                else:
                    left.append(op)
        shapes = {id(op): shape_of(op) for op in left}
        known = self._known
        fresh = [shape for shape in dict.fromkeys(shapes.values()) if shape not in known]
        if fresh:
            ops = tuple(map(_bare, fresh))
            run = Trace(programs={"": Program("", ops)}, schedule={"steady_step": (("", 1),)}, storages={}, resident=())
            prices = op_prices(run, self._cool or self.machine)
            known.update((shape, prices[id(op)]) for shape, op in zip(fresh, ops, strict=True))
        for op in left:
            found[id(op)] = known[shapes[id(op)]]
            self._same[op.name, id(op.inputs), id(op.outputs)] = (op, *found[id(op)])
        return found

    def beside(self, op: Op) -> float:
        """How much longer an op that was priced takes beside a collective."""
        return self._cool.beside.get(shape_of(op), LOST_OTHERS) if self._cool is not None else 0.0

    def host(self, ops: Sequence[Op]) -> float:
        """Host seconds, as `HostModel.issues` counts them."""
        if self.machine is None:
            return 0.0
        model, total, where, known = self.machine.host, 0.0, None, self._issued
        for op in ops:
            phase = op.phase
            if phase in ("forward", "recompute"):
                if op.module != where:
                    total += model.weights["module"]
                where = op.module
            seconds = known.get((op.name, phase))
            if seconds is None:
                seconds = model.issue(op)
                if not short(op.name).startswith(("_foreach", "_fused", "_cudnn")):
                    known[op.name, phase] = seconds
            total += seconds
        return total

    def work(self, phases: Phases, storages: Mapping[int, Storage], *, host: tuple[float, float, float] = PLAIN_HOST) -> Work:
        """What a piece costs in one residency; `host`: how much longer the host takes, where views of parts are left out."""
        known = self.of((phases.forward, phases.again, phases.backward))
        gradients = {n for op in phases.backward for n in op.allocates if storages[n].role == types.GRADIENT}
        weights, both, left = self._weights_share(phases.backward, gradients, storages, known)
        forward = self._half(phases.forward, storages, known)
        backward = self._half((*phases.again, *phases.backward), storages, known)
        if phases.again and self.machine is not None:
            each, late = self.machine.host.weights["view"], self.machine.host.weights["backward_view"]
            again = self.machine.host.slowness * AGAIN
            views = (host[2] - 1) * len(phases.again) * again / host[1]
            backward = replace(backward, host=backward.host + _saved(phases, storages) * (each + late + again) + views)
            if phases.cached:  # what is cached is detached, instead of what autograd alone would keep
                more = phases.cached - sum(op.name == DETACH for op in phases.forward)
                asked = 2 * (len(phases.forward) * host[2] + more) * self.machine.host.slowness * WATCHED
                forward = replace(forward, host=forward.host + more * each + asked / host[0])
        forward = replace(forward, host=forward.host * host[0])
        backward = replace(backward, host=backward.host * host[1])
        return Work(
            forward=forward, backward=backward,
            again=sum(known[id(op)][1] for op in phases.again),
            gradients=sum(rounded(storages[n].nbytes) for n in gradients), weights_seconds=weights, both_seconds=both,
            left=left, lingering=sum(rounded(storages[n].nbytes) for n in phases.lingering),
        )  # fmt: skip

    def _half(self, ops: Sequence[Op], storages: Mapping[int, Storage], known: Mapping[int, tuple[str, float]]) -> Half:
        seconds = {"": 0.0, "gemm": 0.0, "attention": 0.0}
        sent: dict[tuple[str, int, str], int] = {}
        flops = moved = 0.0
        for op in ops:
            if op.name in COLLECTIVES:
                key = (op.name.removeprefix("foretell."), message(op), axis_of(op))
                sent[key] = sent.get(key, 0) + 1
            elif op.name not in MARKS and not op.name.endswith("_wait"):
                family, value = known[id(op)]
                seconds[""] += value
                if family in COMPUTE_KINDS:
                    kind = "attention" if family == "attention" else "gemm"
                    seconds[kind] += value
                one, two = self._load(op)
                flops, moved = flops + one, moved + two
        peak, net = self.walk(ops, storages)
        return Half(
            seconds=seconds[""], host=self.host(ops), product=seconds["gemm"], attention=seconds["attention"],
            messages=tuple(Message(*key[:2], times, key[2]) for key, times in sent.items()), peak=peak, net=net, flops=flops, moved=moved,
        )  # fmt: skip

    def _load(self, op: Op) -> tuple[float, float]:
        name = short(op.name)
        if name in FREE or self.machine is None:
            return 0.0, 0.0
        moved = 2.0 * op.bytes_written if name in GATHERS else float(op.bytes_read + op.bytes_written)
        if name.startswith(("_fused", "_foreach")) and not op.outputs:
            moved = 1.75 * op.bytes_read
        if not op.flops or op.flops <= DENSE * moved:
            return 0.0, moved
        dtype = op.inputs[1 if name == "addmm" else 0].spec.dtype
        return op.flops / self.machine.ops.device.peak(dtype), moved

    @staticmethod
    def _weights_share(
        ops: Sequence[Op], gradients: set[int], storages: Mapping[int, Storage], known: Mapping[int, tuple[str, float]]
    ) -> tuple[float, float, int]:
        """Seconds of ops that make gradients of weights alone, and of those that make inputs' too; and bytes that the
        latter leave to the former."""
        born = {number for op in ops for number in op.allocates}
        gone = {number for op in ops for number in op.frees}
        outgoing = (born - gone - gradients) | {r.storage for op in ops for r in op.outputs if r.storage not in born}
        first, second = leading_to(ops, outgoing, born), leading_to(ops, gradients, born)
        alone = both = 0.0
        made: set[int] = set()
        read: set[int] = set()
        for position, op in enumerate(ops):
            if position in second and position not in first:
                alone += known[id(op)][1]
                read.update(ref.storage for ref in op.inputs)
                continue
            made.update(op.allocates)
            if set(op.allocates) & gradients:
                both += known[id(op)][1]
                read.update(ref.storage for ref in op.inputs)
        return alone, both, sum(rounded(storages[number].nbytes) for number in made & read)

    def walk(self, ops: Sequence[Op], storages: Mapping[int, Storage]) -> tuple[int, int]:
        """Most bytes above the start, and bytes at the end."""
        live = peak = 0
        for op in ops:
            for number in op.allocates:
                storage = storages[number]
                if not storage.host:
                    live += -(-storage.nbytes // ROUND) * ROUND
            known = self._scratch.get((op.name, id(op.inputs), id(op.outputs)))
            beside = known[1] if known is not None else self._beside(op)
            if live + beside > peak:
                peak = live + beside
            for number in op.frees:
                storage = storages[number]
                if not storage.host:
                    live -= -(-storage.nbytes // ROUND) * ROUND
        return peak, live

    def _beside(self, op: Op) -> int:
        """Most bytes that an op takes besides its outputs."""
        events = self.sizes.events(Program("", (op,)))
        found = 0
        for _, stages, extra in events:
            found = extra + max((sum(map(rounded, stage)) for stage in stages), default=0)
        self._scratch[op.name, id(op.inputs), id(op.outputs)] = (op, found)
        return found


def _bare(shape: Shape) -> Op:
    """An op of this shape, each tensor in a storage of its own."""
    refs = [Ref(number, spec) for number, spec in enumerate((*shape.inputs, *shape.outputs))]
    count = len(shape.inputs)
    return Op(shape.name, tuple(refs[:count]), tuple(refs[count:]), "", "", None, (), (), shape.attrs)


def _saved(phases: Phases, storages: Mapping[int, Storage]) -> int:
    """Tensors that backward finds again and that have a gradient: a checkpoint hands each of them over once more, detached."""
    mine = {number for number, one in storages.items() if one.role == types.PARAMETER}
    for op in phases.forward:
        if op.outputs and any(ref.storage in mine for ref in op.inputs):
            mine.add(op.outputs[0].storage)  # statistics and masks, which come after it, have none
    handed = sum(ref.storage in mine for op in phases.backward if short(op.name) not in FREE for ref in op.inputs)
    return max(0, handed - sum(op.name == DETACH for op in phases.again))


def leading_to(ops: Sequence[Op], wanted: Iterable[int], born: set[int]) -> set[int]:
    """Positions of ops on the way to some storages."""
    needed, found = set(wanted), set()
    for position in range(len(ops) - 1, -1, -1):
        if any(ref.storage in needed for ref in ops[position].outputs):
            found.add(position)
            needed.update(ref.storage for ref in ops[position].inputs if ref.storage in born)
    return found


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND) * ROUND


def scaled(work: Work, share: CompileGain) -> Work:
    """The same, compiled."""
    forward = _scaled(work.forward, share.forward, share.host_forward)
    backward = _scaled(work.backward, share.backward, share.host_backward)
    less = round(max(0, work.forward.net) * (1 - share.kept))
    forward = replace(forward, net=forward.net - less, peak=max(forward.peak - less, 0))
    backward = replace(backward, net=backward.net + less)
    return replace(
        work, forward=forward, backward=backward, again=work.again * share.backward,
        weights_seconds=work.weights_seconds * share.backward, both_seconds=work.both_seconds * share.backward,
    )  # fmt: skip


def _scaled(half: Half, share: float, host: float) -> Half:
    return replace(
        half, seconds=half.seconds * share, product=min(half.product, half.seconds * share),
        attention=half.attention * min(1.0, share), host=half.host * host,
    )  # fmt: skip
