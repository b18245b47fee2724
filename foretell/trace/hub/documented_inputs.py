"""Inputs that no rule knows, by what transformers itself says of them.

    docstring     "target_sizes (`torch.IntTensor` of shape `(batch_size, 2)`, *optional*)"
    annotation    `num_patches: int | None`
    name          speaker_embedding, time_step, quantized_code

A size is a number, a setting of the config, or a word such as sequence_length; of one that says nothing, a few. Whole numbers that may
be the places of a table are zero, which every table has.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from foretell.trace.hub import media

if TYPE_CHECKING:
    from torch import Tensor

    from foretell.trace.load.model import Source

FEW, STEPS, WRITTEN = 24, 256, 64
"""Of what is counted by a word that says nothing, steps of what has a length of its own, and words that are written of a sound or picture."""
WIDE = ("hidden_size", "d_model", "n_embd", "hidden_dim", "embed_dim", "dim", "mel_dim")
_ENTRY = re.compile(r"^\s*(\w+)\s*\(([^\n]*?)\bof shape\s*`?[(\[]([^`\n]*?)[)\]]`?", re.MULTILINE)
_SHORT = re.compile(r"^\s*(\w+):[^\n\[]*\[(\w+(?:, [\w*+ ]+)+)\]", re.MULTILINE)
"""The other way in which docstrings give shapes: "text_features: Text prompt features [batch_size, seq_len, hidden_size]"."""
_BATCH = re.compile(r"^(b|n|bs|bsz|batch|\w*batch_size|num_(images|videos|audios|samples|sentences|clips))$")
_LENGTH = re.compile(r"len|seq|tokens|frames|time")
_SETTINGS = {"num_channels": ("num_channels", "in_channels", "in_chans"), "image_channels": ("num_channels",), "dim": WIDE, "hidden_dim": WIDE,
             "hidden_size": WIDE, "embed_dim": WIDE, "embedding_dim": WIDE, "feature_dim": ("num_mel_bins", "feature_size", *WIDE),
             "channels": ("num_channels", "audio_channels", "hidden_size"), "feature_size": ("num_mel_bins", "feature_size")}  # fmt: skip
_NEVER = re.compile(r"^(past_key_values|use_cache|output_\w+|return_\w+|\w*labels?|cache_position|\w*head_mask|\w*_outputs|interpolate_\w+|"
                    r"encoder_outputs|inputs_embeds|decoder_inputs_embeds|logits_to_keep|\w*_cache|padding_cache|train|training)$")  # fmt: skip
"""Inputs that a step of training does without."""


class Told(NamedTuple):
    kind: str
    """float, whole, truth, count (a plain number) or maps (a list of tensors with rows and columns)."""
    shape: tuple[str, ...]


def may_be_given(name: str) -> bool:
    return not _NEVER.match(name)


def of_forward(forward: Callable[..., Any]) -> dict[str, Told]:
    """Inputs with a shape in the docstring of `forward`; those without, as their annotation and name tell."""
    found: dict[str, Told] = {}
    takes, said = inspect.signature(forward).parameters, (inspect.getdoc(forward) or "").split("Returns:")[0]
    entries = [*_ENTRY.findall(said), *((name, str(takes[name].annotation), shape) for name, shape in _SHORT.findall(said) if name in takes)]
    for name, kind, shape in entries:
        found.setdefault(name, Told(_kind(name, kind), tuple(one.strip() for one in shape.split(",") if one.strip())))
    for name, one in takes.items():
        if "list[torch.Tensor]" in str(one.annotation):
            found[name] = Told("maps", ("batch_size", "hidden_size", "side", "side"))
        elif name not in found:
            found[name] = _by_name(name, str(one.annotation))
    return {name: found[name] for name in takes}


def _kind(name: str, said: str) -> str:
    if "Bool" in said:
        return "truth"
    if "Long" in said or "Int" in said:
        return "whole"
    return "float" if "Float" in said else _kind_by_name(name)


def _kind_by_name(name: str) -> str:
    whole = re.search(r"(^|_)(ids?|codes?|mask|masks|lens|lengths?|sizes?|indices|index|shapes|grid_\w+|hws|thw)$", name)
    return "whole" if whole else "float"


def _by_name(name: str, annotation: str) -> Told:
    if re.search(r"\bint\b", annotation) and "Tensor" not in annotation:
        return Told("count", ())
    kind = _kind(name, annotation)
    if re.search(r"time_?steps?$|sigma$", name):
        return Told("float", ("batch_size",))
    if re.search(r"lens$|lengths?$", name):
        return Told("whole", ("batch_size",))
    if re.search(r"sizes$|shapes$|hws$", name):
        return Told("whole", ("batch_size", "2"))
    if re.search(r"grid_thw$", name):
        return Told("whole", ("batch_size", "3"))
    if re.search(r"spectrogram$|(^|_)mel$", name):
        return Told("float", ("batch_size", "num_mel_bins", "frames"))
    if re.search(r"pixel|image|picture", name):
        return Told("float", ("batch_size", "num_channels", "height", "width"))
    return Told(kind, ("batch_size", "sequence_length") if kind == "whole" else ("batch_size", "sequence_length", "hidden_size"))


class ShapeWords:
    """Words of a shape as numbers; the same word is the same number throughout a batch."""

    def __init__(self, source: Source, model: Any, batch: Mapping[str, Any], length: int) -> None:
        self.source, self.config, self.batch, self.length, self.n = source, model.config, batch, length, source.micro_batch

    def of(self, told: Told) -> tuple[int, ...] | None:
        """None where a shape is no list of sizes."""
        try:
            return tuple(self._size(ast.parse(_plain(word), mode="eval").body) for word in told.shape)
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def _size(self, word: ast.AST) -> int:
        if isinstance(word, ast.Constant) and isinstance(word.value, int):
            return word.value
        if isinstance(word, ast.BinOp) and type(word.op) in _ARITHMETIC:
            return int(_ARITHMETIC[type(word.op)](self._size(word.left), self._size(word.right)))
        if isinstance(word, ast.Call) and len(word.args) == 1 and isinstance(word.args[0], ast.Name):  # len(a_setting)
            value = self._setting(word.args[0].id)
            if isinstance(value, (list, tuple)):
                return len(value)
        if isinstance(word, ast.Name):
            return self._named(word.id)
        raise ValueError(ast.dump(word))

    def _named(self, word: str) -> int:
        low = word.lower()
        if _BATCH.match(low):
            return self.n
        for name in (word, *_SETTINGS.get(low, ())):
            value = self._setting(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if low in ("height", "width", "image_size", "frame_size", "image_height", "image_width", "h", "w"):
            return media.sides(self.source, media.part_of(self.config, "vision", "image"))["width" in low or low == "w"]
        if low == "side":  # as many places as there are in a sequence
            return math.isqrt(self.length)
        if low in ("num_channels", "channels"):
            return 3
        if low in ("num_mel_bins", "mel_bins"):
            return 80
        if low == "num_frames":
            return media.FRAMES
        if _LENGTH.search(low):
            return self._length(low)
        return FEW

    def _length(self, low: str) -> int:
        words = self.batch.get("input_ids")
        if words is not None and not low.startswith(("target", "encoder", "num_")):
            return int(words.shape[1])
        return self.length if "seq" in low else STEPS

    def _setting(self, name: str) -> Any:
        parts = [self.config, *(part for part in vars(self.config).values() if hasattr(part, "to_dict"))]
        return next((value for part in parts if (value := getattr(part, name, None)) is not None), None)


_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
}  # fmt: skip


def _plain(word: str) -> str:
    """`config.block_size` as block_size; "sequence length" as one word."""
    word = word.replace("`", "").replace("self.", "").replace("config.", "")
    return re.sub(r"(?<=\w) (?=\w)", "_", word.strip()) or "few"


def value(name: str, told: Told, shape: tuple[int, ...], sizes: ShapeWords, vocabulary: int) -> Tensor | list[Tensor] | int:
    """Numbers of that shape, such as an input of this name could hold."""
    import torch

    if told.kind == "count":
        return FEW
    if told.kind == "maps":
        return [torch.randn(shape)]
    if "mask" in name and "pixel" not in name.replace("pixel_attention", ""):
        return torch.ones(shape, dtype={"float": torch.float32, "truth": torch.bool}.get(told.kind, torch.int64))
    if told.kind == "truth":
        return torch.zeros(shape, dtype=torch.bool)
    if told.kind == "float":
        return torch.rand(shape) if len(shape) < 2 else torch.randn(shape)
    if re.search(r"lens$|lengths?$", name):
        return torch.full(shape, sizes.length)
    if re.search(r"(sizes|shapes)$", name) and shape[-1:] == (2,):
        high, wide = media.sides(sizes.source, media.part_of(sizes.config, "vision", "image"))
        return torch.tensor([high, wide]).expand(shape).contiguous()
    if name.endswith("input_ids"):
        return torch.randint(0, vocabulary, shape)
    if "position" in name:
        return torch.arange(shape[-1]).expand(shape).contiguous()
    return torch.zeros(shape, dtype=torch.int64)
