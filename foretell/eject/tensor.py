"""A derived tensor split in the words of PyTorch's own parallel styles, or why they have none for it.

Styles cut a layer's weight into consecutive pieces and leave the model's code as it is. So the code must be right on
pieces: it is run once on fake tensors with the weights one rank would have, and every call must give what the derivation
says that one rank has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foretell.eject.compose import is_word, literal
from foretell.errors import ForetellError, UserError
from foretell.plan import paths
from foretell.plan.recipe import source_of
from foretell.plan.tensor.derive import Derived, derive, refusal
from foretell.plan.tensor.flow import Again, Choices, Pass
from foretell.plan.tensor.types import Operand, Result, Setting, Shard, local_shape
from foretell.plan.types import Plan, Split
from foretell.trace.flow.calls import Call, Flow
from foretell.trace.flow.record import record
from foretell.trace.load.model import load
from foretell.trace.record.step import Workload

_OTHER = "run it with `foretell run`, or plan with tp 1"
ALLOWED = {"", "embedding", "cross_entropy_classes"}
"""What may be run in place of an op: RowwiseParallel's lookup and loss_parallel's cross-entropy."""


@dataclass(frozen=True, kw_only=True)
class Styled:
    """The split as the script has it."""

    text: str
    loss: bool
    """The loss is computed on split logits, inside `loss_parallel`."""


def styled(plan: Plan, blocks: list[str]) -> Styled:
    """Styles for the plan's split; raises what they cannot express and why."""
    wish = plan.split or Split()
    with torch.device("meta"):
        workload = load(source_of(plan))
    flow = record(workload)
    own = getattr(workload.model, "_tp_plan", None)
    derived = derive(flow, plan.mesh.tp, sequence=wish.sequence, loss=wish.loss, rules=wish.rules, own=own)
    trouble = None if wish.rules else refusal(derived)
    if trouble is not None:
        raise trouble
    if derived.sequence not in ((), ("positions",)):
        raise _cannot("activations between split regions", f"are split along {' and '.join(derived.sequence)}; SequenceParallel splits positions")
    kinds = _kinds(workload.model, derived)
    ties = _ties(workload.model, kinds)
    _check_code(workload, flow, derived, {path: kind for path, kind in kinds.items() if _block_of(path, blocks)})
    calls = _calls(workload, blocks) if derived.sequence else {}
    return Styled(text=_text(kinds, blocks, calls, derived, ties), loss=derived.loss)


def _cannot(what: str, why: str, detail: str = "") -> UserError:
    return UserError(f"PyTorch's styles cannot express this split: {what} {why}", _OTHER, detail)


def _block_of(path: str, blocks: list[str]) -> str | None:
    return next((block for block in blocks if path.startswith(f"{block}.")), None)


def _kinds(model: nn.Module, derived: Derived) -> dict[str, str]:
    """Module → column, row, vocab or norm."""
    found: dict[str, str] = {}
    wrong: list[tuple[str, str]] = []
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        place = next(filter(None, map(derived.place, aliases[id(parameter)])), None)
        kind = type(module).__name__
        if place is None:
            if isinstance(module, nn.LayerNorm | nn.RMSNorm) or kind.endswith(("RMSNorm", "LayerNorm")):
                found[path] = "norm"
            elif not (last == "bias" and found.get(path) == "row"):
                wrong.append((path, f"stays whole on every rank ({kind}), and only norms may in a script"))
        elif len(place.segments) > 1:
            sizes = "+".join(map(str, place.segments))
            why = f"is made of parts ({sizes}) that are split each, and ColwiseParallel cuts one run of rows"
            wrong.insert(0, (path, why))
        elif isinstance(module, nn.Embedding) and place.dim == 0:
            found[path] = "vocab"
        elif isinstance(module, nn.Linear) and len(parameter.shape) == 2:
            found[path] = "column" if place.dim == 0 else "row"
        elif not (isinstance(module, nn.Linear) and last == "bias"):
            wrong.append((path, f"is a {kind} split along dimension {place.dim}, for which there is no style"))
    if wrong:
        raise _cannot(*wrong[0], "\n".join(f"{path} {why}" for path, why in dict.fromkeys(wrong)) if wrong[1:] else "")
    return found


def _ties(model: nn.Module, kinds: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names of a weight that several layers have: the later one, and the first."""
    first: dict[int, str] = {}
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            mine, theirs = kinds[name.rpartition(".")[0]], kinds[other.rpartition(".")[0]]
            if "row" in (mine, theirs) or "norm" in (mine, theirs):
                raise _cannot(name, f"is the same weight as {other} and is split otherwise")
            found.append((name, other))
    return found


# --- is the model's code right on pieces? ----------------------------------------------------------------------------


class _Watched(Pass):
    """A pass that remembers what each call becomes."""

    def __init__(self, flow: Flow, setting: Setting, choices: Choices) -> None:
        super().__init__(flow, setting, choices)
        self.results: list[tuple[Call, Result]] = []

    def _outputs(self, call: Call, result: Result, found: list[Operand], slots: list[int]) -> None:
        super()._outputs(call, result, found, slots)
        self.results.append((call, result))


def _check_code(workload: Workload, flow: Flow, derived: Derived, kinds: Mapping[str, str]) -> None:
    """`kinds` are those within blocks: what other styles give is a DTensor or whole, and right by itself."""
    inside = {f"{path}.{name}" for path in kinds for name in ("weight", "bias")}
    starts = {key: place for key, place in derived.places.items() if any(paths.matches(key, name) for name in inside)}
    watched = _Watched(flow, Setting(derived.ranks, False, derived.loss), Choices(starts=starts, fixed=True))
    try:
        watched.run()
    except Again:
        raise _cannot("it", "holds only with activations split between the regions") from None
    for call, result in watched.results:
        if result.special not in ALLOWED and not _drops_nothing(call):
            raise _cannot(call.module or "the model", f"calls {call.name} on pieces, which needs to know of the other ranks")
    for path, kind in kinds.items():
        if kind == "norm" and _inside(watched, path):
            raise _cannot(path, "is a norm within a split region, and SequenceParallel is for those between")
    _cut(workload.model, kinds, derived.ranks)
    try:
        local = record(workload)
    except ForetellError as error:
        first = str(error).splitlines()[0]
        raise _cannot("the model's code", f"does not run on the pieces of one rank ({first})") from error
    for mine, whole in zip(local.calls, flow.calls, strict=False):
        wanted = [local_shape(flow.values[v].shape, watched.places.get(v), derived.ranks) for v in whole.outputs]
        have = [local.values[v].shape for v in mine.outputs]
        if mine.name != whole.name or have != wanted:
            raise _cannot(
                whole.module or "the model",
                f"reckons with whole sizes: {mine.name} gives {have[0] if have else ()} on one rank, and {wanted[0] if wanted else ()} is its part",
            )


def _drops_nothing(call: Call) -> bool:
    """Dropout that keeps everything."""
    return "dropout" in call.name and 0.0 in (*call.args, *call.kwargs.values())


def _inside(watched: _Watched, path: str) -> bool:
    """Whether a module computes on tensors of a split region."""
    for call in watched.flow.calls:
        if call.module == path or call.module.startswith(f"{path}."):
            for output in call.outputs:
                place = watched.places.get(output)
                if isinstance(place, Shard) and not place.stream:
                    return True
    return False


def _cut(model: nn.Module, kinds: Mapping[str, str], ranks: int) -> None:
    """Give a model without memory the weights of one rank; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    done: set[int] = set()
    for path, kind in kinds.items():
        module = model.get_submodule(path)
        for name, parameter in list(module._parameters.items()):
            if parameter is None or kind == "norm" or (kind == "row" and name == "bias") or id(parameter) in done:
                continue
            if id(parameter) not in made:
                part = nn.Parameter(parameter.detach().chunk(ranks, dim=1 if kind == "row" else 0)[0])
                made[id(parameter)] = part
                done.add(id(part))
            module._parameters[name] = made[id(parameter)]


# --- in words --------------------------------------------------------------------------------------------------------


def _calls(workload: Workload, blocks: list[str]) -> dict[str, tuple[list[bool], list[str]]]:
    """How each part of the first block is called: which positional arguments, and which named ones, are activations."""
    found: dict[str, tuple[list[bool], list[str]]] = {}
    handles = []
    width: list[int] = []

    def activation(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point() and list(value.shape) == width

    def at_block(_: nn.Module, args: Any, kwargs: Any) -> None:
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim() == 3), None)
        width[:] = list(first.shape) if first is not None else []

    def watch(path: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            found.setdefault(path, ([activation(v) for v in args], [k for k, v in kwargs.items() if activation(v)]))

        return hook

    for path in dict.fromkeys(blocks):
        block = workload.model.get_submodule(path)
        handles.append(block.register_forward_pre_hook(at_block, with_kwargs=True))
        for name, child in block.named_children():
            handles.append(child.register_forward_pre_hook(watch(f"{path}.{name}"), with_kwargs=True))
    try:
        record(workload)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _text(
    kinds: Mapping[str, str], blocks: list[str], calls: Mapping[str, tuple[list[bool], list[str]]], derived: Derived,
    ties: list[tuple[str, str]],
) -> str:  # fmt: skip
    sequence = bool(derived.sequence)
    outside = {path: kind for path, kind in kinds.items() if not _block_of(path, blocks)}
    plans: dict[tuple[str, ...], list[str]] = {}
    for block in blocks:
        inner = {path.removeprefix(f"{block}."): kind for path, kind in kinds.items() if path.startswith(f"{block}.")}
        prepared = _prepared(block, inner, calls) if sequence else {}
        feeds, lines = set(prepared), list(prepared.values())
        lines += [f"{literal(path)}: {style}," for path, kind in inner.items()
                  if (style := _style(kind, sequence, fed=path.rpartition(".")[0].partition(".")[0] in feeds))]  # fmt: skip
        plans.setdefault(tuple(lines), []).append(block)
    whole = [f"{literal(path)}: {style}," for path, kind in outside.items() if (style := _style(kind, sequence, top=True, loss=derived.loss))]
    text = ["from torch.distributed.tensor import Replicate, Shard", "from torch.distributed.device_mesh import DeviceMesh",
            "from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,",
            "    parallelize_module)", "", "",
            "def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:",
            '    """Tensor parallelism with PyTorch\'s own styles'
            + ("; between the layers activations are split along the sequence." if sequence else ".") + '"""']  # fmt: skip
    text += ["    outside = {", *(f"        {line}" for line in whole), "    }", "    parallelize_module(model, mesh, outside)"]
    for styles, members in plans.items():
        names = "BLOCKS" if len(plans) == 1 else literal(members)
        text += [f"    for path in {names}:", "        block = {", *(f"            {line}" for line in styles), "        }",
                 "        parallelize_module(model.get_submodule(path), mesh, block)"]  # fmt: skip
    text += [f"    {_tied(name, other)}  # one weight, of which parallelize_module made two" for name, other in ties]
    return "\n".join(text) + "\n"


def _tied(name: str, other: str) -> str:
    if all(map(is_word, (*name.split("."), *other.split(".")))):
        return f"model.{name} = model.{other}"
    path, _, last = name.rpartition(".")
    return f"setattr(model.get_submodule({literal(path)}), {literal(last)}, model.get_parameter({literal(other)}))"


def _prepared(block: str, inner: Mapping[str, str], calls: Mapping[str, tuple[list[bool], list[str]]]) -> dict[str, str]:
    """Part → the line that gathers activations once for all its column layers."""
    lines = {}
    for child in dict.fromkeys(path.partition(".")[0] for path, kind in inner.items() if kind == "column" and "." in path):
        places, names = calls.get(f"{block}.{child}", ([], []))
        if any(places):
            have = ", ".join("Shard(1)" if is_ else "None" for is_ in places)
            want = ", ".join("Replicate()" if is_ else "None" for is_ in places)
            comma = "," if len(places) == 1 else ""
            lines[child] = f"{literal(child)}: PrepareModuleInput(input_layouts=({have}{comma}), desired_input_layouts=({want}{comma})),"
        elif names:
            have = ", ".join(f"{literal(name)}: Shard(1)" for name in names)
            want = ", ".join(f"{literal(name)}: Replicate()" for name in names)
            lines[child] = f"{literal(child)}: PrepareModuleInput(input_kwarg_layouts={{{have}}}, desired_input_kwarg_layouts={{{want}}}),"
    return lines


def _style(kind: str, sequence: bool, *, fed: bool = False, top: bool = False, loss: bool = False) -> str:
    """A layer's style; `fed` are those whose input was gathered before them, `top` those outside the blocks."""
    if kind == "norm":
        return "SequenceParallel(use_local_output=False)" if sequence else ""
    if kind == "vocab":
        out = "output_layouts=Shard(1), use_local_output=False" if sequence else "output_layouts=Replicate()"
        return f"RowwiseParallel(input_layouts=Replicate(), {out})"
    if kind == "row":
        return "RowwiseParallel(output_layouts=Shard(1), use_local_output=False)" if sequence else "RowwiseParallel()"
    given = "input_layouts=Shard(1)" if sequence and not fed else ""
    made = ("output_layouts=Shard(-1), use_local_output=False" if loss else "output_layouts=Replicate()") if top else ""
    return f"ColwiseParallel({', '.join(filter(None, (given, made)))})"
