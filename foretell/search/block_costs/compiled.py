"""How much torch.compile makes of a model: ratios of seconds and bytes, from a short stack of its blocks.

A run of alike blocks is shortened to two and to three of them: what one more block costs, compiled and not, is the
ratio for blocks; what is left is that for what runs before and after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretell.lower.compiling import compiled
from foretell.price.host import ENTERED, wholly_compiled
from foretell.price.time import Machine, op_prices
from foretell.search.block_costs.ops import kinds_of, owners
from foretell.trace.inductor.compiled import breaks
from foretell.trace.types import Op, Program, Ref, Trace

_LATE = ("backward", "recompute")


@dataclass(frozen=True)
class CompileGain:
    """Compiled over not compiled."""

    forward: float = 1.0
    backward: float = 1.0
    host_forward: float = 1.0
    host_backward: float = 1.0
    kept: float = 1.0
    """Bytes kept from forward to backward."""


@dataclass(frozen=True)
class Compiled:
    """What compiling changes for blocks, and for the rest of a micro-batch."""

    block: CompileGain = CompileGain()
    rest: CompileGain = CompileGain()


def judged(trace: Trace, machine: Machine, way: str) -> Compiled:
    """Ratios of a traced step, compiled that way."""
    found = []
    for keep in (2, 3):
        short = shortened(trace, keep)
        found.append((_sums(short, machine), _sums(compiled(short, way), machine)))
    (plain, quick), (plain_more, quick_more) = found
    if plain_more[0] <= plain[0]:  # no run of blocks is that long
        both = _ratios(plain, quick)
        return Compiled(both, both)
    blocks = _ratios(_less(plain_more, plain), _less(quick_more, quick))
    two = _less(plain_more, plain), _less(quick_more, quick)
    rest = _ratios(_less(plain, two[0], 2), _less(quick, two[1], 2))
    return Compiled(blocks, rest)


def entered(trace: Trace, way: str) -> dict[str, object]:
    """What a stack of merged ops says of the model it stands for, where that is compiled as a whole."""
    return {ENTERED: {"cuda_graphs": way == "graphs", "breaks": breaks(trace)}} if way in ("model", "graphs") else {}


Sums = tuple[float, float, float, float, float]


def _less(one: Sums, other: Sums, times: int = 1) -> Sums:
    a, b, c, d, e = (x - times * y for x, y in zip(one, other, strict=True))
    return a, b, c, d, e


def _ratios(plain: Sums, quick: Sums) -> CompileGain:
    values = [min(1.5, max(0.1, q / p)) if p > 1e-9 else 1.0 for p, q in zip(plain, quick, strict=True)]
    return CompileGain(*values)


def _sums(trace: Trace, machine: Machine) -> Sums:
    """Seconds and host seconds of forward and backward, and bytes kept between them."""
    ops = trace.programs["micro_first"].ops
    prices = op_prices(trace, machine)
    seconds, host = [0.0, 0.0], [0.0, 0.0]
    for op, asking in zip(ops, machine.host.issues(ops, compiled=wholly_compiled(trace)), strict=True):
        late = op.phase in _LATE
        seconds[late] += prices[id(op)][1]
        host[late] += asking
    return seconds[0], seconds[1], host[0], host[1], float(_kept(ops, trace))


def _kept(ops: Sequence[Op], trace: Trace) -> int:
    alive: set[int] = set()
    for op in ops:
        if op.phase in _LATE:
            break
        alive.update(op.allocates)
        alive.difference_update(op.frees)
    return sum(trace.storages[number].nbytes for number in alive)


def shortened(trace: Trace, keep: int) -> Trace:
    """The step with at most `keep` blocks of each run of alike ones: the first and the last of it."""
    meta = trace.meta.get("blocks", ())
    assert isinstance(meta, Sequence)
    blocks = list(meta)
    ops = trace.programs["micro_first"].ops
    owner = owners(ops, blocks)
    kinds, _ = kinds_of(ops, owner, blocks)
    mine: dict[str, tuple[list[Op], list[Op]]] = {block: ([], []) for block in blocks}
    for op, name in zip(ops, owner, strict=True):
        if name in mine:
            mine[name][op.phase in _LATE].append(op)
    dropped: set[str] = set()
    names: dict[int, int] = {}
    start = 0
    while start < len(blocks):
        end = start
        while end + 1 < len(blocks) and kinds[end + 1] == kinds[start]:
            end += 1
        if end - start + 1 > keep:
            first, last = start + keep - 1, end - 1  # dropped: first … last
            dropped.update(blocks[first : last + 1])
            _twins(mine[blocks[last]][0], mine[blocks[first - 1]][0], names)
            _twins(mine[blocks[first]][1], mine[blocks[last + 1]][1], names)
        start = end + 1

    def of(ref: Ref) -> Ref:
        return Ref(names.get(ref.storage, ref.storage), ref.spec)

    kept = tuple(
        replace(
            op, inputs=tuple(map(of, op.inputs)), outputs=tuple(map(of, op.outputs)),
            frees=tuple(names.get(number, number) for number in op.frees),
        )
        for op, name in zip(ops, owner, strict=True) if name not in dropped
    )  # fmt: skip
    program = Program("micro_first", kept)
    about = {**trace.meta, "blocks": [block for block in blocks if block not in dropped]}
    return replace(trace, programs={"micro_first": program}, schedule={"steady_step": (("micro_first", 1),)}, meta=about)


def _twins(ops: Sequence[Op], like: Sequence[Op], names: dict[int, int]) -> None:
    """Storages of a dropped block → those of a kept one that take their place."""
    for one, two in zip(ops, like, strict=True):
        names.update(zip(one.allocates, two.allocates, strict=True))
