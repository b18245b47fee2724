"""A folder of text as samples: bytes are the tokens, so any text and any model with 256 tokens or more will do."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretell.errors import UserError
from foretell.trace.record.step import Batch
from foretell.units import GIB, human_bytes

MOST_BYTES = GIB
"""Of a folder's text that is read; every rank holds it in memory."""
HELD_OUT_EVERY = 20
"""One window of text in so many is for evaluation."""
SEPARATOR = 0
"""Byte between two files."""
_PEEK_BYTES = 8192
_TARGETS = ("targets", "target", "labels", "y")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text files joined into one row of bytes, a separator after each."""

    tokens: np.ndarray
    files: int
    skipped: int
    """Files that are no UTF-8 text."""
    left_out_bytes: int
    """Beyond the most that is read."""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.tokens.data).hexdigest()[:16]

    @property
    def note(self) -> str:
        text = f"{human_bytes(self.tokens.size)} of text in {self.files:,} files"
        text += f", {self.skipped:,} that are no text skipped" if self.skipped else ""
        if self.left_out_bytes:
            text += (
                f"; {human_bytes(self.left_out_bytes)} more were left out: at most {human_bytes(MOST_BYTES)} are read"
            )
        return text


def read_corpus(path: Path, *, most: int = MOST_BYTES) -> Corpus:
    """All text under a folder, in the order of the files' paths; hidden files and links are passed over."""
    if not path.exists():
        raise UserError(
            f"there is no data folder {path}", "give --data a folder of text files, or a FILE.py with data()"
        )
    files = [path] if path.is_file() else _files(path)
    parts, used, skipped, left_out = list[bytes](), 0, 0, 0
    taken = 0
    for file in files:
        content = _text(file)
        if not content:
            skipped += content is None
            continue
        room = max(0, most - used)
        left_out += max(0, len(content) + 1 - room)
        if room:
            parts.append((content + bytes([SEPARATOR]))[:room])
            used, taken = used + len(parts[-1]), taken + 1
    if not used:
        raise UserError(
            f"{path} holds no text: {len(files)} files, none of them UTF-8", "give --data a folder of text files"
        )
    tokens = np.frombuffer(b"".join(parts), dtype=np.uint8)
    return Corpus(tokens=tokens, files=taken, skipped=skipped, left_out_bytes=left_out)


def _files(folder: Path) -> list[Path]:
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        found += [Path(place, name) for name in names if not name.startswith(".")]
    plain = [file for file in found if file.is_file() and not file.is_symlink()]
    return sorted(plain, key=lambda file: file.relative_to(folder).as_posix())


def _text(file: Path) -> bytes | None:
    """The file's bytes, if it begins like UTF-8 text."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_PEEK_BYTES)
            if SEPARATOR in head:
                return None
            codecs.getincrementaldecoder("utf-8")().decode(head)
            return head + stream.read()
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise UserError(
            f"cannot read {file}: {error.strerror}", "make it readable, or take it out of the folder"
        ) from error


class Windows:
    """Stretches of seq + 1 bytes, of which the last is the first of the next: inputs and, one further, targets."""

    in_rows = True

    def __init__(self, corpus: Corpus, seq: int, form: Callable[[Tensor], Batch], *, split: str = "train") -> None:
        whole = (corpus.tokens.size - 1) // seq
        if whole < 2:
            raise UserError(
                f"the text has {corpus.tokens.size:,} bytes, too few for two sequences of {seq}",
                "give a larger folder, or a plan with a shorter seq",
            )
        held = max(1, whole // HELD_OUT_EVERY)
        self.every = HELD_OUT_EVERY if whole >= HELD_OUT_EVERY else whole
        self.count: int | None = whole - held if split == "train" else held
        self.corpus, self.seq, self.form, self.split = corpus, seq, form, split
        self.note = f"{corpus.note}; {whole - held:,} sequences of {seq} bytes to learn from, {held:,} held out"

    def take(self, indices: np.ndarray, epochs: np.ndarray) -> Batch:
        starts = self.windows(indices) * self.seq
        places = starts[:, None] + np.arange(self.seq + 1)
        return self.form(torch.from_numpy(self.corpus.tokens[places].astype(np.int64)))

    def windows(self, indices: np.ndarray) -> np.ndarray:
        """Number of the window in the text: the last of every 20 is held out."""
        if self.split == "train":
            return indices + indices // (self.every - 1)
        return indices * self.every + self.every - 1

    def digest(self) -> str:
        return self.corpus.digest


def text_form(model: nn.Module, example: Batch, name: str) -> tuple[int, Callable[[Tensor], Batch]]:
    """Sequence length, and how to make rows of seq + 1 bytes into a batch like the example."""
    largest = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=256)
    if largest < 256:
        raise UserError(
            f"{name} knows {largest} tokens and text has 256 kinds of bytes", "give --data a FILE.py with data()"
        )
    if isinstance(example, Tensor) and _is_tokens(example):
        return example.shape[1], lambda rows: rows[:, :-1].contiguous()
    pairs: Any = dict(enumerate(example)) if isinstance(example, tuple) else example
    refuse = UserError(
        f"{name} takes a batch that text alone does not give: {_described(example)}",
        "give --data a FILE.py whose data(split) returns its samples",
    )
    if not isinstance(pairs, Mapping) or not all(isinstance(value, Tensor) for value in pairs.values()):
        raise refuse
    tables = [key for key, value in pairs.items() if _is_tokens(value)]
    inputs = next((key for key in ("input_ids", *tables) if key in tables and key not in _TARGETS), None)
    if inputs is None:
        raise refuse
    seq = pairs[inputs].shape[1]
    makers: dict[Any, Callable[[Tensor], Tensor]] = {inputs: lambda rows: rows[:, :-1].contiguous()}
    shifts_itself = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    for key, value in pairs.items():
        if key == inputs:
            continue
        if value.shape[:2] != pairs[inputs].shape or value.is_floating_point():
            raise refuse
        if key == "attention_mask":
            makers[key] = lambda rows, value=value: value.new_ones(rows.shape[0], rows.shape[1] - 1)  # type: ignore[misc]
        elif key == "labels" and shifts_itself:
            makers[key] = makers[inputs]
        elif key in _TARGETS or (key == 1 and len(pairs) == 2):
            makers[key] = lambda rows: rows[:, 1:].contiguous()
        else:
            raise refuse

    def form(rows: Tensor) -> Batch:
        made = {key: make(rows) for key, make in makers.items()}
        return tuple(made[key] for key in sorted(made)) if isinstance(example, tuple) else made

    return seq, form


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 2


def _described(batch: Batch) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(map(str, batch))
    return f"{len(batch)} values" if isinstance(batch, tuple) else f"a tensor of shape {tuple(batch.shape)}"
