"""What every candidate of a row-wise template has: the task's own module with its parameters, and an autograd function around the rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.tune.search.rowwise.derive import RowBackward
from foretell.tune.search.rowwise.program import COLUMN, FULL, ROW, SCALAR, RowInput, RowProgram
from foretell.tune.verify.source import CANDIDATE, MODEL


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Text of one template; in the bodies `x0`, `x1`, ... are inputs as rows, `g0`, ... what comes back, `rows` and `width` their sizes."""

    imports: str
    kernels: str
    forward: Sequence[str]
    backward: Sequence[str]
    """Leaves `d0`, `d1`, ...: gradients in the shape of the inputs as rows."""


def wrapped(program: RowProgram, back: RowBackward, source: str, pieces: Pieces, *, guarded: bool) -> str:
    """The file."""
    given = [f"given[{place}]" for place in range(len(program.inputs))]
    named = zip(program.inputs, given, strict=True)
    rows = [*_checks(program, guarded), *(f"x{place} = {_as_rows(one, name)}" for place, (one, name) in enumerate(named))]
    outputs = [_shaped(program, place) for place in range(len(program.outputs))]
    forward = _returning(pieces.forward, outputs)
    widths = ["width" if program.nodes[one].kind == FULL else "1" for one in program.outputs]
    taken = [f"g{place} = grads[{place}].reshape(rows, {one})" for place, one in enumerate(widths)]
    gradients = [_gradient(place) if one is not None else "None" for place, one in enumerate(back.gradients)]
    head = [_squeezed(source), "", "import math", "", "import torch", *filter(None, [pieces.imports]), "", ""]
    head += [pieces.kernels, "", ""] if pieces.kernels else []
    function = [
        "class TunedRows(torch.autograd.Function):",
        "    @staticmethod", "    def forward(ctx, *given):", "        ctx.save_for_backward(*given)", *_in(rows + forward), "",
        "    @staticmethod", "    @torch.autograd.function.once_differentiable", "    def backward(ctx, *grads):",
        "        given = ctx.saved_tensors", *_in([*rows, *taken, *pieces.backward]),
        "        return (", *(f"            {one}," for one in gradients), "        )", "", "",
    ]  # fmt: skip
    module = [
        f"class {CANDIDATE}({MODEL}):", f"    def forward(self, {', '.join(f'a{place}' for place in range(program.arguments))}):",
        f"        found = TunedRows.apply({', '.join(_source(one) for one in program.inputs)})",
        f"        return {'found[0]' if len(program.outputs) == 1 else 'found'}", "",
    ]  # fmt: skip
    lines = [*head, *function, *module]
    return "\n".join(lines)


def _returning(lines: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """The last line of a forward returns its results as rows: they are given the shape that the task has."""
    return [*lines[:-1], f"return {', '.join(outputs)},"]


def _shaped(program: RowProgram, place: int) -> str:
    if program.nodes[program.outputs[place]].kind == FULL:
        return f"y{place}.reshape(full)"
    return f"y{place}.reshape(*full[:-1], 1)" if program.trailing[place] else f"y{place}.reshape(full[:-1])"


def _gradient(place: int) -> str:
    return f"d{place}.to(given[{place}].dtype).reshape(given[{place}].shape) if ctx.needs_input_grad[{place}] else None"


def _checks(program: RowProgram, guarded: bool) -> list[str]:
    """Sizes, and what is declined."""
    first = next(place for place, one in enumerate(program.inputs) if one.kind == FULL)
    lines = [f"full = given[{first}].shape", "width, rows = full[-1], math.prod(full[:-1])"]
    tests = [f"given[{first}].dtype == torch.float64"]
    sizes = {ROW: "rows", COLUMN: "width", SCALAR: "1"}
    for place, one in enumerate(program.inputs):
        if place != first:
            tests.append(f"given[{place}].shape != full" if one.kind == FULL else f"given[{place}].numel() != {sizes[one.kind]}")
    tests += [f"width != {program.width}"] if guarded else []
    lines += [f"if {' or '.join(tests)}:", '    raise NotImplementedError("other sizes or formats")']
    numbers = [f"given[{place}].dtype" for place, one in enumerate(program.inputs) if not one.truth]
    dtype = numbers[0]
    for other in numbers[1:]:
        dtype = f"torch.promote_types({dtype}, {other})"
    return [*lines, f"dtype, device = {dtype}, given[{first}].device"]


def _as_rows(one: RowInput, name: str) -> str:
    shape = {FULL: "rows, width", ROW: "rows, 1", COLUMN: "width", SCALAR: "()"}[one.kind]
    return f"{name}.detach().reshape({shape})"


def _source(one: RowInput) -> str:
    """Where `forward` finds a tensor."""
    if one.argument >= 0:
        return f"a{one.argument}"
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", one.state):
        return f"self.{one.state}"
    owner, _, name = one.state.rpartition(".")
    return f'self.get_submodule("{owner}").{name}'


def _squeezed(text: str) -> str:
    """Without the gaps that left-out statements leave."""
    return re.sub(r"\n{3,}", "\n\n\n", text).strip("\n")


def _in(lines: Sequence[str]) -> list[str]:
    return [f"        {line}" if line else "" for line in lines]
