"""A step whose blocks move their activations: when storages leave the device and come back, and what the copies take.

    forward     op  op ▼down  op  op ▼down ▽land            a storage goes down when it is saved; its memory is free where compute
    backward    ▲up  op  op ▽wait  op                       waits for that copy; it comes up, in new memory, one block ahead

The order is that of `runtime.offload.saved`: after every block compute waits for what should have gone by then if all went evenly
until forward is over, and in backward a little more than one block's is up, or as much as kept blocks have left room for.
What has not gone down when forward is over stays, and is not brought.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretell.lower.blocks import blocks_of
from foretell.lower.fsdp.sharded import block_of
from foretell.lower.steps import with_evaluation
from foretell.plan.blocks import expand
from foretell.plan.types import AWAY, Plan, moved_to
from foretell.trace import types
from foretell.trace.types import Op, Program, Ref, Storage, Trace

LEAST = 2**20
"""Bytes of a storage that is moved."""
DOWN, LAND, UP, WAIT = "foretell.down", "foretell.land", "foretell.up", "foretell.wait"
COPIES = "activation_copies"
"""In a trace's meta: some of its marks are copies."""
AHEAD = 1.25
"""Of what a block saves, how much is up in backward (`runtime.offload.saved`)."""
PAGE = 4096
_STAYS = frozenset({types.PARAMETER, types.BUFFER, types.INPUT, types.GRADIENT, types.OPTIMIZER, types.GATHERED, types.COMMUNICATION})
_CASTS = ("aten._to_copy.default",)


def moves(plan: Plan) -> bool:
    return any(residency.mode in AWAY for residency in plan.blocks.values())


# ---------------------------------------------------------------------- which storages, and when


@dataclass
class _Plot:
    """One micro-batch: who saves what, and what is to be put before and after which op."""

    ops: Sequence[Op]
    where: Sequence[str]
    late: int
    """Position of the first op of backward."""
    before: dict[int, list[Op]] = field(default_factory=dict)
    after: dict[int, list[Op]] = field(default_factory=dict)
    dies: dict[int, list[int]] = field(default_factory=dict)
    """Position → storages whose memory is free after it."""
    twins: dict[int, int] = field(default_factory=dict)
    """Storage that went down → the one it comes back in."""


def groups_of(trace: Trace, plan: Plan, name: str = "micro_first") -> dict[str, tuple[int, ...]]:
    """Block whose activations move → storages that it is the first to save, in the order it does."""
    plot = _plot(trace, trace.programs[name])
    return {block: tuple(found) for block, found in _saved(plot, trace, plan).items()}


def host_bytes(trace: Trace, plan: Plan) -> int:
    """Of host memory: all that is moved there at once; on the way to disk, twice what one block saves."""
    modes = _modes(trace, plan)
    sizes = {
        block: sum(-(-trace.storages[number].nbytes // PAGE) * PAGE for number in found) for block, found in groups_of(trace, plan).items()
    }
    passing = max((size for block, size in sizes.items() if modes[block] == "disk"), default=0)
    return sum(size for block, size in sizes.items() if modes[block] == "host") + 2 * passing


def away(trace: Trace, plan: Plan, *, watched: bool = True) -> Trace:
    """The trace of the same step with the activations of these blocks moved. `watched`: the run knows what is in memory, as it does
    where a device has an allocator of its own."""
    trace = with_evaluation(trace)  # which saves nothing
    storages, programs = dict(trace.storages), dict(trace.programs)
    for name, program in trace.programs.items():
        if name in ("micro_first", "micro_next"):
            plot = _plot(trace, program)
            saved = _saved(plot, trace, plan)
            _forward(plot, saved, trace, _modes(trace, plan), storages)
            _Up(plot, saved, trace, _modes(trace, plan), watched).run()
            programs[name] = Program(name, tuple(_written(plot)))
    return replace(trace, programs=programs, storages=storages, meta={**trace.meta, COPIES: True})


def _modes(trace: Trace, plan: Plan) -> dict[str, str]:
    return {block: moved_to(residency.mode) for block, residency in expand(plan.blocks, blocks_of(trace)).items()}


def _plot(trace: Trace, program: Program) -> _Plot:
    late = next((at for at, op in enumerate(program.ops) if op.phase in ("backward", "recompute")), len(program.ops))
    return _Plot(program.ops, block_of(program.ops, blocks_of(trace)), late)


def _saved(plot: _Plot, trace: Trace, plan: Plan) -> dict[str, list[int]]:
    """A block saves what its forward touches and its own backward touches again."""
    modes = _modes(trace, plan)
    born, dead = set[int](), set[int]()
    for op in plot.ops[: plot.late]:
        born.update(op.allocates)
        dead.update(op.frees)
    again: dict[str, set[int]] = {}
    for op, block in zip(plot.ops[plot.late :], plot.where[plot.late :], strict=True):
        again.setdefault(block, set()).update((*(ref.storage for ref in op.inputs), *op.frees))
    found: dict[str, list[int]] = {block: [] for block, mode in modes.items() if mode in AWAY}
    taken: set[int] = set()
    for op, block in zip(plot.ops[: plot.late], plot.where, strict=False):
        if block not in found:
            continue
        for number in (*(ref.storage for ref in op.inputs), *op.allocates):
            storage = trace.storages[number]
            if number in taken or number not in born or number in dead or number not in again.get(block, ()):
                continue
            if storage.nbytes >= LEAST and storage.role not in _STAYS and not storage.host:
                taken.add(number)
                found[block].append(number)
    return found


def _touched(plot: _Plot) -> dict[int, int]:
    """Storage → the last op of forward that has to do with it."""
    found: dict[int, int] = {}
    for at, op in enumerate(plot.ops[: plot.late]):
        found.update((number, at) for number in (*op.allocates, *(ref.storage for ref in (*op.inputs, *op.outputs))))
    return found


def _casts(plot: _Plot, trace: Trace) -> set[int]:
    """Copies of weights that autocast keeps until forward is over."""
    return {
        number for op in plot.ops[: plot.late] if op.name in _CASTS and trace.storages[op.inputs[0].storage].role == types.PARAMETER
        for number in op.allocates
    }  # fmt: skip


def _calls(plot: _Plot, modes: Mapping[str, str], begin: int, end: int) -> list[tuple[str, int, int]]:
    """Blocks in the order they run: where each begins and ends, in this part of the ops."""
    found: list[tuple[str, int, int]] = []
    for at in range(begin, end):
        block = plot.where[at]
        if block not in modes:
            continue
        if found and found[-1][0] == block:
            found[-1] = (block, found[-1][1], at)
        else:
            found.append((block, at, at))
    return found


def _forward(plot: _Plot, saved: Mapping[str, Sequence[int]], trace: Trace, modes: Mapping[str, str], storages: dict[int, Storage]) -> None:
    """Send storages down as their blocks save them, and let their memory go as the runtime does."""
    size = {number: trace.storages[number].nbytes for found in saved.values() for number in found}
    largest = max((sum(size[number] for number in found) for found in saved.values()), default=0)
    touched, casts = _touched(plot), _casts(plot, trace)
    flying: deque[tuple[int, int]] = deque()
    landed = 0

    def land(at: int, block: str) -> None:
        nonlocal landed
        _, number = flying.popleft()
        landed += size[number]
        plot.after.setdefault(at, []).append(_mark(LAND, number, block, "forward"))
        last = plot.late - 1 if number in casts else max(at, touched[number])
        plot.dies.setdefault(last, []).append(number)
        plot.twins[number] = max(storages) + 1
        storages[plot.twins[number]] = trace.storages[number]

    calls, sent = _calls(plot, modes, 0, plot.late), 0
    kept = sum(modes[block] == "keep" for block, _, _ in calls)
    for call, (block, begin, end) in enumerate(calls):
        waiting = set(saved.get(block, ()))
        for at in range(begin, end + 1):
            op = plot.ops[at]
            for number in (*(ref.storage for ref in op.inputs), *op.allocates) if waiting else ():
                if number not in waiting:
                    continue
                waiting.discard(number)
                plot.after.setdefault(at, []).append(_mark(DOWN, number, block, "forward"))
                flying.append((call, number))
        sent += sum(size[number] for number in saved.get(block, ()))
        kept -= modes[block] == "keep"
        due = max(sum(size.values()) * call / max(1, len(calls) - 1), sent - largest * max(1, kept - 1))
        while flying and flying[0][0] < call and landed < due:
            land(end, block)


class _Up:
    """What comes up in backward, and when: `runtime.offload.saved` does the same."""

    def __init__(self, plot: _Plot, saved: Mapping[str, Sequence[int]], trace: Trace, modes: Mapping[str, str], watched: bool) -> None:
        self.plot, self.saved, self.modes, self.watched = plot, saved, modes, watched
        self.size = {number: trace.storages[number].nbytes for number in plot.twins}
        self.largest = max((sum(trace.storages[number].nbytes for number in found) for found in saved.values()), default=0)
        self.order = list(dict.fromkeys(block for block, _, _ in _calls(plot, modes, 0, plot.late)))
        self.wants: dict[str, list[int]] = {}
        for at in range(plot.late, len(plot.ops)):
            here = self.wants.setdefault(plot.where[at], [])
            here += [number for number in dict.fromkeys(_touches(plot.ops[at])) if number in plot.twins and number not in here]
        self.levels, level = [0], 0
        for op in plot.ops:
            level += sum(trace.storages[number].nbytes for number in op.allocates) - sum(trace.storages[number].nbytes for number in op.frees)
            self.levels.append(level)
        self.away = sum(self.size.values())
        self.up: set[int] = set()
        self.up_bytes, self.ahead, self.done, self.here = 0, 0.0, -1, -1
        self.level: int | None = None

    def run(self) -> None:
        entered: set[str] = set()
        waited: set[int] = set()
        for at in range(self.plot.late, len(self.plot.ops)):
            block, op = self.plot.where[at], self.plot.ops[at]
            if block in self.modes and block not in entered:
                entered.add(block)
                self._enter(block, at)
            wanted = [number for number in dict.fromkeys(_touches(op)) if number in self.plot.twins]
            for number in wanted:
                self._bring(number, block, at)
            if wanted:
                self._pump(at)
            marks = self.plot.before.setdefault(at, []) if wanted else []
            marks += [_mark(WAIT, number, block, "backward") for number in wanted if number not in waited]
            waited.update(wanted)
            self.up_bytes -= sum(self.size[number] for number in op.frees if number in self.up)

    def _enter(self, block: str, at: int) -> None:
        self.level = self._alive(at) if self.level is None else self.level
        self.here = self.order.index(block)
        self.done += self.modes[block] == "keep"
        near = any(self.saved.get(one) for one in self.order[max(0, self.here - 1) : self.here + 1])
        self.ahead = AHEAD * self.largest if near else 0.0
        self._pump(at)

    def _pump(self, at: int) -> None:
        for block in reversed(self.order[: self.here + 1]):
            for number in self.wants.get(block, ()):
                if number in self.up:
                    continue
                if (self.up_bytes or not self.ahead) and self.up_bytes + self.size[number] > self.ahead + self._spare(at):
                    return
                self._bring(number, block, at)

    def _bring(self, number: int, block: str, at: int) -> None:
        if number not in self.up:
            self.up.add(number)
            self.up_bytes += self.size[number]
            self.away -= self.size[number]
            self.plot.before.setdefault(at, []).append(_mark(UP, number, block, "backward", allocates=(self.plot.twins[number],)))

    def _alive(self, at: int) -> int:
        return self.levels[at] - self.away

    def _spare(self, at: int) -> float:
        if not self.watched:
            return max(0, self.done) * self.largest
        assert self.level is not None
        return max(0, self.level - self._alive(at)) + max(0.0, self.up_bytes - self.ahead)


def _touches(op: Op) -> tuple[int, ...]:
    return (*(ref.storage for ref in op.inputs), *op.frees)


def _mark(name: str, number: int, block: str, phase: str, allocates: tuple[int, ...] = ()) -> Op:
    return Op(name=f"{name}:{number}", inputs=(), outputs=(), module=block, phase=phase, flops=0, allocates=allocates)


def _written(plot: _Plot) -> Iterable[Op]:
    def twin(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
        return tuple(Ref(plot.twins.get(ref.storage, ref.storage), ref.spec) for ref in refs)

    for at, op in enumerate(plot.ops):
        yield from plot.before.get(at, ())
        if at >= plot.late and plot.twins:
            frees = tuple(plot.twins.get(number, number) for number in op.frees)
            op = replace(op, inputs=twin(op.inputs), outputs=twin(op.outputs), frees=frees)
        marks = plot.after.get(at, ())
        dies = tuple(plot.dies.get(at, ()))
        if not marks:
            yield replace(op, frees=(*op.frees, *dies)) if dies else op
            continue
        yield op
        yield from marks[:-1]
        yield replace(marks[-1], frees=dies)
