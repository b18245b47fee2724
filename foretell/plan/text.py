"""Text from outside: what a plan's strings may hold, and how any string is written into another language.

A plan is passed on, and its names end up in shell scripts, YAML, Python and on screens. They are checked where a plan is
read (`fault`), and independently escaped wherever they are written (`plain`, `quoted`, `json_text`,
`shell_word`).
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Iterator
from typing import Any

MOST_CHARACTERS = 4096
"""Of one string of a plan: as long as a path can be."""
MOST_DEEP = 32
"""Lists and objects within each other."""
_REFUSED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories: control characters, invisible ones (the order of text among them), halves of pairs, line separators."""
_JOINERS = {"\u200c", "\u200d"}
"""Invisible, and part of words and emoji."""
_SURROGATES = re.compile("[\ud800-\udfff]")


def fault(value: Any) -> tuple[str, str] | None:
    """The first string, or name of a field, that no plan may hold: where it is and what is wrong with it."""
    for where, text in _strings(value):
        if text is None:
            return where, f"is nested more than {MOST_DEEP} deep"
        if len(text) > MOST_CHARACTERS:
            return where, f"has {len(text)} characters, and at most {MOST_CHARACTERS} are read"
        strange = next((char for char in text if is_strange(char)), None)
        if strange is not None:
            name = unicodedata.name(strange, "a control character").lower()
            return where, f"has U+{ord(strange):04X} ({name}) at character {text.index(strange) + 1}"
    return None


def is_strange(char: str) -> bool:
    return unicodedata.category(char) in _REFUSED and char not in _JOINERS


def _strings(value: Any) -> Iterator[tuple[str, str | None]]:
    """Every string with where it stands, None for what is nested too deep; names of fields come before what is in them."""
    left: list[tuple[str, Any, int]] = [("", value, 0)]
    while left:
        field, item, depth = left.pop()
        if isinstance(item, str):
            yield field or "it", item
        elif isinstance(item, dict | list) and depth > MOST_DEEP:
            yield shortened(field), None
        elif isinstance(item, dict):
            for name in item:
                yield f"a name in {field}" if field else "a name in it", str(name)
            inner = [(f"{field}.{shortened(str(name))}".removeprefix("."), part, depth + 1) for name, part in item.items()]
            left += reversed(inner)
        elif isinstance(item, list):
            left += [(f"{field}[{place}]", part, depth + 1) for place, part in reversed(list(enumerate(item)))]


def shortened(text: str, most: int = 60) -> str:
    text = plain(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def plain(text: str) -> str:
    """One line that prints: for comments, titles and messages. What does not print becomes `\\u2028`."""
    return text if text.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in text)


def quoted(text: str) -> str:
    """In double quotes, as YAML, TOML and Python all read it. Halves of pairs, which YAML and TOML cannot say, are replaced."""
    text = _SURROGATES.sub("\ufffd", text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{plain(text)}"'


def shell_word(word: object) -> str:
    """One word of a command that people paste, on one line; a path that begins with a dash is no option."""
    text = str(word)
    text = f"./{text}" if text.startswith("-") else text
    if text.isprintable():
        return shlex.quote(text)
    escaped = {"\\": "\\\\", "'": "\\'"}
    return "$'" + "".join(escaped.get(char, char) if char.isprintable() else _bytes(char) for char in text) + "'"


def json_text(value: Any) -> str:
    """JSON on one line, readable where it prints, escaped where it does not."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _bytes(char: str) -> str:
    """Of a path: one that is no Unicode has its bytes as halves of pairs."""
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape" if "\udc80" <= char <= "\udcff" else "replace"))


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
