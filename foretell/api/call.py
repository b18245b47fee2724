"""A function of the API: its keyword arguments are the options of a class (`foretell.options`)."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from foretell.options.describe import readied

Asked = ParamSpec("Asked")
First = TypeVar("First")
Result = TypeVar("Result")


def asking(
    options: Callable[Asked, Any], *, also: Sequence[str] = ()
) -> Callable[[Callable[[First, Any], Result]], Callable[Concatenate[First, Asked], Result]]:
    """A function of something and its options as one of something and keyword arguments: `fit("gpt2", hardware="H100", seq=512)`.

    Type checkers see the arguments of the class; so does `help`. Arguments `also` may follow the first by position.
    """
    described: Any = options

    def decorate(function: Callable[[First, Any], Result]) -> Callable[Concatenate[First, Asked], Result]:
        first = next(iter(inspect.signature(function).parameters.values()))
        known = {one.name: one for one in dataclasses.fields(described)}

        def called(*first_of: Any, **given: Any) -> Result:
            if len(first_of) > 1 + len(also):
                raise TypeError(f"{function.__name__}() takes {', '.join([first.name, *also])} by position, and all others by name")
            given |= dict(zip(also, first_of[1:], strict=False))
            if not first_of and first.name in given:
                first_of = (given.pop(first.name),)
            if not first_of and first.default is inspect.Parameter.empty:
                raise TypeError(f"{function.__name__}() is given no {first.name}")
            for name in given.keys() - known.keys():
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(known)}"
                raise TypeError(f"{function.__name__}() has no argument {name}{hint}")
            if missing := [one.name for one in known.values() if one.name not in given and _needed(one)]:
                raise TypeError(f"{function.__name__}() needs {missing[0]}=...")
            return function(first_of[0] if first_of else first.default, described(**readied(described, given)))

        called.__name__, called.__qualname__, called.__module__ = function.__name__, function.__qualname__, function.__module__
        called.__doc__ = function.__doc__
        named = [_parameter(one) for one in known.values()]
        kept = first.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        returned = inspect.signature(function).return_annotation
        called.__signature__ = inspect.Signature([kept, *named], return_annotation=returned)  # type: ignore[attr-defined]
        called.options = described  # type: ignore[attr-defined]
        return called

    return decorate


def _needed(one: dataclasses.Field[Any]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def _parameter(one: dataclasses.Field[Any]) -> inspect.Parameter:
    default = inspect.Parameter.empty if _needed(one) else one.default
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=one.type)
