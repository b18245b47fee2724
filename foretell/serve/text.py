"""Text to tokens and back, piece by piece: bytes, or the tokenizer of a local folder."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from foretell.errors import MissingPackage, UserError

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Words(Protocol):
    """What turns text into tokens and back."""

    stops: tuple[int, ...]
    """Tokens that end an answer."""

    def encode(self, text: str) -> list[int]: ...
    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...
    def decoder(self) -> Decoder: ...


class Decoder(Protocol):
    """The text of one answer, token by token."""

    def add(self, token: int) -> str: ...
    def end(self) -> str: ...


class ByteWords:
    """Each byte is a token: what fits any model of 256 words or more."""

    stops: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        told = "".join(f"{one['role']}: {one['content']}\n" for one in messages)
        return self.encode(f"{told}assistant: ")

    def decoder(self) -> Decoder:
        return _ByteDecoder()


class _ByteDecoder:
    """A character of several bytes is told when its last one is there."""

    def __init__(self) -> None:
        self.inner = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self.inner.decode(bytes([token])) if token < 256 else "\ufffd"

    def end(self) -> str:
        return self.inner.decode(b"", True)


class FolderWords:
    """A tokenizer as transformers reads it from a local folder."""

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingPackage("transformers", f"the tokenizer of {path}", "hf") from error
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise UserError(f"the tokenizer of {path} cannot be read: {error}", "leave --tokenizer out: each byte is a token then") from error
        end = self.inner.eos_token_id
        self.stops: tuple[int, ...] = () if end is None else (int(end),)

    def encode(self, text: str) -> list[int]:
        return list(self.inner(text)["input_ids"])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self.inner.chat_template is None:
            return self.encode("".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant: ")
        return list(self.inner.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))

    def decoder(self) -> Decoder:
        return _WholeDecoder(self.inner)


class _WholeDecoder:
    """What all tokens say more than those before: a token alone may be half a character, or lose its space."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.tokens: list[int] = []
        self.start = self.told = 0
        """Tokens from which on text is compared, and up to which it was told."""

    def add(self, token: int) -> str:
        self.tokens.append(token)
        before, now = self._text(self.start, self.told), self._text(self.start, len(self.tokens))
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self.start, self.told = self.told, len(self.tokens)
        return now[len(before) :]

    def end(self) -> str:
        before, now = self._text(self.start, self.told), self._text(self.start, len(self.tokens))
        return now[len(before) :]

    def _text(self, start: int, end: int) -> str:
        text: str = self.inner.decode(self.tokens[start:end], skip_special_tokens=True)
        return text


def words_of(path: str | None, known: int) -> Words:
    """The tokenizer of a folder; without one, bytes, where the model has as many words."""
    if path is not None:
        folder = Path(path)
        if not any((folder / name).is_file() for name in TOKENIZERS):
            raise UserError(f"{folder} has no tokenizer", f"a folder with {' or '.join(TOKENIZERS[:2])}")
        return FolderWords(folder)
    if known < 256:
        raise UserError(f"the model has {known} words, and each byte of a text is a token", "a model of 256 words or more, or --tokenizer FOLDER")
    return ByteWords()


class AnswerText:
    """The text of one answer, cut at the first of its stop strings; what may begin one is held back."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self.decoder, self.stops = decoder, [one for one in stops if one]
        self.held, self.stopped = "", False

    def add(self, token: int) -> str:
        return "" if self.stopped else self._told(self.decoder.add(token), last=False)

    def end(self) -> str:
        return "" if self.stopped else self._told(self.decoder.end(), last=True)

    def _told(self, more: str, *, last: bool) -> str:
        text = self.held + more
        places = [place for place in (text.find(one) for one in self.stops) if place >= 0]
        if places:
            self.stopped, self.held = True, ""
            return text[: min(places)]
        keep = 0 if last else max((_begun(text, one) for one in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _begun(text: str, stop: str) -> int:
    """How much of a stop string the end of a text is."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
