"""Which templates do a task: by the ops of its reference, traced in a process of its own."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from foretell.tune.search.rowwise.lowering import program_of
from foretell.tune.search.rowwise.program import FULL, ROW, NotRowWise, RowProgram
from foretell.tune.search.rowwise.torch_text import TorchRows
from foretell.tune.search.rowwise.triton_text import TritonRows
from foretell.tune.search.space import Config, ConfigSpace
from foretell.tune.verify.source import Code

GATE_ELEMENTS = 1 << 16
"""Of the largest input, where a candidate's rows are verified: what it does to one row it does to all."""


class Template(Protocol):
    """Text of a candidate for every configuration of a space."""

    @property
    def name(self) -> str: ...

    @property
    def compiles(self) -> bool:
        """Its kernels can be compiled for a device that is not here."""

    @property
    def space(self) -> ConfigSpace: ...

    def hopeless(self, config: Config) -> str:
        """Why a configuration is not worth trying; empty for most."""

    def text(self, config: Config) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TaskShape:
    """What a trace says of a task."""

    program: RowProgram | None
    problem: str
    """Why no template does it."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that come in."""
    dtypes: tuple[str, ...]
    op: str
    """A hash of what is computed, whatever its text."""


def task_shape(code: Code, traced: Mapping[str, Any]) -> TaskShape:
    program, problem = None, ""
    try:
        program = program_of(traced)
    except NotRowWise as error:
        problem = str(error)
    told = json.dumps(asdict(replace(program, width=0)), sort_keys=True) if program is not None else code.text
    return TaskShape(
        program=program, problem=problem, shapes=tuple(tuple(one["shape"]) for one in traced["inputs"]),
        dtypes=tuple(one["dtype"] for one in traced["inputs"]), op=hashlib.sha256(told.encode()).hexdigest()[:16],
    )  # fmt: skip


def templates_of(code: Code, shape: TaskShape, *, on_gpu: bool, triton: bool, guarded: bool = False) -> tuple[Template, ...]:
    """Those that fit where kernels run."""
    if shape.program is None:
        return ()
    if on_gpu and triton:
        return (TritonRows(shape.program, code.text, guarded),)
    return (TorchRows(shape.program, code.text, guarded),)


def digest_of(template: Template) -> str:
    """Changes with what a template writes, and not with the text of the task around it."""
    space = template.space
    bare = replace(template, source="", guarded=False) if isinstance(template, TorchRows | TritonRows) else template
    told = json.dumps([template.name, [asdict(axis) for axis in space.axes], bare.text(space.first)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def bucket_of(shape: TaskShape) -> str:
    """Shapes for which one configuration serves: the width as it is, rows up to the next power of two."""
    found = []
    for one, dtype in zip(shape.shapes, shape.dtypes, strict=True):
        rows = math.prod(one[:-1]) if len(one) > 1 else 1
        found.append(f"{dtype} {1 << max(0, rows - 1).bit_length()}x{one[-1] if one else 1}")
    return ", ".join(found)


def cut(code: Code, shape: TaskShape, most: int = GATE_ELEMENTS) -> Code:
    """The task with fewer rows, where a task is of rows; its text ends with other inputs."""
    program = shape.program
    full = max(shape.shapes, key=math.prod, default=())
    if program is None or math.prod(full) <= most:
        return code
    sizes, left = list(full), math.prod(full)
    for place in range(len(full) - 1):
        if left > most:
            size = max(1, sizes[place] * most // left)
            left, sizes[place] = left // sizes[place] * size, size
    places = [one.argument for one in program.inputs if one.argument >= 0 and one.kind in (FULL, ROW)]
    part = ", ".join(f":{size}" for size in sizes[:-1])
    text = (
        f"{code.text}\n\n_all_inputs = get_inputs\n\n\ndef get_inputs():\n    given = _all_inputs()\n"
        f"    return [one[{part}].clone() if place in {tuple(places)} else one for place, one in enumerate(given)]\n"
    )
    return Code(path=code.path, text=text, kind=code.kind)
