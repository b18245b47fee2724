"""What would have made a script fit: each way is followed and costed before it is told, the smallest change first.

    no change to the script   the allocator's growing segments            the same trace, replayed
    its arguments             --batch-size 32 (with --accumulate 2)       followed with those arguments
    a line of the script      recompute in backward, bf16 autocast        followed with that done to its model
    both

An argument is taken for the batch size if its name says so and its value is the one the step was seen with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foretell.errors import ForetellError
from foretell.hardware.types import Cluster
from foretell.plan import paths
from foretell.quantities import FITS, NO
from foretell.search.traces.followed import Followed, cost
from foretell.search.traces.followed import follow as follow_script
from foretell.simulate.parts import PlanCost
from foretell.trace.script.words import ScriptCommand

SECONDS = 60.0
"""After which no further way is begun."""
SHOWN = 3
_BATCH = ("batch", "bs", "b")
_STEPS = ("accum",)
_NOT_TRAINING = ("eval", "valid", "test", "val")


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A number that a script was given."""

    name: str
    """`--batch-size`, or a key such as `data.batch_size`."""
    value: int
    place: int | None
    """Of the word with the value, among the script's arguments; None where it was not typed and has its default."""
    prefix: str = ""
    """Of that word, before the value: `--batch-size=`."""

    def word(self, value: int) -> str:
        return f"{self.prefix}{value}" if self.prefix else f"{self.name} {value}"


@dataclass(frozen=True, kw_only=True)
class ScriptChange:
    """What is done to a script: nothing in it, its arguments, its model."""

    words: str
    """For people."""
    costs: str = ""
    same_maths: bool = True
    arguments: tuple[str, ...] | None = None
    """All of the script's, where they change."""
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    """As `trace.script.change.Change` has it."""


@dataclass(frozen=True, kw_only=True)
class CheckedChange:
    """A change, and what was predicted of the script with it."""

    change: ScriptChange
    verdict: str
    device_bytes: int
    allocated_bytes: int
    margin_bytes: int
    step_seconds: float | None

    @property
    def fits(self) -> bool:
        return self.verdict != NO

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


# ---------------------------------------------------------------------- arguments


def numbers(arguments: Sequence[str], options: Sequence[tuple[str, int]] = ()) -> Iterator[Argument]:
    """Whole numbers among the arguments, with their names: `--n 3`, `--n=3`, `n=3`, `-b 3`; then options that were not typed."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if equals and value.isdecimal():
            yield Argument(name=name, value=int(value), place=place, prefix=f"{name}=")
        elif word.isdecimal() and place and arguments[place - 1].startswith("-") and "=" not in arguments[place - 1]:
            yield Argument(name=arguments[place - 1], value=int(word), place=place)
    typed = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    for name, number in options:
        if name not in typed:
            yield Argument(name=name, value=number, place=None)


def batch_argument(arguments: Sequence[str], micro_batch: int, options: Sequence[tuple[str, int]] = ()) -> Argument | None:
    """The argument that says how many samples a forward has."""
    return next((one for one in numbers(arguments, options) if one.value == micro_batch and _says(one.name, _BATCH)), None)


def accumulate_argument(arguments: Sequence[str], accumulate: int, options: Sequence[tuple[str, int]] = ()) -> Argument | None:
    return next((one for one in numbers(arguments, options) if one.value == accumulate and _says(one.name, _STEPS)), None)


def _says(name: str, words: Sequence[str]) -> bool:
    plain = name.lower().lstrip("-").replace("-", "_")
    parts = plain.replace(".", "_").split("_")
    if any(part in _NOT_TRAINING for part in parts):
        return False
    return any(word in parts if len(word) <= 2 else any(part.startswith(word) or part.endswith(word) for part in parts) for word in words)


def with_value(arguments: Sequence[str], argument: Argument, value: int) -> tuple[str, ...]:
    if argument.place is None:
        return (*arguments, argument.name, str(value))
    found = list(arguments)
    found[argument.place] = f"{argument.prefix}{value}"
    return tuple(found)


# ---------------------------------------------------------------------- ways


def halves(followed: Followed) -> list[ScriptChange]:
    """Smaller micro-batches, with as many more of them a step: by the script's own arguments where it has them."""
    script, whole = followed.script, followed.micro_batch
    if script is None:
        return []
    options = [(str(name), int(value)) for name, value in followed.trace.meta.get("options", [])]  # type: ignore[attr-defined]
    argument = batch_argument(script.arguments, whole, options)
    more = accumulate_argument(script.arguments, followed.recipe.accumulate, options) if argument is not None else None
    found, size = [], whole
    while size > 1:
        size = next(number for number in range(size // 2, 0, -1) if whole % number == 0)
        times = whole // size
        costs = f"a step of {size} samples instead of {whole}, unless the script steps after every {times} of them"
        if argument is None:
            words = f"a batch size of {size} instead of {whole} in the script's DataLoader"
            found.append(ScriptChange(words=words, costs=costs, model={"batch": [whole, size]}, same_maths=False))
            continue
        arguments, words = with_value(script.arguments, argument, size), argument.word(size)
        if more is not None:
            count = followed.recipe.accumulate * times
            arguments, words, costs = with_value(arguments, more, count), f"{words} {more.word(count)}", "smaller kernels"
        found.append(ScriptChange(words=words, costs=costs, arguments=arguments, same_maths=more is not None))
    return found


def of_model(followed: Followed, blocks: Sequence[str]) -> list[ScriptChange]:
    """What a line or two of the script do to its model."""
    found = []
    if blocks and not any(op.phase == "recompute" for op in followed.trace.ops()):
        names = ", ".join(paths.fold_names(blocks))
        words = f"activation checkpointing: recompute each of {names} in backward (torch.utils.checkpoint)"
        found.append(ScriptChange(words=words, costs="about a third more compute", model={"recompute": "full"}))
    if followed.recipe.precision == "fp32":
        kind = "cuda" if followed.trace.meta.get("capability") else "cpu"
        found.append(ScriptChange(words=bf16_words(kind), costs="changes the numerics", model={"autocast": "bfloat16"}, same_maths=False))
    return found


def bf16_words(kind: str) -> str:
    """For a device as torch names it."""
    return f'bf16 autocast: with torch.autocast("{kind}", torch.bfloat16) around forward and loss'


def together(first: ScriptChange, second: ScriptChange) -> ScriptChange:
    return ScriptChange(
        words=f"{first.words}; and {second.words}", costs="; ".join(filter(None, (first.costs, second.costs))),
        same_maths=first.same_maths and second.same_maths, arguments=first.arguments or second.arguments,
        environment={**first.environment, **second.environment}, model={**first.model, **second.model},
    )  # fmt: skip


Follow = Callable[..., Followed]


@dataclass
class ScriptFitSearch:
    """Ways to make a followed script fit on a device."""

    followed: Followed
    cluster: Cluster
    on: str
    follow: Follow = follow_script
    seconds: float = SECONDS
    began: float = field(default_factory=time.monotonic)
    tried: list[CheckedChange] = field(default_factory=list)

    def ways(self) -> list[CheckedChange]:
        """Those that fit, the smallest change first; where none does, what was tried, the nearest first."""
        plain = cost(self.followed, self.cluster, self.on)
        blocks, cuda = [str(one) for one in self.followed.trace.meta.get("blocks", [])], self.cluster.device.backend == "cuda"  # type: ignore[attr-defined]
        found = [way for way in [self._try(SEGMENTS)] if way is not None and way.verdict == FITS] if cuda else []
        smaller = halves(self.followed)
        half = self._largest(smaller, plain)
        found += [half] if half is not None else []
        lines = of_model(self.followed, blocks)
        for change in lines:
            found += [way] if (way := self._try(change)) is not None and way.fits else []
        if not found:
            found += self._combined(lines, smaller)
        return found or sorted(self.tried, key=lambda way: -way.margin_bytes)[:SHOWN]

    def _combined(self, lines: list[ScriptChange], smaller: list[ScriptChange]) -> list[CheckedChange]:
        if not lines:
            return []
        all_lines = lines[0] if len(lines) == 1 else together(*lines[:2])
        each = [*lines, *([all_lines] if len(lines) > 1 else [])]
        pairs = [all_lines] if len(lines) > 1 else []
        pairs += [together(one, line) for one in (smaller[:1] + smaller[-1:]) for line in each]
        for change in pairs:
            way = self._try(change)
            if way is not None and way.fits:
                return [way]
        return []

    def _largest(self, smaller: Sequence[ScriptChange], plain: PlanCost) -> CheckedChange | None:
        """The largest micro-batch that fits: those that a straight line through two puts far above the limit are passed over."""
        room, before, slope = plain.worst.memory.capacity_bytes, plain.worst.memory.device_bytes, 0.0
        last = 1.0
        for number, change in enumerate(smaller):
            share = 0.5 ** (number + 1)
            if slope and before - slope * (last - share) > 1.05 * room and number < len(smaller) - 1:
                continue
            way = self._try(change)
            if way is None:
                return None
            if way.fits:
                return way
            slope, last, before = (before - way.device_bytes) / (last - share), share, way.device_bytes
            slope = max(slope, 0.0)
        return None

    def _try(self, change: ScriptChange) -> CheckedChange | None:
        """None where it cannot be done, or the time is up."""
        if self.tried and time.monotonic() - self.began > self.seconds:
            return None
        followed, whole = self.followed, self.followed.micro_batch
        try:
            if change.arguments is not None or change.model:
                followed = followed_with(followed, self.cluster, change, self.follow)
                if "batch" in change.model and followed.micro_batch == whole:
                    return None  # its batches come from elsewhere
            made = cost(followed, self.cluster, self.on, expandable=bool(change.environment))
        except ForetellError:
            return None
        memory = made.worst.memory
        way = CheckedChange(
            change=change, verdict=made.verdict, device_bytes=memory.device_bytes, allocated_bytes=memory.allocated_bytes,
            margin_bytes=memory.margin_bytes, step_seconds=made.time.step_seconds if made.time else None,
        )  # fmt: skip
        self.tried.append(way)
        return way


SEGMENTS = ScriptChange(
    words="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the command", environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
)


def followed_with(step: Followed, cluster: Cluster, change: ScriptChange, follow: Follow = follow_script) -> Followed:
    """The script followed again, with a change to its arguments or its model."""
    assert step.script is not None
    return follow(_with(step.script, change.arguments), cluster, change=change.model)


def _with(script: ScriptCommand, arguments: tuple[str, ...] | None) -> ScriptCommand:
    if arguments is None:
        return script
    head = script.words[: len(script.words) - len(script.arguments)]
    return replace(script, words=(*head, *arguments), arguments=arguments)
