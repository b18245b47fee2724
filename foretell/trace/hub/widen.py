"""A batch that `forward` refuses, mended by what the refusal says.

    names        an input that the message names, or that is None where the code failed, is added
    sizes        "expected 64 channels, but got 1024": the input that has the wrong size gets the other
    unpacking    `batch, frames, channels, height, width = pixel_values.shape`: an input with another number of sizes gets these
    docstring    an input is laid out as the class describes it

A model is asked under no_grad, on the tensors of the ambient mode: fake ones cost no memory. A mend that changes nothing is taken back;
where none helps, the batch stays as the rules made it and the step says why it fails.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from foretell.trace.hub import documented_inputs as told
from foretell.trace.hub import media

if TYPE_CHECKING:
    from foretell.trace.load.model import Source

Batch = dict[str, Any]
Mend = Callable[["BatchTrial", Batch], Batch]
"""What some inputs become: of numbers and names only, so that it can be done again where the model is built again."""
TRIES, PATIENCE, DEEPEST, OFTEN = 60, 12.0, 8, 8
"""How often a model is asked, for how many CPU seconds, how many mends there are in one batch, and how many refusals at one line are followed."""
_FINE = ("Expected more than 1 value per channel",)
"""Refusals that another batch does not mend: they are told as they are."""
_BROADCAST = re.compile(
    r"Mismatching argument at index \d+ had torch.Size\(\[([\d, ]+)\]\); but expected shape should be broadcastable to \[([\d, ]+)\]"
)
_UNPACKED = re.compile(r"^\s*([\w, ]+?),?\s*=\s*(\w+)\.(?:shape|size\(\))\s*$", re.MULTILINE)
_RANK = re.compile(r"Expected \dD \(unbatched\) or (\d)D \(batched\) input to \w+, but got input of size: \[([\d, ]+)\]")
_WRONG_WANTED = (
    re.compile(r"reduction dim, but got \[(?:\d+, )*(?P<wrong>\d+)\] X \[(?P<wanted>\d+)"),
    re.compile(r"cannot be multiplied \(\d+x(?P<wrong>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"to have (?P<wanted>\d+) channels, but got (?P<wrong>\d+) channels"),
    re.compile(r"normalized_shape=\[(?:\d+, )*(?P<wanted>\d+)\].* got input of size ?(?:torch.Size\()?\[(?:\d+, )*(?P<wrong>\d+)\]", re.DOTALL),
    re.compile(r"tensor a \((?P<wrong>\d+)\) must match the size of tensor b \((?P<wanted>\d+)\)"),
    re.compile(r"tensor a \((?P<wanted>\d+)\) must match the size of tensor b \((?P<wrong>\d+)\)"),
    re.compile(r"input batch_size \((?P<wanted>\d+)\) to match target batch_size \((?P<wrong>\d+)\)"),
    re.compile(r"expanded size of the tensor \((?P<wanted>\d+)\) must match the existing size \((?P<wrong>\d+)\)"),
    re.compile(r"of batch2 tensor to be: \[\d+, (?P<wrong>\d+)\] but got: \[\d+, (?P<wanted>\d+)\]"),
    re.compile(r"Expected size (?P<wanted>\d+) but got size (?P<wrong>\d+)"),
    re.compile(r"Expected (?P<wanted>\d+)(?: in dimension \d+)? but got (?P<wrong>\d+)"),
    re.compile(r"Expected (?P<wrong>\d+)(?: in dimension \d+)? but got (?P<wanted>\d+)"),
    re.compile(r"\((?P<wrong>\d+)\b[^)]*\)[^()]*match[^()]*\((?P<wanted>\d+)\b"),
    re.compile(r"[Ee]xpected [^\d]*(?P<wanted>\d+)\b(?!-D)[^\d]* got (?P<wrong>\d+)\b(?!-D)"),
)
"""Refusals of layers of torch and of checks in models, with the size that was given and the size that was wanted."""
_NAMED_SHAPE = re.compile(r"shape [`'\"]?\(([a-z_0-9, ]+)\)")


class BatchTrial:
    """A model with the batches it may be given."""

    def __init__(self, source: Source, model: Any, main: str, length: int, vocabulary: int) -> None:
        self.source, self.model, self.main, self.length, self.vocabulary = source, model, main, length, vocabulary
        self.takes = inspect.signature(model.forward).parameters
        self.told = told.of_forward(model.forward)
        self.tries, self.begun = 0, time.process_time()
        self.refused: dict[Any, Exception | None] = {}
        self.reached: dict[int, int] = {}
        self.farthest: tuple[int, list[Mend]] = (0, [])
        """How many modules were called before the latest refusal, and the mends that led there: a step may know what this does not."""

    def made(self, name: str, batch: Batch) -> Any:
        """An input as the class describes it; None where it does not."""
        written = name == "labels" or name.startswith("decoder_")
        sizes = told.ShapeWords(self.source, self.model, batch, told.WRITTEN if written and "input_ids" not in batch else self._length(batch))
        said = self.told[name]
        shape = sizes.of(said)
        return told.value(name, said, shape, sizes, self.vocabulary) if shape is not None else None

    def _length(self, batch: Batch) -> int:
        """Of the longest sequence there is."""
        given = next((batch[name] for name in ("input_ids", self.main) if name in batch), None)
        return int(max(given.shape[1:3])) if given is not None and given.dim() in (2, 3) else self.length

    @property
    def patch(self) -> int:
        return media.number(media.first(media.part_of(self.model.config, "vision", "image"), "patch_size")) or 16

    def widened(self, batch: Batch) -> Batch:
        """The batch, or one like it that the model takes, at last without labels; as it was where none was found."""
        key = f"{self.source} {type(self.model).__name__} {self.model.config.to_json_string(use_diff=False)}"
        if key not in _FOUND:
            refusal = self._refusal(batch)
            if refusal is None:
                _FOUND[key] = []
            else:
                self.farthest = self.reached[id(refusal)], []
                _FOUND[key] = self._mended(batch, refusal, [], {_place(refusal)}) or self._unlabelled(batch) or self.farthest[1]
            for error in self.refused.values():
                if error is not None:
                    error.__traceback__ = None  # its frames hold tensors
            self.refused.clear()
        for mend in _FOUND[key]:
            batch = self._done(mend, batch)
        return batch

    def _unlabelled(self, batch: Batch) -> list[Mend]:
        """Labels may be of a kind that nothing tells: then there are none."""
        plain = {name: value for name, value in batch.items() if name != "labels"}
        return [lambda *_: {"labels": None}] if "labels" in batch and plain and self._refusal(plain) is None else []

    def _mended(self, batch: Batch, refusal: Exception, so_far: list[Mend], seen: set[Any]) -> list[Mend] | None:
        for mend in self._mends(batch, refusal):
            if self.tries >= TRIES or time.process_time() - self.begun > PATIENCE:
                return None
            other = self._done(mend, batch)
            again = self._refusal(other)
            if again is None:
                return [*so_far, mend]
            self.farthest = max(self.farthest, (self.reached[id(again)], [*so_far, mend]), key=lambda one: one[0])
            farther = self.reached[id(again)] - self.reached[id(refusal)]
            place = _place(again)
            often = sum(one[:2] == place[:2] for one in seen)
            if len(so_far) < DEEPEST and farther >= 0 and place not in seen and often < OFTEN:  # another refusal, no earlier: this mend did something
                seen.add(place)
                found = self._mended(other, again, [*so_far, mend], seen)
                if found is not None or farther > 0:  # what got this far stays
                    return found
        return None

    def _done(self, mend: Mend, batch: Batch) -> Batch:
        return {name: value for name, value in {**batch, **mend(self, batch)}.items() if value is not None}

    def _refusal(self, batch: Batch) -> Exception | None:
        """What the model says against a batch in a step of training, if anything."""
        key = tuple((name, tuple(getattr(value, "shape", ())), _constant(value)) for name, value in sorted(batch.items()))
        if key not in self.refused:
            self.tries += 1
            self.refused[key] = self._answer(batch)
        return self.refused[key]

    def _answer(self, batch: Batch) -> Exception | None:
        import torch
        from torch.nn.modules.module import register_module_forward_pre_hook

        called = 0

        def count(*_: Any) -> None:
            nonlocal called
            called += 1

        hook = register_module_forward_pre_hook(count)
        try:
            with torch.no_grad(), media.answering():
                self.model.train()
                self.model(**batch)
        except Exception as error:
            self.reached[id(error)] = called
            return None if any(one in str(error) for one in _FINE) else error
        finally:
            hook.remove()
        return None

    # ------------------------------------------------------------------ mends

    def _mends(self, batch: Batch, refusal: Exception) -> Iterator[Mend]:
        """The likeliest first."""
        said, lines = str(refusal), [_statement(frame.f_code.co_filename, line) for frame, line in _frames(refusal)]
        for name in dict.fromkeys([*self._named_in(said), *self._absent_where(refusal)]):
            if name not in batch:
                yield from self._as_told(name, batch)
        if {"input_ids", "inputs_embeds"} <= batch.keys() and re.search("exactly one|both|either", said):
            yield lambda *_: {"input_ids": None}
        if "labels" in batch and any("labels" in line for line in lines[:-1]):
            yield from self._as_told("labels", batch)
        sizes = list(_sizes_in(said))
        for wrong, wanted in sizes:
            yield from _resized(batch, wrong, wanted, "target" in said)
        for wrong, wanted in sizes:
            yield from _all_resized(batch, wrong, wanted)
        yield from self._by_layout(batch, said, lines)
        for wrong, wanted in sizes:
            yield from _fitted(batch, wrong, wanted)
        for name in batch:
            if name in self.told and name not in ("labels", "return_loss") and hasattr(batch[name], "shape"):
                value = self.made(name, batch)
                if hasattr(value, "shape") and value.shape != batch[name].shape:
                    yield from self._as_told(name, batch)
        for name in self.told:
            if name not in batch and told.may_be_given(name) and _is_input(self.takes[name]):
                yield from self._as_told(name, batch)
        for name, value in batch.items():
            if hasattr(value, "shape") and value.is_floating_point() and value.dim() == 3:
                yield _reshaped(name, (value.shape[0], value.shape[2], value.shape[1]))

    def _by_layout(self, batch: Batch, said: str, lines: list[str]) -> Iterator[Mend]:
        """Another number of sizes, another unit, another kind of number."""
        for words in _NAMED_SHAPE.findall(said):
            yield from self._as_shape(self.main, words, batch)
        if "to unpack" in said:
            for words, name in (found for line in lines for found in _UNPACKED.findall(line)):
                yield from self._as_shape(name if name in batch else self.main, words, batch)
        if (found := _RANK.search(said)) is not None:
            yield from _of_rank(batch, int(found[1]) - found[2].count(",") - 1)
        if re.search(r"shape '\[0, \d+", said):  # frames or windows of one picture stand in a row
            name = self.main if self.main in batch else next(iter(batch))
            for many in (media.first(self.model.config, setting) for setting in ("num_frames", "num_windows")):
                if isinstance(many, int):
                    yield _reshaped(name, (batch[name].shape[0] * many, *batch[name].shape[1:]))
        if "broadcast" in said or "must match" in said:
            yield from _shorter(batch)
        if "floating point" in said:
            yield from _as_floats(batch, re.findall(r"\w+", " ".join(lines)))
        books = media.first(self.model.config, "num_codebooks", "num_code_groups")
        if "out of range" in said and isinstance(books, int):  # a layer for each place
            for name, value in batch.items():
                if hasattr(value, "shape") and value.dim() > 1 and name != "labels":
                    yield _reshaped(name, (value.shape[0], books, *value.shape[2:]))
        for name in [name for name in batch if re.search(r"sizes$|shapes$", name)]:
            yield functools.partial(_in_patches, name)

    def _as_told(self, name: str, batch: Batch) -> Iterator[Mend]:
        if self.made(name, batch) is not None:
            yield lambda asked, batch: {name: asked.made(name, batch)}

    def _named_in(self, said: str) -> list[str]:
        return [name for name in re.findall(r"\w+", said) if name in self.told and told.may_be_given(name)]

    def _absent_where(self, refusal: Exception) -> list[str]:
        """Inputs that are None in the lines that failed, the innermost first."""
        found = []
        for frame, line in _frames(refusal):
            words = re.findall(r"\w+", _statement(frame.f_code.co_filename, line))
            absent = [one for one in words if one in self.told and _is_input(self.takes[one]) and frame.f_locals.get(one, 0) is None]
            found += [one for one in absent if told.may_be_given(one) or one == "inputs_embeds"]
        return found

    def _as_shape(self, name: str, words: str, batch: Batch) -> Iterator[Mend]:
        if name in batch:
            said = told.Told("float", tuple(one.strip() for one in words.split(",") if one.strip()))
            shape = told.ShapeWords(self.source, self.model, batch, self.length).of(said)
            if shape is not None:
                yield _reshaped(name, shape)


_FOUND: dict[str, list[Mend]] = {}
"""What was found for a model that is built several times in one trace."""


def _frames(refusal: Exception) -> list[tuple[Any, int]]:
    """The innermost first."""
    frames, trace = [], refusal.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames[::-1]


def _statement(file: str, line: int) -> str:
    """A line of code with those after it that belong to the same call."""
    text = linecache.getline(file, line)
    for following in range(line + 1, line + 12):
        if text.count("(") <= text.count(")"):
            break
        text += linecache.getline(file, following)
    return text


def _place(refusal: Exception) -> tuple[Any, ...]:
    """Where, and with which words."""
    frame, line = _frames(refusal)[0]
    return frame.f_code.co_filename, line, str(refusal)


def _is_input(parameter: inspect.Parameter) -> bool:
    plain = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    is_option = re.search(r"\b(bool|str|dict|float)\b", str(parameter.annotation)) or isinstance(parameter.default, bool | str | float)
    return parameter.kind not in plain and not is_option


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


def _resized(batch: Batch, wrong: int, wanted: int, labels: bool) -> Iterator[Mend]:
    """Inputs that have the wrong size: sides of a picture together, sizes in another order, the last first."""
    for name, value in batch.items():
        if not hasattr(value, "shape") or (name == "labels") != labels:
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


def _all_resized(batch: Batch, wrong: int, wanted: int) -> Iterator[Mend]:
    """Every input that has the wrong size, or one that it is a multiple of, because several stand in a row."""
    for size in dict.fromkeys([wrong, wrong // 2, wrong // 3]):
        if size and wrong % size == 0 and size * wanted % wrong == 0:
            new = size * wanted // wrong
            shapes = {name: tuple(new if at and one == size else one for at, one in enumerate(value.shape))
                      for name, value in batch.items() if hasattr(value, "shape") and size in value.shape[1:]}  # fmt: skip
            if len(shapes) > 1:
                yield functools.partial(_reshape, shapes)


def _fitted(batch: Batch, wrong: int, wanted: int) -> Iterator[Mend]:
    """No input has the wrong size: several stand side by side and one is wider, or a long one becomes it in a fixed proportion."""
    for name, value in batch.items():
        if hasattr(value, "shape") and value.dim() > 1 and value.is_floating_point():
            wide = value.shape[-1]
            if wide + wanted - wrong > 0:
                yield _reshaped(name, (*value.shape[:-1], wide + wanted - wrong))
            if wide > told.STEPS and wrong and wide * wanted // wrong not in (0, wide):
                yield _reshaped(name, (*value.shape[:-1], wide * wanted // wrong))


def _float(name: str, _: BatchTrial, batch: Batch) -> Batch:
    return {name: batch[name].float() / 1000}  # places on a page of 1000


def _in_patches(name: str, asked: BatchTrial, batch: Batch) -> Batch:
    return {name: batch[name] // asked.patch}


def _as_floats(batch: Batch, words: list[str]) -> Iterator[Mend]:
    for name in words:
        if name in batch and hasattr(batch[name], "dtype") and not batch[name].is_floating_point():
            yield functools.partial(_float, name)


def _shorter(batch: Batch) -> Iterator[Mend]:
    """All texts by a word or two, where positions are counted from one or looked ahead of."""
    whole = {name: value for name, value in batch.items() if hasattr(value, "shape") and not value.is_floating_point()}
    words = {name: tuple(value.shape) for name, value in whole.items() if value.dim() == 2}
    for less in (1, 2):
        if words and all(shape[1] > 2 for shape in words.values()):
            yield functools.partial(_reshape, {name: (shape[0], shape[1] - less) for name, shape in words.items()})


def _of_rank(batch: Batch, more: int) -> Iterator[Mend]:
    """With a size more, of one, behind the samples; or one less: the samples in one row."""
    for name, value in batch.items():
        if hasattr(value, "shape") and value.is_floating_point():
            shape = tuple(value.shape)
            if more > 0:
                yield _reshaped(name, (shape[0], *([1] * more), *shape[1:]))
            elif more == -1 and len(shape) > 2:
                yield _reshaped(name, (*shape[1:-1], shape[0] * shape[-1]))
                yield _reshaped(name, (shape[0] * shape[1], *shape[2:]))


def _constant(value: Any) -> Any:
    """What tells sizes in pixels from sizes in patches, and one kind of number from another."""
    sizes = str(value.tolist()) if hasattr(value, "dim") and value.dim() == 2 and value.shape[1] == 2 else ""
    return f"{sizes} {getattr(value, 'dtype', None)}"


def _reshaped(name: str, shape: tuple[int, ...]) -> Mend:
    return functools.partial(_reshape, {name: shape})


def _reshape(shapes: dict[str, tuple[int, ...]], _: BatchTrial, batch: Batch) -> Batch:
    return {name: _like(batch[name], shape) for name, shape in shapes.items()}


def _like(value: Any, shape: tuple[int, ...]) -> Any:
    """As before, of another shape: whole numbers are one number of before."""
    import torch

    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype)
    return torch.ones(shape, dtype=value.dtype) if value.dtype == torch.bool else value.flatten()[:1].expand(shape).contiguous()
