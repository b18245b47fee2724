"""A row-wise program as two Triton kernels: one for the forward, one for all gradients, each tensor read and written once.

A program takes `rows` rows at a time, whole where something is summed along them; the backward's programs walk over the rows and
keep sums over rows in registers until they end. Written to what Triton 3.6 and later have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.tune.search.rowwise.derive import RowBackward, backward_of
from foretell.tune.search.rowwise.program import (
    COLSUM,
    COLUMN,
    COMPARED,
    CONST,
    FULL,
    INPUT,
    REDUCTIONS,
    ROW,
    ROWMAX,
    ROWSUM,
    SCALAR,
    WHERE,
    WIDTH,
    RowNode,
    RowProgram,
    needed,
)
from foretell.tune.search.rowwise.wrapped import Pieces, wrapped
from foretell.tune.search.space import Axis, Config, ConfigSpace

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}
_CALLS = {"exp": "tl.exp", "log": "tl.log", "sqrt": "tl.sqrt", "rsqrt": "tl.rsqrt", "abs": "tl.abs", "sigmoid": "tl.sigmoid", "erf": "tl.erf",
          "sin": "tl.sin", "cos": "tl.cos", "maximum": "tl.maximum", "minimum": "tl.minimum"}  # fmt: skip
MOST_WIDTH = 1 << 16
"""Of a row that is held whole."""
MOST_NUMBERS = 128
"""Of each tensor in a thread, which has 255 registers."""


@dataclass(frozen=True)
class TritonRows:
    """The template."""

    program: RowProgram
    source: str
    guarded: bool = False
    name: str = "rows in Triton"
    compiles: bool = True

    @property
    def space(self) -> ConfigSpace:
        rows, warps = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)
        axes = [Axis("warps", warps, 4), Axis("back_warps", warps, 4)]
        if not self.program.flat:
            axes += [Axis("rows", rows, 1), Axis("back_rows", rows, 1), Axis("programs", (1, 2, 4, 8, 16), 2)]
        if not self.program.reduces:
            axes += [Axis("block", (128, 256, 512, 1024, 2048, 4096), 1024)]
        return ConfigSpace(tuple(axes))

    def hopeless(self, config: Config) -> str:
        """What needs more registers than there are is not even compiled, which would take a minute."""
        block = config["block"] if "block" in config else 1 << max(0, self.program.width - 1).bit_length()
        most = max(int(config.get(f"{part}rows", 1)) * int(block) // (32 * int(config[f"{part}warps"])) for part in ("", "back_"))
        return f"{most} numbers in each thread" if most > MOST_NUMBERS else ""

    def text(self, config: Config) -> str:
        config = {"rows": 1, "back_rows": 1, "programs": 1, **config}
        back = backward_of(self.program)
        kernels = "\n\n\n".join(["\n".join(_forward_kernel(self.program)), "\n".join(_backward_kernel(self.program, back))])
        body = Pieces(
            imports="import triton\nimport triton.language as tl", kernels=kernels,
            forward=_forward_call(self.program, config), backward=_backward_call(self.program, back, config),
        )  # fmt: skip
        return wrapped(self.program, back, self.source, body, guarded=self.guarded)


# ---------------------------------------------------------------- kernels


def _forward_kernel(program: RowProgram) -> list[str]:
    names = [f"x{place}" for place in range(len(program.inputs))] + [f"y{place}" for place in range(len(program.outputs))]
    order = needed(program.nodes, program.outputs)
    body = [*_columns(program), "first = (tl.program_id(0) // columns) * ROWS", *_places(), *_values(program, program.nodes, order)]
    body += [_store(f"y{place}", program.nodes[one].kind, _broadcast(program.nodes, one, program.nodes[one].kind), program.nodes[one].kind)
             for place, one in enumerate(program.outputs)]  # fmt: skip
    return ["@triton.jit", f"def forward_rows({', '.join(names)}, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):", *_in(body)]


def _backward_kernel(program: RowProgram, back: RowBackward) -> list[str]:
    given = _read(program, back)
    wanted = [place for place, one in enumerate(back.gradients) if one is not None]
    names = given + [f"d{place}" for place in wanted]
    summed = [place for place in wanted if program.inputs[place].kind not in (FULL, ROW)]
    start = [*_columns(program), "group, groups = tl.program_id(0) // columns, tl.num_programs(0) // columns"]
    start += [f"s{place} = tl.zeros([1, {'BLOCK' if program.inputs[place].kind == COLUMN else '1'}], dtype=tl.float32)" for place in summed]
    once = [one for one in back.order if one in _without_rows(back.nodes)]
    start += _values(program, back.nodes, once)
    body = [*_places(), *_values(program, back.nodes, [one for one in back.order if one not in once])]
    for place in wanted:
        one, kind = back.gradients[place], program.inputs[place].kind
        assert one is not None
        if place in summed:
            body.append(f"s{place} += v{one}")
        else:
            body.append(_store(f"d{place}", kind, _broadcast(back.nodes, one, kind), kind))
    ends = [_partial(place, program.inputs[place].kind) for place in summed]
    loop = "for first in range(group * ROWS, rows, groups * ROWS):"
    head = f"def backward_rows({', '.join(names)}, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):"
    return ["@triton.jit", head, *_in([*start, loop, *_in(body), *ends])]


def _without_rows(nodes: Sequence[RowNode]) -> set[int]:
    """What is the same for every row, as a norm's weight: it is read before the rows are."""
    found: set[int] = set()
    for place, node in enumerate(nodes):
        if node.kind in (COLUMN, SCALAR) and node.op not in REDUCTIONS and all(arg in found for arg in node.args):
            found.add(place)
    return found


def _read(program: RowProgram, back: RowBackward) -> list[str]:
    """Inputs that the backward needs."""
    count = len(program.inputs)
    places = sorted(int(back.nodes[one].value) for one in back.order if back.nodes[one].op == INPUT)
    return [f"x{place}" if place < count else f"g{place - count}" for place in places]


def _columns(program: RowProgram) -> list[str]:
    """Which part of the rows: all of them, where something is summed along one."""
    wide = ".to(tl.int64)" if program.flat else ""
    return ["columns = tl.cdiv(width, BLOCK)", f"at = (tl.program_id(0) % columns){wide} * BLOCK + tl.arange(0, BLOCK)", "inside = at < width"]


def _places() -> list[str]:
    return [
        "row = first + tl.arange(0, ROWS)", "inside_row = row < rows", "mask = inside_row[:, None] & inside[None, :]",
        "place = row[:, None].to(tl.int64) * width + at[None, :]",
    ]  # fmt: skip


def _values(program: RowProgram, nodes: Sequence[RowNode], order: Sequence[int]) -> list[str]:
    return [f"v{one} = {_value(program, nodes, one)}" for one in order]


def _value(program: RowProgram, nodes: Sequence[RowNode], one: int) -> str:
    node = nodes[one]
    args = [f"v{arg}" for arg in node.args]
    if node.op == INPUT:
        return _load(program, node)
    if node.op == CONST:
        return repr(node.value) if abs(node.value) != float("inf") else f'float("{node.value}")'
    if node.op == WIDTH:
        return "width * 1.0"
    if node.op in (ROWSUM, ROWMAX):
        other, call = ("0.0", "tl.sum") if node.op == ROWSUM else ('float("-inf")', "tl.max")
        return f"{call}(tl.where(mask, {args[0]}, {other}), 1)[:, None]"
    if node.op == COLSUM:
        if nodes[node.args[0]].kind == FULL:
            return f"tl.sum(tl.where(mask, {args[0]}, 0.0), 0)[None, :]"
        return f"tl.sum(tl.where(inside_row[:, None], {args[0]}, 0.0))"
    if node.op == WHERE:
        return f"tl.where({', '.join(args)})"
    if node.op == "neg":
        return f"-{args[0]}"
    if node.op == "tanh":  # the same on every device and in the interpreter
        return f"2.0 * tl.sigmoid(2.0 * {args[0]}) - 1.0"
    if node.op in COMPARED or node.op in _SIGNS:
        return f"{args[0]} {_SIGNS[node.op]} {args[1]}"
    return f"{_CALLS[node.op]}({', '.join(args)})"


def _load(program: RowProgram, node: RowNode) -> str:
    place, count = int(node.value), len(program.inputs)
    name = f"x{place}" if place < count else f"g{place - count}"
    wide = " != 0" if node.truth else ".to(tl.float32)"
    if node.kind == FULL:
        return f"tl.load({name} + place, mask=mask, other=0){wide}"
    if node.kind == ROW:
        return f"tl.load({name} + row, mask=inside_row, other=0)[:, None]{wide}"
    if node.kind == COLUMN:
        return f"tl.load({name} + at, mask=inside, other=0)[None, :]{wide}"
    return f"tl.load({name}){wide}"


def _broadcast(nodes: Sequence[RowNode], one: int, kind: str) -> str:
    """A gradient may be the same along a row."""
    return f"v{one} + tl.zeros([ROWS, BLOCK], dtype=tl.float32)" if nodes[one].kind != FULL and kind == FULL else f"v{one}"


def _store(name: str, kind: str, value: str, of: str) -> str:
    where, mask = ("place", "mask") if of == FULL else ("row[:, None]", "inside_row[:, None]")
    return f"tl.store({name} + {where}, ({value}).to({name}.dtype.element_ty), mask={mask})"


def _partial(place: int, kind: str) -> str:
    """Sums over the rows of one program; they are added up afterwards."""
    if kind == COLUMN:
        return f"tl.store(d{place} + group * width + at[None, :], s{place}, mask=inside[None, :])"
    return f"tl.store(d{place} + tl.program_id(0) + tl.zeros([1, 1], dtype=tl.int32), s{place})"


# ---------------------------------------------------------------- calls


def _forward_call(program: RowProgram, config: Config) -> list[str]:
    made = [f"x{place} = x{place}.contiguous()" for place, one in enumerate(program.inputs) if one.kind in (FULL, ROW)]
    made += [
        f"y{place} = torch.empty({'(rows, width)' if program.nodes[one].kind == FULL else '(rows, 1)'}, dtype=dtype, device=device)"
        for place, one in enumerate(program.outputs)
    ]
    names = [f"x{place}" for place in range(len(program.inputs))] + [f"y{place}" for place in range(len(program.outputs))]
    call = [
        *_sizes(program, config), f"grid = triton.cdiv(rows, {config['rows']}) * triton.cdiv(width, block)",
        "if grid:",
        f"    forward_rows[(grid,)]({', '.join(names)}, rows, width, ROWS={config['rows']}, BLOCK=block, num_warps={config['warps']})",
    ]  # fmt: skip
    return [*made, *call, "return"]


def _backward_call(program: RowProgram, back: RowBackward, config: Config) -> list[str]:
    given = _read(program, back)
    lines = [f"{name} = {name}.contiguous()" for name in given if _rows_of(program, name)]
    wanted = [place for place, one in enumerate(back.gradients) if one is not None]
    kinds = {place: program.inputs[place].kind for place in wanted}
    lines += [f"d{place} = torch.empty(x{place}.shape, dtype=x{place}.dtype, device=device)" for place in wanted if kinds[place] in (FULL, ROW)]
    lines += [
        *_sizes(program, config), "columns = triton.cdiv(width, block)",
        'processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2',
        f"programs = max(1, min(triton.cdiv(rows, {config['back_rows']}), processors * {config['programs']}))",
    ]  # fmt: skip
    for place, kind in kinds.items():
        if kind not in (FULL, ROW):
            shape = "(programs, width)" if kind == COLUMN else "(programs * columns,)"
            lines.append(f"d{place} = torch.zeros({shape}, dtype=torch.float32, device=device)")
    names = given + [f"d{place}" for place in wanted]
    lines += [
        "if rows * width:",
        f"    backward_rows[(programs * columns,)]({', '.join(names)}, rows, width, ROWS={config['back_rows']}, BLOCK=block,"
        f" num_warps={config['back_warps']})",
    ]
    lines += [f"d{place} = d{place}.sum({'0' if kind == COLUMN else ''})" for place, kind in kinds.items() if kind not in (FULL, ROW)]
    return lines


def _rows_of(program: RowProgram, name: str) -> bool:
    return name[0] == "g" or program.inputs[int(name[1:])].kind in (FULL, ROW)


def _sizes(program: RowProgram, config: Config) -> list[str]:
    """A row whole, or in blocks; where nothing depends on rows, everything is one of them."""
    if program.reduces:
        return [
            f"if width > {MOST_WIDTH}:", '    raise NotImplementedError("rows beyond what registers hold")',
            "block = triton.next_power_of_2(max(width, 1))",
        ]  # fmt: skip
    return [*(["rows, width = min(1, rows), rows * width"] if program.flat else []), f"block = {config['block']}"]


def _in(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
