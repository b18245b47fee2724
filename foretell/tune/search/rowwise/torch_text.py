"""A row-wise program as plain torch: rows in chunks that stay in a cache, results written over what is not needed any more.

Gradients are computed chunk by chunk from the inputs, which are all that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.tune.search.rowwise.derive import RowBackward, backward_of
from foretell.tune.search.rowwise.program import (
    BINARY,
    COLSUM,
    COLUMN,
    COMPARED,
    CONST,
    FULL,
    INPUT,
    ROW,
    ROWMAX,
    ROWSUM,
    UNARY,
    WHERE,
    WIDTH,
    NotRowWise,
    RowNode,
    RowProgram,
    last_uses,
    needed,
    numbers,
)
from foretell.tune.search.rowwise.wrapped import Pieces, wrapped
from foretell.tune.search.space import Axis, Config, ConfigSpace

DOT = "dot"
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_POWERS = {"sqrt": "{0} ** 0.5", "rsqrt": "{0} ** -0.5", "neg": "-{0}"}
_COMPARED = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}


@dataclass(frozen=True)
class TorchRows:
    """The template."""

    program: RowProgram
    source: str
    """Text of the task, whose module is kept with its parameters."""
    guarded: bool = False
    name: str = "rows in torch"
    compiles: bool = False

    @property
    def space(self) -> ConfigSpace:
        chunk = Axis("chunk_kib", (0, 16, 32, 64, 128, 256, 512, 1024, 4096), 256)
        return ConfigSpace((chunk, Axis("reuse", (False, True), True), Axis("dot", (False, True), False)))

    def hopeless(self, config: Config) -> str:
        return ""

    def text(self, config: Config) -> str:
        back = backward_of(self.program)
        body = Pieces(imports="", kernels="", forward=_forward(self.program, config), backward=_backward(self.program, back, config))
        return wrapped(self.program, back, self.source, body, guarded=self.guarded)


def _forward(program: RowProgram, config: Config) -> list[str]:
    made = [f"y{place} = {_empty(program, output, place)}" for place, output in enumerate(program.outputs)]
    nodes = _dotted(program.nodes, config)
    order = needed(nodes, program.outputs)
    body = _emitted(nodes, order, {out: f"y{place}" for place, out in enumerate(program.outputs)}, config)
    results = ", ".join(f"y{place}" for place in range(len(program.outputs)))
    return [*made, *_chunks(config), *_indented(_slices(program, order, nodes)), *_indented(body), f"return {results},"]


def _backward(program: RowProgram, back: RowBackward, config: Config) -> list[str]:
    made: list[str] = []
    targets: dict[int, list[tuple[int, str]]] = {}
    sums: list[tuple[int, int]] = []
    for place, one in enumerate(back.gradients):
        if one is None:
            continue
        kind = program.inputs[place].kind
        if kind in (FULL, ROW):
            made.append(f"d{place} = torch.empty_like(x{place})")
            targets.setdefault(one, []).append((place, kind))
        else:
            made.append(f"d{place} = torch.zeros({'width' if kind == COLUMN else '()'}, dtype=torch.float32, device=device)")
            sums.append((place, one))
    nodes = _dotted(back.nodes, config)
    order = needed(nodes, back.wanted)
    names = {one: f"d{some[0][0]}" for one, some in targets.items() if back.nodes[one].kind == some[0][1]}
    body = _emitted(nodes, order, names, config)
    for one, some in targets.items():
        body += [f"d{place}[a:b] = v{one}" for place, _ in some if names.get(one) != f"d{place}"]
    body += [f"d{place} += v{one}" for place, one in sums]
    return [*made, *_chunks(config), *_indented(_slices(program, order, nodes)), *_indented(body)]


def _empty(program: RowProgram, output: int, place: int) -> str:
    shape = "(rows, width)" if program.nodes[output].kind == FULL else "(rows, 1)"
    return f"torch.empty({shape}, dtype=dtype, device=device)"


def _chunks(config: Config) -> list[str]:
    if not config["chunk_kib"]:
        return ["for a, b in ((0, rows),):"]
    return [f"step = max(1, {int(config['chunk_kib']) * 256} // max(1, width))", "for a in range(0, rows, step):", "    b = a + step"]


def _slices(program: RowProgram, order: Sequence[int], nodes: Sequence[RowNode]) -> list[str]:
    """Inputs of a chunk, wide."""
    found = []
    count = len(program.inputs)
    for one in order:
        node = nodes[one]
        if node.op == INPUT:
            place = int(node.value)
            name = f"x{place}" if place < count else f"g{place - count}"
            part = f"{name}[a:b]" if node.kind in (FULL, ROW) else name
            found.append(f"v{one} = {part}" + ("" if node.truth else ".float()"))
    return found


def _emitted(nodes: tuple[RowNode, ...], order: Sequence[int], targets: dict[int, str], config: Config) -> list[str]:
    """A line for each value; what is written for the last time takes the place of what is read for the last time."""
    lasts = last_uses(nodes, list(order), targets)
    plain = numbers(nodes)
    lines = []
    for one in order:
        node = nodes[one]
        if node.op == INPUT:
            continue
        if node.op in (CONST, WIDTH):
            lines.append(f"v{one} = {node.value!r}" if node.op == CONST else f"v{one} = float(width)")
            continue
        out = f"{targets[one]}[a:b]" if one in targets else _reused(nodes, one, lasts, config)
        lines += _line(nodes, one, out, plain)
    return lines


def _reused(nodes: Sequence[RowNode], one: int, lasts: dict[int, int], config: Config) -> str:
    """A value of the same kind that nobody reads after this one."""
    if not config["reuse"] or nodes[one].kind != FULL or nodes[one].truth:
        return ""
    for arg in nodes[one].args:
        known = nodes[arg]
        if known.kind == FULL and known.op != INPUT and not known.truth and lasts[arg] == one:
            return f"v{arg}"
    return ""


def _dotted(nodes: tuple[RowNode, ...], config: Config) -> tuple[RowNode, ...]:
    """A sum of products, in one pass where the configuration says so."""

    def dot(node: RowNode) -> RowNode:
        inner = nodes[node.args[0]] if node.op == ROWSUM else node
        if node.op != ROWSUM or inner.op != "mul" or any(nodes[arg].kind != FULL for arg in inner.args):
            return node
        return RowNode(DOT, inner.args, ROW)

    return tuple(map(dot, nodes)) if config["dot"] else nodes


def _line(nodes: Sequence[RowNode], one: int, out: str, numbers_of: set[int]) -> list[str]:
    node = nodes[one]
    args = [f"v{arg}" for arg in node.args]
    plain = [arg in numbers_of for arg in node.args]
    if one in numbers_of:
        return [f"v{one} = {_number(node.op, args)}"]
    if node.op == ROWSUM:
        return [f"v{one} = {args[0]}.sum(-1, keepdim=True)", *_into(one, out)]
    if node.op == DOT:
        return [f"v{one} = torch.linalg.vecdot({args[0]}, {args[1]}).unsqueeze(-1)", *_into(one, out)]
    if node.op == ROWMAX:
        return [f"v{one} = {args[0]}.amax(-1, keepdim=True)", *_into(one, out)]
    if node.op == COLSUM:
        return [f"v{one} = {args[0]}.sum({'0' if nodes[node.args[0]].kind == FULL else ''})"]
    if node.op == WHERE:
        return [f"v{one} = torch.where({', '.join(args)})", *_into(one, out)]
    if node.op in COMPARED:
        return [f"v{one} = {args[0]} {_COMPARED[node.op]} {args[1]}"]
    if node.op in ("maximum", "minimum") and any(plain):
        value, bound = (args[0], args[1]) if plain[1] else (args[1], args[0])
        limit = "min" if node.op == "maximum" else "max"
        return _called(one, f"torch.clamp({value}, {limit}={bound}", out)
    if node.op in UNARY:
        return _called(one, f"torch.{node.op}({args[0]}", out)
    if node.op in BINARY and not plain[0]:
        return _called(one, f"torch.{node.op}({args[0]}, {args[1]}", out)
    if node.op in ("add", "mul") and not all(plain):
        return _called(one, f"torch.{node.op}({args[1]}, {args[0]}", out)
    return [f"v{one} = {args[0]} {_SIGNS[node.op]} {args[1]}", *_into(one, out)]


def _number(op: str, args: Sequence[str]) -> str:
    """Of plain numbers."""
    if op in _SIGNS:
        return f"{args[0]} {_SIGNS[op]} {args[1]}"
    if op not in _POWERS:
        raise NotRowWise(f"{op} of the width")
    return _POWERS[op].format(args[0])


def _called(one: int, call: str, out: str) -> list[str]:
    return [f"v{one} = {call}, out={out})" if out else f"v{one} = {call})"]


def _into(one: int, out: str) -> list[str]:
    return [f"{out}[:] = v{one}"] if out.endswith("[a:b]") and not out.startswith("v") else []


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]

