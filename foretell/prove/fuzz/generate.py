"""Draw models: live values, an operator whose rule they satisfy, parameters of the shapes that the rule asks for.

Model number i of a seed depends on the seed, i, the number of ops and the table alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell.prove.fuzz import rules
from foretell.prove.fuzz.rules import InferredRule, Sizes, factored, holds
from foretell.prove.fuzz.table_moves import OPERATORS
from foretell.prove.fuzz.types import CallNode, Held, Model, ModelGraph, OperandSlot, Operator, Shape, Term

USUAL_OPS = 14
LEAST_OPS = 3
LARGEST = 1 << 18
"""Elements of a value, at most: 1 MiB."""
LARGEST_HELD = 1 << 16
WIDEST = 256
"""Of a block."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
INPUT_SHAPES = ((4, 16, 32), (64, 96), (2, 8, 16, 16), (8, 64, 24), (2, 4, 32, 16), (256, 32), (3, 12, 20, 10), (4096,), (16, 48, 12), (6, 33, 17))
_TRIES = 24
_DTYPES = {"f": "float32", "c": "complex64"}


@dataclass
class _Live:
    """A value that may be taken."""

    name: str
    shape: Shape
    dtype: str
    used: int = 0


@dataclass
class _Draft:
    """A graph while it is being drawn."""

    dice: random.Random
    prefix: str = ""
    live: list[_Live] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    nodes: list[CallNode] = field(default_factory=list)

    def fresh(self, letter: str) -> str:
        return f"{letter}{len(self.held) + sum(len(node.outs) for node in self.nodes) + len(self.nodes)}"

    def hold(self, kind: str, shape: Shape, high: int = 0) -> str:
        letter = {"frozen": "p", "unused": "p"}.get(kind, kind)
        name = f"{letter}{len(self.held)}"
        self.held.append(Held(name, kind, shape, high))
        return name


def draw(seed: str, index: int, ops: int = USUAL_OPS, turn: int = 0, operators: Sequence[Operator] = OPERATORS) -> Model:
    """Model number `index` of a seed; `turn` counts draws before it that PyTorch refused."""
    dice = random.Random(f"foretell zoo fuzz 1/{seed}/{index}/{ops}/{turn}")
    count = dice.randint(min(LEAST_OPS, ops), ops)
    draft = _Draft(dice)
    for shape in dice.sample(INPUT_SHAPES, dice.choice((1, 1, 2))):
        draft.live.append(_Live(draft.hold("x", shape), shape, "float32"))
    block, repeats = None, 0
    at = dice.randrange(count) if dice.random() < 0.4 else -1
    for position in range(count):
        if position == at:
            block, repeats = _blocks(draft, operators)
        _extend(draft, operators)
    if not any(one.kind == "p" for one in draft.held) and not any(node.layer for node in draft.nodes):
        _anchor(draft)
    for _ in range(dice.choice((0, 0, 0, 1))):
        draft.hold("unused", (dice.choice(SIZES), 16))
    graph, terms = _ended(draft)
    return _run(Model(seed, index, graph, terms, block, repeats, forgets=dice.random() < 0.5), dice)


def _run(model: Model, dice: random.Random) -> Model:
    """How its step is run."""
    blocks = model.repeats if model.block is not None else 0
    modes = tuple(dice.choice(("keep", "recompute", "recompute", "selective", "host")) for _ in range(blocks))
    return model.with_(
        optimizer=dice.choice(("adamw", "adamw", "adamw", "adamw-fused", "adamw-foreach", "momentum", "sgd")),
        recompute=dice.choice(("none", "none", "full", "selective")) if blocks else "none",
        accumulate=dice.choice((1, 1, 1, 2)), clip=dice.choice((None, None, 1e6, 0.5)), modes=modes,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- one op


def _extend(draft: _Draft, operators: Sequence[Operator]) -> bool:
    """Add one op; False where none of those tried fitted what is live."""
    weights = [operator.weight for operator in operators]
    for _ in range(40):
        operator = draft.dice.choices(operators, weights)[0]
        if _apply(draft, operator):
            return True
    return False


def _apply(draft: _Draft, operator: Operator) -> bool:
    """Try to add this op to what is live."""
    dice = draft.dice
    picked: list[_Live | None] = [_pick(draft, slot) if slot.kind in "fc" else None for slot in operator.slots]
    for number, slot in enumerate(operator.slots):
        if slot.kind in "fc" and picked[number] is None and (slot.kind == "c" or number == 0):
            return False
        if slot.kind == "f" and number and dice.random() < 0.3:
            picked[number] = None  # a parameter instead
    if operator.slots[0].kind in "fc" and math.prod(picked[0].shape) > operator.most:  # type: ignore[union-attr]
        return False
    for _ in range(4):
        if _fit(draft, operator, picked):
            return True
        picked = [one if not number else _pick(draft, slot) if slot.kind == "f" and dice.random() < 0.5 else None
                  for number, (slot, one) in enumerate(zip(operator.slots, picked, strict=True))]  # fmt: skip
        if any(slot.kind == "c" and one is None for slot, one in zip(operator.slots, picked, strict=True)):
            return False
    return False


def _pick(draft: _Draft, slot: OperandSlot) -> _Live | None:
    """A live value for a slot: those of late and those nobody took yet more often, tiny ones seldom."""
    fits = [one for one in draft.live if len(one.shape) in slot.ranks and one.dtype == _DTYPES[slot.kind]]
    if not fits:
        return None
    weights = [
        (1.5 if number >= len(fits) - 3 else 1.0) * (1.0 if one.used else 2.0) * (1.0 if math.prod(one.shape) >= 512 else 0.1)
        for number, one in enumerate(fits)
    ]
    return draft.dice.choices(fits, weights)[0]


def _fit(draft: _Draft, operator: Operator, picked: Sequence[_Live | None]) -> bool:
    """Choose ranks and arguments, solve for the shapes that are open, and add the node."""
    dice = draft.dice
    ranks = [len(one.shape) if one is not None else dice.choice(slot.ranks) for slot, one in zip(operator.slots, picked, strict=True)]
    if operator.slots[0].kind not in "fc":
        ranks[0] = dice.choice(operator.slots[0].ranks)
    rule = rules.rule_of(operator, ranks, discrete := _discrete(operator, ranks[0], dice))
    if rule is None:
        return False
    known = {
        name: size for group, one in zip(rule.groups, picked, strict=True) if one is not None
        for name, size in zip(group, one.shape, strict=True)
    }  # fmt: skip
    sizes = solved(rule, known, dice)
    if sizes is None:
        return False
    found = rule.result(sizes)
    shapes = [tuple(sizes[name] for name in group) for group in rule.groups]
    if any(not 1 <= math.prod(shape) <= LARGEST or len(shape) > 5 for _, shape in found):
        return False
    if any(math.prod(shape) > LARGEST_HELD for shape, one in zip(shapes, picked, strict=True) if one is None):
        return False
    args = {**discrete, **{name: sizes[name] for name in rule.free}}
    if operator.layer and math.prod(sizes[name] for name in rule.free) > LARGEST_HELD:
        return False
    if rules.tried(operator, shapes, args) != found:
        return False  # the rule is wrong here: what was inferred is tried before it is trusted
    _add(draft, operator, picked, shapes, args, found)
    return True


def _discrete(operator: Operator, rank: int, dice: random.Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for name, values in operator.args.items():
        if values == "axis":
            chosen[name] = dice.randrange(rank)
        elif values == "order":
            chosen[name] = tuple(dice.sample(range(rank), rank))
        elif values != "size":
            chosen[name] = dice.choice(values)
    return chosen


def solved(rule: InferredRule, known: Mapping[str, int], dice: random.Random) -> Sizes | None:
    """Sizes for what is open, so that the rule allows them: forced by equalities, else guessed and tried."""
    names = [*(name for group in rule.groups for name in group), *rule.free]
    if not all(holds(one, known) for one in rule.valid if _names(one) <= known.keys()):
        return None
    for _ in range(_TRIES):
        sizes = dict(known)
        _forced(rule, sizes)
        for name in names:
            if name not in sizes:
                sizes[name] = dice.choice(list(known.values())) if known and dice.random() < 0.4 else dice.choice(SIZES)
                _forced(rule, sizes)
        for _, left, right in (one for one in rule.valid if one[0] == "product"):
            if not holds(("product", left, right), sizes) and set(left) <= known.keys():
                sizes.update(zip(right, factored(math.prod(sizes[name] for name in left), len(right), dice), strict=True))
        if rule.allows(sizes):
            return sizes
    return None


def _names(predicate: tuple[Any, ...]) -> set[str]:
    flat = [name for part in predicate[1:] for name in (part if isinstance(part, tuple) else (part,))]
    return {name for name in flat if isinstance(name, str)}


def _forced(rule: InferredRule, sizes: Sizes) -> None:
    """What follows from what is known."""
    changed = True
    while changed:
        changed = False
        for kind, *rest in rule.valid:
            new: Sizes = {}
            if kind == "equal":
                left, right = rest
                new = {left: sizes[right]} if right in sizes else {right: sizes[left]} if left in sizes else {}
            elif kind == "equals":
                new = {rest[0]: rest[1]}
            elif kind == "times":
                number, left, right = rest
                new = {right: number * sizes[left]} if left in sizes else {}
                if right in sizes and sizes[right] % number == 0:
                    new = {left: sizes[right] // number}
            elif kind == "sum" and rest[2] in sizes and rest[0] in sizes:
                new = {rest[1]: sizes[rest[2]] - sizes[rest[0]]}
            for name, size in new.items():
                if name not in sizes:
                    sizes[name] = size
                    changed = True


def _add(
    draft: _Draft, operator: Operator, picked: Sequence[_Live | None], shapes: Sequence[Shape], args: Mapping[str, Any],
    found: Sequence[tuple[str, Shape]],
) -> None:  # fmt: skip
    inputs: list[str | Shape] = []
    for slot, one, shape in zip(operator.slots, picked, shapes, strict=True):
        if one is not None:
            one.used += 1
            inputs.append(one.name)
        elif slot.kind == "s":
            inputs.append(shape)
        else:
            inputs.append(_held(draft, slot, shape, shapes, args))
    number = len(draft.nodes)
    outs = tuple(f"v{number}" if len(found) == 1 else f"v{number}_{part}" for part in range(len(found)))
    layer = f"m{number}" if operator.layer else ""
    draft.nodes.append(CallNode(operator.name, tuple(inputs), outs, dict(args), layer))
    for name, (dtype, shape) in zip(outs, found, strict=True):
        draft.live.append(_Live(name, shape, dtype))


def _held(draft: _Draft, slot: OperandSlot, shape: Shape, shapes: Sequence[Shape], args: Mapping[str, Any]) -> str:
    """A parameter or buffer of that shape; now and then a parameter that is there already, or one that is not trained."""
    if slot.kind in "pf":
        alike = [one.name for one in draft.held if one.kind == "p" and one.shape == shape]
        if alike and draft.dice.random() < 0.35:
            return draft.dice.choice(alike)
        return draft.hold("frozen" if draft.dice.random() < 0.12 else "p", shape)
    high = int(eval(slot.high, {"s": shapes, "min": min, **args})) if slot.high else 0
    return draft.hold(slot.kind, shape, high)


# ---------------------------------------------------------------------------------------------- blocks, ends


def _blocks(draft: _Draft, operators: Sequence[Operator]) -> tuple[ModelGraph | None, int]:
    """A block that keeps a value's shape, and the node that calls it several times."""
    dice = draft.dice
    wanted = [
        one for one in draft.live
        if one.dtype == "float32" and len(one.shape) > 1 and one.shape[-1] <= WIDEST and 512 <= math.prod(one.shape) <= 1 << 15
    ]  # fmt: skip
    if not wanted:
        return None, 0
    start = dice.choice(wanted)
    inner = _Draft(dice)
    inner.live.append(_Live(inner.hold("x", start.shape), start.shape, "float32"))
    width = start.shape[-1]
    linear = next(operator for operator in operators if operator.name == "nn_linear")
    _add(inner, linear, [inner.live[0]], [start.shape], {"n": width, "m": width}, [("float32", start.shape)])
    for _ in range(dice.randint(1, 5)):
        _extend(inner, operators)
    same = [one for one in inner.live[1:] if one.shape == start.shape and one.dtype == "float32"]
    graph = ModelGraph(tuple(inner.held), tuple(inner.nodes), (same[-1].name,))
    repeats = dice.randint(2, 4)
    name = f"v{len(draft.nodes)}"
    start.used += 1
    draft.nodes.append(CallNode("blocks", (start.name,), (name,), {}, "blocks"))
    draft.live.append(_Live(name, start.shape, "float32"))
    return graph, repeats


def _anchor(draft: _Draft) -> None:
    """A model without a parameter gets one."""
    last = next(one for one in reversed(draft.live) if one.dtype == "float32")
    shape = last.shape[-1:] if last.shape else (1,)
    scale = next(operator for operator in OPERATORS if operator.name == "mul")
    name = draft.hold("p", shape)
    out = f"v{len(draft.nodes)}"
    draft.nodes.append(CallNode(scale.name, (last.name, name), (out,), {}))
    draft.live.append(_Live(out, last.shape or (1,), "float32"))


def _ended(draft: _Draft) -> tuple[ModelGraph, tuple[Term, ...]]:
    """What nobody took goes into the loss, the last of it at least."""
    dice = draft.dice
    made = {out for node in draft.nodes for out in node.outs}
    ends = [one for one in draft.live if one.name in made and not one.used and one.dtype.startswith(("float", "complex"))]
    ends = ends or [one for one in draft.live if one.name in made and one.dtype.startswith("float")][-1:]
    chosen = ends[-1:] + [one for one in ends[:-1] if dice.random() < 0.7]
    terms = []
    for one in chosen:
        hows = ["square", "abs", "smooth"]
        if one.dtype == "complex64":
            hows = ["abs"]
        elif len(one.shape) > 1 and one.shape[-1] > 1:
            hows += ["logits", "target"]
        terms.append(Term(one.name, dice.choice(hows)))
    return ModelGraph(tuple(draft.held), tuple(draft.nodes), tuple(term.value for term in terms)), tuple(terms)
