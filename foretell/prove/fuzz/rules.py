"""Shape rules of operators, inferred by trying them.

A case is an operator with the ranks of what it takes and its discrete arguments. Its variables are the sizes: dims of its
inputs and arguments that are sizes. It is tried on tiny tensors of this CPU with many assignments (shape functions for meta
tensors allow what kernels refuse, and are slower); from those that work and those that do not, a conjunction of predicates and
an expression for every output dim are fitted:

    valid    the fewest predicates of a small grammar that hold wherever it worked and fail wherever it did not
    outputs  for every dim the first expression of a small grammar that is right wherever it worked

Nothing of the operator's own code is read. A case without a success is no case; one whose outputs fit no expression is not
used; one whose predicates let some failures pass is called loose, and its uses are tried before they are trusted.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from foretell.prove.fuzz.table_moves import HELPERS
from foretell.prove.fuzz.types import Operator, Shape

Found = tuple[tuple[str, Shape], ...]
"""dtype and shape of every output."""
Sizes = dict[str, int]
Predicate = tuple[Any, ...]
Expression = tuple[Any, ...]

LETTERS = "abcdefgh"
VALUES = (1, 2, 3, 4, 5, 6, 8, 12)
SEEDS = (4, 2, 6, 3, 8, 12)
DTYPES = {"f": torch.float32, "p": torch.float32, "u": torch.float32, "c": torch.complex64, "i": torch.int64, "b": torch.bool}
_FACTORIES = ("torch.eye(", "torch.linspace(", "torch.hann_window(")
MOST_ELEMENTS = 1 << 16
"""Of what is tried; larger ones say nothing more."""


@cache
def namespace() -> dict[str, Any]:
    """What a call of the table may name."""
    names: dict[str, Any] = {"torch": torch, "F": functional, "nn": nn, "checkpoint": checkpoint, "Tensor": Tensor}
    for source in HELPERS.values():
        exec(source, names)
    return names


@cache
def _compiled(text: str) -> Callable[..., Any]:
    made: Callable[..., Any] = eval(text, namespace())
    return made


def call(operator: Operator, given: Sequence[Any], args: Mapping[str, Any], layer: Any = None) -> Any:
    """The operator's call on what it is given."""
    names = {name: f"g['{name}']" for name in operator.args}
    if "{mode}" in operator.call:
        names["mode"] = args["mode"]
    slots = [f"t[{number}]" for number in range(len(operator.slots))]
    return _compiled(f"lambda t, g, layer: {operator.call.format(*slots, layer='layer', **names)}")(given, args, layer)


def make_layer(operator: Operator, args: Mapping[str, Any]) -> Any:
    if not operator.layer:
        return None
    return _compiled(f"lambda: {operator.layer.format(**args)}")()


def tried(operator: Operator, shapes: Sequence[Shape], args: Mapping[str, Any], device: str = "meta") -> Found | None:
    """What comes out for these shapes, or None where PyTorch refuses them. On a real device with zeros."""
    make = torch.empty if device == "meta" else torch.zeros
    try:
        with torch.no_grad():
            given = [
                shape if slot.kind == "s" else make(shape, dtype=DTYPES[slot.kind], device=device)
                for slot, shape in zip(operator.slots, shapes, strict=True)
            ]
            if device == "cpu" or not (operator.layer or any(name in operator.call for name in _FACTORIES)):
                return found_of(call(operator, given, args, make_layer(operator, args)))
            with torch.device(device):  # slows every call down
                return found_of(call(operator, given, args, make_layer(operator, args)))
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError, ZeroDivisionError):
        return None


def found_of(output: Any) -> Found | None:
    """dtypes and shapes of a call's result; None where there is an empty tensor or none."""
    tensors = [output] if isinstance(output, Tensor) else list(output)
    if not tensors or any(not isinstance(tensor, Tensor) or tensor.numel() == 0 for tensor in tensors):
        return None
    return tuple((str(tensor.dtype)[6:], tuple(tensor.shape)) for tensor in tensors)


# ---------------------------------------------------------------------------------------------- predicates


def holds(predicate: Predicate, sizes: Mapping[str, int]) -> bool:
    kind, *rest = predicate
    if kind == "product":
        left, right = (math.prod(sizes[name] for name in names) for names in rest)
        return left == right
    if kind == "times":
        return bool(rest[0] * sizes[rest[1]] == sizes[rest[2]])
    if kind in ("equals", "least", "divisible by"):
        value, number = sizes[rest[0]], rest[1]
        return bool(value == number if kind == "equals" else value >= number if kind == "least" else value % number == 0)
    if kind == "sum":
        return sizes[rest[0]] + sizes[rest[1]] == sizes[rest[2]]
    left, right = sizes[rest[0]], sizes[rest[1]]
    if kind == "equal":
        return left == right
    if kind == "broadcast":
        return left == right or 1 in (left, right)
    if kind == "expands":
        return left in (right, 1)
    if kind == "multiple":
        return left % right == 0
    return bool(left + rest[2] <= right)  # at most, with room


def _predicates(groups: Sequence[Sequence[str]], free: Sequence[str]) -> Iterator[Predicate]:
    """The grammar, strongest first."""
    names = [name for group in groups for name in group] + list(free)
    for left, right in itertools.combinations(names, 2):
        yield "equal", left, right
    for name in names:
        yield from (("equals", name, number) for number in (1, 2, 3))
    yield from (("product", tuple(left), tuple(right)) for left, right in itertools.combinations(groups, 2) if left and right)
    for left, right in itertools.permutations(names, 2):
        yield from (("times", number, left, right) for number in (2, 3, 4))
    if free:
        for left, right, whole in itertools.permutations(names, 3):
            if left in free and right in free and left < right:
                yield "sum", left, right, whole
    for left, right in itertools.permutations(names, 2):
        yield "expands", left, right
    for left, right in itertools.combinations(names, 2):
        yield "broadcast", left, right
    for left, right in itertools.permutations(names, 2):
        yield "multiple", left, right
        yield from (("at most", left, right, extra) for extra in (0, 1, 2, 3, -1, -2, -4))
    for name in names:
        yield from (("divisible by", name, number) for number in (2, 3, 4))
        yield from (("least", name, number) for number in (2, 3, 4, 5))


# ---------------------------------------------------------------------------------------------- expressions


def value(expression: Expression, sizes: Mapping[str, int]) -> int:
    kind, *rest = expression
    if kind == "constant":
        return int(rest[0])
    if kind == "same":
        return sizes[rest[0]]
    if kind == "affine":  # (x * times + plus) // by
        name, times, plus, by = rest
        return int((sizes[name] * times + plus) // by)
    if kind == "product":
        return math.prod(sizes[name] for name in rest[0])
    if kind == "wider":
        left, right = sizes[rest[0]], sizes[rest[1]]
        return right if left == 1 else left
    if kind == "shorter":
        return min(sizes[rest[0]], sizes[rest[1]])
    if kind == "sum":
        return sizes[rest[0]] + sizes[rest[1]]
    if kind == "window":  # how often a window of y fits, every so many steps
        name, other, spread, plus, by = rest
        return int((sizes[name] - spread * sizes[other] + plus) // by) + 1
    if kind == "spread":  # the way back
        name, other, times, plus = rest
        return int(sizes[name] * times + sizes[other] + plus)
    return int(sizes[rest[0]] * sizes[rest[1]])


@cache
def _affine() -> tuple[tuple[int, int, int], ...]:
    """Times, plus and by, simplest first."""
    every = [(t, p, b) for t in (1, 2, 3, 4, 9) for p in range(-5, 6) for b in (1, 2, 3, 4)]
    return tuple(sorted(every, key=lambda one: (one != (1, one[1], 1), abs(one[0] - 1) + abs(one[1]) + one[2])))


def _expressions(groups: Sequence[Sequence[str]], free: Sequence[str]) -> Iterator[Expression]:
    """The grammar, simplest first."""
    names = [*free, *(name for group in groups for name in group)]
    yield from (("same", name) for name in names)
    yield from (("constant", number) for number in range(1, 32))
    for left, right in itertools.combinations(names, 2):
        yield "wider", left, right
        yield "shorter", left, right
        yield "sum", left, right
        yield "times", left, right
    for group in groups:
        for first, last in itertools.combinations(range(len(group) + 1), 2):
            if last - first > 1:
                yield "product", tuple(group[first:last])
    for name in names:
        yield from (("affine", name, *numbers) for numbers in _affine())
    for left, right in itertools.permutations(names, 2):
        yield from (("window", left, right, *numbers) for numbers in itertools.product((1, 2), range(6), (1, 2)))
        yield from (("spread", left, right, *numbers) for numbers in itertools.product((1, 2), range(-4, 1)))


# ---------------------------------------------------------------------------------------------- inference


@dataclass(frozen=True)
class InferredRule:
    """What was inferred of a case."""

    groups: tuple[tuple[str, ...], ...]
    """Variables of each slot."""
    free: tuple[str, ...]
    """Arguments that are sizes."""
    valid: tuple[Predicate, ...]
    outputs: tuple[tuple[str, tuple[Expression, ...]], ...]
    """dtype and expressions of every output."""
    loose: bool
    """Some assignments that the predicates allow were refused."""

    def sizes(self, shapes: Sequence[Shape], args: Mapping[str, Any]) -> Sizes:
        found = {name: size for group, shape in zip(self.groups, shapes, strict=True) for name, size in zip(group, shape, strict=True)}
        return found | {name: args[name] for name in self.free}

    def allows(self, sizes: Mapping[str, int]) -> bool:
        return all(holds(predicate, sizes) for predicate in self.valid)

    def result(self, sizes: Mapping[str, int]) -> Found:
        return tuple((dtype, tuple(value(one, sizes) for one in dims)) for dtype, dims in self.outputs)


Key = tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]]
_KNOWN: dict[Key, InferredRule | None] = {}


def rule_of(operator: Operator, ranks: Sequence[int], discrete: Mapping[str, Any]) -> InferredRule | None:
    """The rule of a case; None where it never worked, or gives what no expression fits."""
    key = (operator.name, tuple(ranks), tuple(sorted(discrete.items())))
    if key not in _KNOWN:
        _KNOWN[key] = _infer(operator, tuple(ranks), discrete)
    return _KNOWN[key]


def variables(operator: Operator, ranks: Sequence[int]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    groups = tuple(tuple(f"{LETTERS[slot]}{dim}" for dim in range(rank)) for slot, rank in enumerate(ranks))
    return groups, tuple(name for name, kind in operator.args.items() if kind == "size")


class _Trials:
    """Assignments that were tried, and what came of them."""

    def __init__(self, operator: Operator, ranks: Sequence[int], discrete: Mapping[str, Any]) -> None:
        self.operator, self.discrete = operator, dict(discrete)
        self.shaped = any(slot.kind == "s" for slot in operator.slots)
        self.groups, self.free = variables(operator, ranks)
        self.names = [name for group in self.groups for name in group] + list(self.free)
        self.worked: list[tuple[Sizes, Found]] = []
        self.failed: list[Sizes] = []
        self.seen: set[tuple[int, ...]] = set()

    def add(self, sizes: Sizes) -> bool | None:
        """Whether it worked; None where it was known or is too large."""
        mark = tuple(sizes[name] for name in self.names)
        if mark in self.seen:
            return None
        self.seen.add(mark)
        shapes = [tuple(sizes[name] for name in group) for group in self.groups]
        if any(math.prod(shape) > MOST_ELEMENTS for shape in shapes) or (self.shaped and math.prod(mark) > 16 * MOST_ELEMENTS):
            return None
        found = tried(self.operator, shapes, {**self.discrete, **{name: sizes[name] for name in self.free}}, "cpu")
        if found is None:
            self.failed.append(sizes)
            return False
        self.worked.append((sizes, found))
        return True


    def keep_usual(self) -> None:
        """Number, dtypes and ranks of outputs are the usual ones; where others come out, the case does not hold."""
        forms = [tuple((dtype, len(shape)) for dtype, shape in found) for _, found in self.worked]
        usual = max(dict.fromkeys(forms), key=forms.count)
        self.failed += [sizes for (sizes, _), form in zip(self.worked, forms, strict=True) if form != usual]
        self.worked = [one for one, form in zip(self.worked, forms, strict=True) if form == usual]


def _infer(operator: Operator, ranks: tuple[int, ...], discrete: Mapping[str, Any]) -> InferredRule | None:
    trials = _Trials(operator, ranks, discrete)
    dice = random.Random(f"{operator.name} {ranks} {sorted(discrete.items())}")
    _seed(trials, dice)
    if not trials.worked:
        return None
    _walk(trials, dice)
    trials.keep_usual()
    outputs = _fit_outputs(trials)
    if outputs is None:
        return None
    valid, loose = _fit_valid(trials)
    return InferredRule(trials.groups, trials.free, valid, outputs, loose)


def _seed(trials: _Trials, dice: random.Random) -> None:
    """First assignments: all sizes alike, then some alike, shapes that hold as many elements as slot 0."""
    for number in SEEDS:
        trials.add(dict.fromkeys(trials.names, number))
    shaped = [slot for slot, one in enumerate(trials.operator.slots) if one.kind == "s"]
    for turn in range(300):
        if trials.worked and turn > (60 if shaped else 12):
            break
        sizes: Sizes = {}
        for name in trials.names:
            sizes[name] = dice.choice(list(sizes.values())) if sizes and dice.random() < 0.6 else dice.choice(VALUES)
        if shaped and turn % 2:
            whole = math.prod(sizes[name] for name in trials.groups[0])
            for name, size in zip(trials.groups[shaped[0]], factored(whole, len(trials.groups[shaped[0]]), dice), strict=True):
                sizes[name] = size
        trials.add(sizes)


def factored(whole: int, parts: int, dice: random.Random) -> Shape:
    """A number as a product of so many."""
    sizes = [1] * parts
    for factor in _primes(whole):
        sizes[dice.randrange(parts)] *= factor
    return tuple(sizes)


def _primes(whole: int) -> Iterator[int]:
    factor = 2
    while whole > 1:
        while whole % factor == 0:
            yield factor
            whole //= factor
        factor += 1


def _walk(trials: _Trials, dice: random.Random) -> None:
    """Change one size, or some that are alike, of an assignment that worked: what then works and what does not tells most."""
    count = len(trials.names)
    budget = trials.operator.trials if count > 3 else min(60, trials.operator.trials)
    while budget > 0:
        base = dict(dice.choice(trials.worked[-12:] if dice.random() < 0.5 else trials.worked)[0])
        alike = dice.choice(trials.names)
        group = [name for name in trials.names if base[name] == base[alike]]
        size = min(len(group), dice.choice((1, 1, 2, 2, 3, 4, len(group))))
        chosen = {alike, *dice.sample(group, size)} if size > 1 else {alike}
        other = dice.choice(VALUES)
        trials.add({**base, **dict.fromkeys(chosen, other)})
        budget -= 1


def _fit_valid(trials: _Trials) -> tuple[tuple[Predicate, ...], bool]:
    """Of all that holds wherever it worked, the fewest that together refuse every failure, greedily."""
    left = list(trials.failed)
    if not left:
        return (), False
    worked = [sizes for sizes, _ in trials.worked]
    true = [one for one in _predicates(trials.groups, trials.free) if all(holds(one, sizes) for sizes in worked)]
    refuses = [{number for number, sizes in enumerate(left) if not holds(one, sizes)} for one in true]
    chosen: list[Predicate] = []
    rest = set(range(len(left)))
    while rest:
        best = max(range(len(true)), key=lambda number: len(refuses[number] & rest), default=None)
        if best is None or not refuses[best] & rest:
            return tuple(chosen), True
        chosen.append(true[best])
        rest -= refuses[best]
    return tuple(chosen), False


def _fit_outputs(trials: _Trials) -> tuple[tuple[str, tuple[Expression, ...]], ...] | None:
    forms = [(dtype, len(shape)) for dtype, shape in trials.worked[0][1]]
    grammar = list(_expressions(trials.groups, trials.free))
    outputs = []
    for output, (dtype, rank) in enumerate(forms):
        dims = []
        for dim in range(rank):
            fits = (
                one for one in grammar
                if all(value(one, sizes) == found[output][1][dim] for sizes, found in trials.worked)
            )  # fmt: skip
            chosen = next(fits, None)
            if chosen is None:
                return None
            dims.append(chosen)
        outputs.append((dtype, tuple(dims)))
    return tuple(outputs)
