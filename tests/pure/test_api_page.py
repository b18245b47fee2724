"""docs/api.md is what the types say: every function of `foretell.__all__`, its arguments, and the fields of what it returns.

`python -m tests.pure.test_api_page --write` writes the page, and so does `make docs`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import foretell
import foretell.api

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
DEEP = 2
"""Classes of fields of classes that are returned, and of theirs; further ones are named only."""
HEAD = """# Python API

<!-- Written from the types by `make docs`; a test compares. -->

`import foretell` imports no torch; a function is fetched when it is first used. A mistake in what is asked raises
`foretell.errors.UserError`, which says what was asked, what was found and what to try. "Does not fit" is an answer and raises nothing.
Values are frozen dataclasses; units are in the names (`_bytes`, `_seconds`).
"""


# ---------------------------------------------------------------------------------------------- what there is


def offered() -> dict[str, Any]:
    """Name → function or class. A room that can be called is shown as the function it calls."""
    found = {name: getattr(foretell, name) for name in foretell.__all__ if not name.startswith("__")}
    return {name: getattr(foretell.api, name) if isinstance(value, ModuleType) else value for name, value in found.items()}


@functools.cache
def only_for_types(module: str) -> dict[str, str]:
    """Name → module, of what is imported for annotations alone."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    guarded = [one for one in tree.body if isinstance(one, ast.If) and "TYPE_CHECKING" in ast.unparse(one.test)]
    imports = [one for part in guarded for one in ast.walk(part) if isinstance(one, ast.ImportFrom) and one.module]
    return {name.asname or name.name: str(one.module) for one in imports for name in one.names}


def classes_in(annotation: Any, module: str) -> Iterator[type]:
    """Classes of foretell that an annotation names."""
    for word in re.findall(r"[A-Za-z_]\w*", text_of(annotation)):
        value = vars(sys.modules[module]).get(word)
        if value is None and only_for_types(module).get(word, "").startswith("foretell"):
            value = getattr(importlib.import_module(only_for_types(module)[word]), word, None)
        if isinstance(value, type) and value.__module__.startswith("foretell"):
            yield value


def fields_of(kind: type) -> list[tuple[str, Any, str]]:
    """(name, annotation, module) of the fields of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(kind):
        return [(one.name, one.type, owner(kind, one.name).__module__) for one in dataclasses.fields(kind) if not one.name.startswith("_")]
    return [(name, kind.__annotations__.get(name, ""), kind.__module__) for name in getattr(kind, "_fields", ())]


def owner(kind: type, name: str) -> type:
    return next((one for one in kind.__mro__ if name in inspect.get_annotations(one)), kind)


def returned(functions: Iterable[Any]) -> list[type]:
    """Classes that functions return, with those of their fields, in the order met."""
    found: dict[type, int] = {}
    todo = [(kind, 0) for function in functions for kind in (classes_in(inspect.signature(function).return_annotation, function.__module__)
            if not isinstance(function, type) else [function])]  # fmt: skip
    while todo:
        kind, depth = todo.pop(0)
        if kind in found or depth > DEEP:
            continue
        found[kind] = depth
        todo += [(below, depth + 1) for _, annotation, module in fields_of(kind) for below in classes_in(annotation, module)]
    return list(found)


# ---------------------------------------------------------------------------------------------- how it is said


def text_of(annotation: Any) -> str:
    """As written in the source, the same under every Python."""
    if annotation is inspect.Parameter.empty:
        return ""
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation).replace("typing.", "")


def default_of(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if value is dataclasses.MISSING:
        return "..."
    if callable(value) and hasattr(value, "__name__"):
        return "..." if value.__name__ == "<lambda>" else str(value.__name__)
    return repr(value)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    return f"`{cell(text)}`" if text else ""


@functools.cache
def told_of(kind: type) -> dict[str, str]:
    """Field → the string below it, or the help that its metadata has."""
    told: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not one.__module__.startswith("foretell"):
            continue
        parts: list[ast.stmt] = []
        with contextlib.suppress(OSError, TypeError):  # a class that was made has no source
            body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
            parts = body.body if isinstance(body, ast.ClassDef) else []
        for field, below in itertools.pairwise(parts):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                told[ast.unparse(field.target)] = inspect.cleandoc(str(below.value.value))
    for item in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        helps = [value if key == "help" else help_of(value) for key, value in item.metadata.items()]
        told[item.name] = told.get(item.name) or next((text for text in helps if isinstance(text, str) and text), "")
    return told


def help_of(option: Any) -> str:
    """What a flag says, said of the argument: `--no-cache` is `cache=False`."""
    text = getattr(option, "help", "")
    return f"False: {text[0].lower()}{text[1:]}" if text and getattr(option, "negates", False) else text


def signature(name: str, function: Callable[..., Any]) -> str:
    """One line where it is short, else one for each argument."""
    found = inspect.signature(function)
    parts, starred = [], False
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        hint, default = text_of(one.annotation), default_of(one.default)
        parts.append(f"{star}{one.name}" + (f": {hint}" if hint else "") + ((f" = {default}" if hint else f"={default}") if default else ""))
    back = text_of(found.return_annotation)
    end = f" -> {back}" if back else ""
    line = f"{name}({', '.join(parts)}){end}"
    return line if len(line) <= 100 else "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def arguments(function: Any) -> list[str]:
    """A table of the arguments, where a class of options says what each is."""
    options = getattr(function, "options", None)
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        return []
    told = told_of(options)
    rows = [f"| `{one.name}` | {cell(told.get(one.name, ''))} |" for one in inspect.signature(function).parameters.values() if told.get(one.name)]
    return ["", "| argument | |", "| --- | --- |", *rows] if rows else []


def of_function(name: str, function: Any, known: Sequence[type]) -> list[str]:
    back = [kind for kind in classes_in(inspect.signature(function).return_annotation, function.__module__) if kind in known]
    links = [f"Returns {', '.join(f'[{kind.__name__}](#{kind.__name__.lower()})' for kind in dict.fromkeys(back))}.", ""] if back else []
    return [f"## foretell.{name}", "", "<!-- not run: a signature -->", "```python", signature(f"foretell.{name}", function), "```", "",
            inspect.cleandoc(function.__doc__ or ""), *arguments(function), "", *links]  # fmt: skip


def of_class(kind: type) -> list[str]:
    doc = kind.__doc__ or ""
    lines = [f"### {kind.__name__}", ""] + ([] if doc.startswith(f"{kind.__name__}(") else [inspect.cleandoc(doc), ""])
    told = told_of(kind)
    rows = [f"| `{name}` | {code(text_of(hint))} | {cell(told.get(name, ''))} |" for name, hint, _ in fields_of(kind)]
    if rows:
        lines += ["| field | type | |", "| --- | --- | --- |", *rows, ""]
    return lines + of_methods(kind)


def of_methods(kind: type) -> list[str]:
    """Public properties and methods that are written in foretell and say what they do."""
    found: dict[str, str] = {}
    for one in kind.__mro__:
        for name, value in vars(one).items() if one.__module__.startswith("foretell") else ():
            inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if name.startswith("_") or name in found or not inspect.isfunction(inner) or not inner.__doc__:
                continue
            first = " ".join(inspect.cleandoc(inner.__doc__).split("\n\n")[0].split())
            found[name] = f"- `.{name}{'' if isinstance(value, property) else '()'}`: {first}"
    return [*found.values(), ""] if found else []


def page(functions: dict[str, Any]) -> str:
    known = returned(functions.values())
    lines = [line for name, value in functions.items() for line in (of_function(name, value, known) if not isinstance(value, type) else [])]
    lines += ["## What they return", ""] + [line for kind in known for line in of_class(kind)] if known else []
    return re.sub(r"\n{3,}", "\n\n", "\n".join([HEAD, *lines])).strip() + "\n"


# ---------------------------------------------------------------------------------------------- tests


def test_the_page_is_what_the_types_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(offered()), "`make docs` would write it"


def test_everything_offered_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^#{2,3} (?:foretell\.)?(\w+)$", text, re.MULTILINE)
    assert set(offered()) <= set(headings) and len(set(headings)) == len(headings), "anchors must be of one thing"
    for function in offered().values():
        assert isinstance(function, type) or all(one in text for one in inspect.signature(function).parameters)
    assert {"Prediction", "Memory", "Time"} <= set(headings) and "`allocated_bytes`" in text


def test_every_function_says_what_it_does() -> None:
    assert [name for name, value in offered().items() if not (value.__doc__ or "").strip()] == []


@dataclasses.dataclass(frozen=True)
class Asked:
    """Options of `asked`."""

    seq: int | None = dataclasses.field(default=None, metadata={"option": type("About", (), {"help": "Tokens | samples."})()})


def test_a_signature_that_was_made_is_shown_with_the_help_of_its_options() -> None:
    def asked(*given: Any, **named: Any) -> Any:
        """Ask."""

    parts = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="str"),
             inspect.Parameter("seq", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=int | None)]  # fmt: skip
    asked.__signature__ = inspect.Signature(parts, return_annotation="Prediction")  # type: ignore[attr-defined]
    asked.options, asked.__module__ = Asked, foretell.api.fit.__module__  # type: ignore[attr-defined]
    text = page({"asked": asked})
    assert "foretell.asked(model: str, *, seq: int | None = None) -> Prediction" in text
    assert "| `seq` | Tokens \\| samples. |" in text and "Returns [Prediction](#prediction)." in text and "### Memory" in text


@pytest.mark.parametrize(("value", "said"), [(print, "print"), ("a", "'a'"), (inspect.Parameter.empty, ""), (None, "None")])
def test_defaults_are_the_same_wherever_they_are_written(value: Any, said: str) -> None:
    assert default_of(value) == said


def main(words: Sequence[str]) -> int:
    if list(words) != ["--write"]:
        print("python -m tests.pure.test_api_page --write    writes docs/api.md", file=sys.stderr)
        return 2
    new = page(offered())
    print(f"docs/api.md: {'as it was' if PAGE.is_file() and PAGE.read_text(encoding='utf-8') == new else 'written'}")
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
