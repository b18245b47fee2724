"""A batch that `forward` refuses, mended by what the refusal says.

    names        an input that the message names, or that is None where the code failed, is added
    sizes        "expected 64 channels, but got 1024": the input that has the wrong size gets the other
    docstring    an input is laid out as the class describes it

A model is asked under no_grad, on the tensors of the ambient mode: fake ones cost no memory. A mend that changes nothing is taken back;
where none helps, the batch stays as the rules made it and the step says why it fails.
"""

from __future__ import annotations

import inspect
import linecache
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from foretell.trace import hub_media as media
from foretell.trace import hub_told as told

if TYPE_CHECKING:
    from foretell.trace.load import Source

Batch = dict[str, Any]
Mend = tuple[str, Callable[["Asked", Batch], Any]]
"""An input, and what it becomes: of numbers and names only, so that it can be done again where the model is built again."""
TRIES, PATIENCE, DEEPEST = 40, 40.0, 8
"""How often a model is asked, for how many CPU seconds, and how many mends there are in one batch."""
_FINE = ("Expected more than 1 value per channel",)
"""Refusals that another batch does not mend: they are told as they are."""
_BROADCAST = re.compile(r"Mismatching argument at index \d+ had torch.Size\(\[([\d, ]+)\]\); but expected shape should be broadcastable to \[([\d, ]+)\]")
_WRONG_WANTED = (
    re.compile(r"reduction dim, but got \[(?:\d+, )*(?P<wrong>\d+)\] X \[(?P<wanted>\d+)"),
    re.compile(r"cannot be multiplied \(\d+x(?P<wrong>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"to have (?P<wanted>\d+) channels, but got (?P<wrong>\d+) channels"),
    re.compile(r"normalized_shape=\[(?:\d+, )*(?P<wanted>\d+)\].* got input of size ?\[(?:\d+, )*(?P<wrong>\d+)\]", re.DOTALL),
    re.compile(r"tensor a \((?P<wrong>\d+)\) must match the size of tensor b \((?P<wanted>\d+)\)"),
    re.compile(r"tensor a \((?P<wanted>\d+)\) must match the size of tensor b \((?P<wrong>\d+)\)"),
    re.compile(r"expanded size of the tensor \((?P<wanted>\d+)\) must match the existing size \((?P<wrong>\d+)\)"),
    re.compile(r"Expected size (?P<wanted>\d+) but got size (?P<wrong>\d+)"),
    re.compile(r"Expected (?P<wanted>\d+) but got (?P<wrong>\d+)"),
    re.compile(r"\((?P<wrong>\d+)\b[^)]*\)[^()]*match[^()]*\((?P<wanted>\d+)\b"),
    re.compile(r"[Ee]xpected [^\d]*(?P<wanted>\d+)[^\d]* got (?P<wrong>\d+)"),
)
"""Refusals of layers of torch and of checks in models, with the size that was given and the size that was wanted."""
_NAMED_SHAPE = re.compile(r"shape [`'\"]?\(([a-z_0-9, ]+)\)")


class Asked:
    """A model with the batches it may be given."""

    def __init__(self, source: Source, model: Any, main: str, length: int, vocabulary: int) -> None:
        self.source, self.model, self.main, self.length, self.vocabulary = source, model, main, length, vocabulary
        self.takes = inspect.signature(model.forward).parameters
        self.told = told.of_forward(model.forward)
        self.tries, self.begun = 0, time.process_time()

    def made(self, name: str, batch: Batch) -> Any:
        """An input as the class describes it; None where it does not."""
        sizes = told.Sizes(self.source, self.model, batch, self._length(batch))
        said = self.told[name]
        shape = sizes.of(said)
        return told.value(name, said, shape, sizes, self.vocabulary) if shape is not None else None

    def _length(self, batch: Batch) -> int:
        """Of the longest sequence there is."""
        given = next((batch[name] for name in ("input_ids", self.main) if name in batch), None)
        return int(max(given.shape[1:3])) if given is not None and given.dim() in (2, 3) else self.length

    def widened(self, batch: Batch) -> Batch:
        """The batch, or one like it that the model takes; as it was where none was found."""
        key = f"{self.source} {type(self.model).__name__} {self.model.config.to_json_string(use_diff=False)}"
        if key not in _FOUND:
            refusal = self._refusal(batch)
            _FOUND[key] = [] if refusal is None else self._mended(batch, refusal, [], {_place(refusal)}) or []
        for mend in _FOUND[key]:
            batch = self._done(mend, batch)
        return batch

    def _mended(self, batch: Batch, refusal: Exception, so_far: list[Mend], seen: set[Any]) -> list[Mend] | None:
        for mend in self._mends(batch, refusal):
            if self.tries >= TRIES or time.process_time() - self.begun > PATIENCE:
                return None
            other = self._done(mend, batch)
            again = self._refusal(other)
            if again is None:
                return [*so_far, mend]
            if len(so_far) < DEEPEST and _place(again) not in seen:  # another refusal, so this mend did something
                seen.add(_place(again))
                found = self._mended(other, again, [*so_far, mend], seen)
                if found is not None:
                    return found
        return None

    def _done(self, mend: Mend, batch: Batch) -> Batch:
        return {**batch, mend[0]: mend[1](self, batch)}

    def _refusal(self, batch: Batch) -> Exception | None:
        """What the model says against a batch in a step of training, if anything."""
        import torch

        self.tries += 1
        try:
            with torch.no_grad(), media.answering():
                self.model.train()
                self.model(**batch)
        except Exception as error:
            return None if any(one in str(error) for one in _FINE) else error
        return None

    # ------------------------------------------------------------------ mends

    def _mends(self, batch: Batch, refusal: Exception) -> Iterator[Mend]:
        """The likeliest first."""
        said = str(refusal)
        for name in dict.fromkeys([*self._named_in(said), *self._absent_where(refusal)]):
            if name not in batch:
                yield from self._as_told(name, batch)
        for wrong, wanted in _sizes_in(said):
            yield from _resized(batch, wrong, wanted)
        for words in _NAMED_SHAPE.findall(said):
            yield from self._as_shape(self.main, words, batch)
        for name in batch:
            if name in self.told and name not in ("labels", "return_loss") and hasattr(batch[name], "shape"):
                value = self.made(name, batch)
                if value is not None and value.shape != batch[name].shape:
                    yield from self._as_told(name, batch)
        for name in self.told:
            if name not in batch and told.may_be_given(name) and _is_input(self.takes[name]):
                yield from self._as_told(name, batch)
        for name, value in batch.items():
            if hasattr(value, "shape") and value.is_floating_point() and value.dim() == 3:
                yield _reshaped(name, (value.shape[0], value.shape[2], value.shape[1]))

    def _as_told(self, name: str, batch: Batch) -> Iterator[Mend]:
        if self.made(name, batch) is not None:
            yield name, lambda asked, batch: asked.made(name, batch)

    def _named_in(self, said: str) -> list[str]:
        return [name for name in re.findall(r"\w+", said) if name in self.told and told.may_be_given(name)]

    def _absent_where(self, refusal: Exception) -> list[str]:
        """Inputs that are None in the lines that failed, the innermost first."""
        frames, trace = [], refusal.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
        found = []
        for frame, line in reversed(frames):
            words = re.findall(r"\w+", _statement(frame.f_code.co_filename, line))
            found += [one for one in words if one in self.told and frame.f_locals.get(one, 0) is None and told.may_be_given(one)]
        return found

    def _as_shape(self, name: str, words: str, batch: Batch) -> Iterator[Mend]:
        if name in batch:
            said = told.Told("float", tuple(one.strip() for one in words.split(",") if one.strip()))
            shape = told.Sizes(self.source, self.model, batch, self.length).of(said)
            if shape is not None:
                yield _reshaped(name, shape)


_FOUND: dict[str, list[Mend]] = {}
"""What was found for a model that is built several times in one trace."""


def _statement(file: str, line: int) -> str:
    """A line of code with those after it that belong to the same call."""
    text = linecache.getline(file, line)
    for following in range(line + 1, line + 12):
        if text.count("(") <= text.count(")"):
            break
        text += linecache.getline(file, following)
    return text


def _place(refusal: Exception) -> tuple[Any, ...]:
    """Where and with which words, numbers aside from those of sizes."""
    trace, line = refusal.__traceback__, 0
    file = ""
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return file, line, str(refusal)


def _is_input(parameter: inspect.Parameter) -> bool:
    plain = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return parameter.kind not in plain and not re.search(r"\b(bool|str|dict|float)\b", str(parameter.annotation)) and not isinstance(parameter.default, bool)


def _sizes_in(said: str) -> Iterator[tuple[int, int]]:
    """(given, wanted) as a refusal tells them."""
    for pattern in _WRONG_WANTED:
        found = pattern.search(said)
        if found is not None and found["wrong"] != found["wanted"]:
            yield int(found["wrong"]), int(found["wanted"])
    found = _BROADCAST.search(said)
    if found is not None:
        one, other = ([int(size) for size in text.split(",")] for text in found.groups())
        for given, wanted in zip(reversed(one), reversed(other), strict=False):
            if given != wanted and 1 not in (given, wanted):
                yield given, wanted
                yield wanted, given


def _resized(batch: Batch, wrong: int, wanted: int) -> Iterator[Mend]:
    """Inputs that have the wrong size: sides of a picture together, sizes in another order, the last first."""
    for name, value in batch.items():
        if not hasattr(value, "shape") or name == "labels":
            continue
        shape = list(value.shape)
        at = [place for place, size in enumerate(shape) if size == wrong and place]
        if len(at) == 2 and at[1] == at[0] + 1 == len(shape) - 1 and len(shape) > 3:
            yield _reshaped(name, (*shape[:-2], wanted, wanted))
        for place in reversed(at):
            if wanted in shape[1:]:
                other = len(shape) - 1 - shape[::-1].index(wanted)
                turned = list(shape)
                turned[place], turned[other] = wanted, wrong
                yield _reshaped(name, tuple(turned))
            yield _reshaped(name, (*shape[:place], wanted, *shape[place + 1 :]))


def _reshaped(name: str, shape: tuple[int, ...]) -> Mend:
    return name, lambda _, batch: _like(batch[name], shape)


def _like(value: Any, shape: tuple[int, ...]) -> Any:
    """As before, of another shape: whole numbers are one number of before."""
    import torch

    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype)
    return torch.ones(shape, dtype=value.dtype) if value.dtype == torch.bool else value.flatten()[:1].expand(shape).contiguous()
