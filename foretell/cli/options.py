"""Options of a command, made of the class that describes them (`foretell.options`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer

from foretell.options import FitOptions
from foretell.options.describe import Option, options_of

HERE = "options"
"""The argument of a command's function that gets them, by name; its place among the others is theirs in the help."""


def taking(described: type, *, hidden: Sequence[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A command's function with a flag for each option of a class: it is called with all values in its argument `options`.

    An argument of its own with an option's name stands for that option: its flag is read otherwise here. `hidden` are left to their defaults.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        own = inspect.signature(command, eval_str=True).parameters
        known = [one for one in options_of(described) if one.cli and one.name not in own and one.name not in hidden]

        def called(**given: Any) -> int:
            found = {one.name: value_of(one, given.pop(one.name)) for one in known}
            return command(**given, **{HERE: found})

        parameters: list[inspect.Parameter] = []
        for parameter in own.values():
            parameters += [_parameter(one) for one in known] if parameter.name == HERE else [parameter.replace(kind=_KIND)]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        called.__doc__, called.__name__, called.__module__ = command.__doc__, command.__name__, command.__module__
        return called

    return decorate


_KIND = inspect.Parameter.KEYWORD_ONLY


def _parameter(one: Option) -> inspect.Parameter:
    """As typer reads it."""
    default, kind = one.default, one.typed
    shown: dict[str, Any] = {}
    if kind == list[str]:
        default = []
    elif one.negates:
        default, kind = False, bool
    elif kind is str and default is not None and not isinstance(default, str):
        default = one.shown or str(default)
    elif one.shown == "":
        shown = {"show_default": False}
    if default is None and kind is not bool:
        kind = kind | None
    elif default is None:
        kind, shown = bool | None, {"show_default": False}
    if one.read is not None and one.typed is str:
        shown["parser"] = one.read
    flag = one.spelled  # a bool's too: without it there would be a --no- twin
    return inspect.Parameter(one.name, _KIND, default=typer.Option(default, flag, metavar=one.metavar, help=one.help, **shown), annotation=kind)


def value_of(one: Option, typed: Any) -> Any:
    """What the command line read, as the function takes it."""
    if one.negates:
        return not typed
    return one.read(typed) if one.read is not None and one.typed is not str else typed


def flag(described: type, name: str) -> Any:
    """One option of a class for a command that has few of them."""
    one = next(one for one in options_of(described) if one.name == name)
    return typer.Option(one.shown or str(one.default), one.spelled, metavar=one.metavar, help=one.help, parser=one.read)


TIME_LIMIT = flag(FitOptions, "time_limit")
