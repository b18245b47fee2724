"""What is asked of serving by several verbs: a load, limits, formats, sizes of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from foretell.errors import UserError
from foretell.options.plan import SERVED

if TYPE_CHECKING:
    from foretell.simulate.serving.records import Limit

LOAD = 'With --serve: "rate=8, in=1024±512, out=256±128", users=32, all=256, or a .csv or .jsonl of requests.'
SLO = "With --serve: limits that 95 % of the answers must keep, such as ttft=500ms,tpot=40ms."

ENGINE = "With --on: foretell, vllm, sglang, trtllm or gpt-fast; :VERSION; several with commas, or all: which is fastest."
INVARIANT = "The bits of an answer depend on nothing else that is served: steps are computed in parts of fixed sizes."


def refuse_without(context: typer.Context, *names: str) -> None:
    """Options of --serve that were typed without it."""
    typed = [name for name in names if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"]
    if typed:
        flag = f"--{typed[0].replace('_', '-')}"
        raise UserError(f"{flag} is about serving, and --serve is not given", f"add --serve, or leave {flag} out")


def limits(text: str | None) -> Limit:
    """Of --slo: ttft=500ms,tpot=40ms."""
    from foretell.simulate.serving.records import limit_of

    return limit_of(text)


def formats(names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Of --may, where a server is planned."""
    strange = [name for name in names or () if name not in SERVED]
    if strange:
        raise UserError(f"--may {strange[0]} says nothing about serving", f"one of {', '.join(SERVED)}")
    return tuple(names or ())


def at_least_one(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UserError(f"--{name.replace('_', '-')} {number}", f"--{name.replace('_', '-')} of at least 1")
