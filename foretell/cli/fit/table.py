"""`fit --on A,B,C`: one model on several kinds of hardware, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretell.cli import common
from foretell.errors import ForetellError, UserError
from foretell.units import gib, human_count, human_seconds

OBJECTIVES = ("time", "cost", "energy")


def several(on: str) -> list[str]:
    """What stands between commas, but for options such as memory=60GiB, which belong to what stands before them."""
    found: list[str] = []
    for part in on.split(","):
        if found and ("=" in part or not part.strip()):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return [one.strip() for one in found]


def answer(model: str, hardware: Sequence[str], options: dict[str, Any], objective: str, json: bool) -> int:
    """Predict each, sort what fits by the objective, and tell them in one table."""
    if objective not in OBJECTIVES:
        raise UserError(f"--objective {objective!r} is not known", f"give {', '.join(OBJECTIVES[:-1])} or {OBJECTIVES[-1]}")
    doing = common.Doing(f"predicting {model}")

    def work() -> list[tuple[str, Any]]:
        from foretell import api

        found: list[tuple[str, Any]] = []
        for one in hardware:
            doing.tell(f"on {one}")
            try:
                found.append((one, api.fit(model, hardware=one, **{**options, "advice_seconds": 0.0})))
            except ForetellError as error:
                if len(hardware) == 1:
                    raise
                found.append((one, error))
        return found

    rows = sorted(common.call(work, doing), key=lambda row: _rank(row[1], objective))
    if json:
        from foretell.report import schema

        told = [{"on": name, **(schema.answer(one) if not isinstance(one, Exception) else {"error": str(one)})} for name, one in rows]
        common.emit_json({"model": model, "objective": objective, "answers": told})
    else:
        common.emit("\n".join(_lines(model, rows, objective)))
    return common.YES if any(not isinstance(one, Exception) and one.fits for _, one in rows) else common.NO_OR_FAILED


def _rank(found: Any, objective: str) -> tuple[int, float]:
    """What fits first, then what is tight, then the rest; each by the objective, for the same work."""
    if isinstance(found, Exception):
        return 3, 0.0
    value = {"time": _seconds, "cost": _money, "energy": _joules}[objective](found)
    return ("fits", "tight").index(found.verdict) if found.fits else 2, float("inf") if value is None else value


def _seconds(found: Any) -> float | None:
    return found.run.seconds if found.run else 1 / found.throughput.per_second if found.throughput else None


def _money(found: Any) -> float | None:
    return found.run.money if found.run else found.cost.per_billion if found.cost else None


def _joules(found: Any) -> float | None:
    each = found.energy.joules_per_step / found.throughput.per_step if found.energy and found.throughput else None
    return found.run.joules if found.run else each


def _lines(model: str, rows: Sequence[tuple[str, Any]], objective: str) -> list[str]:
    has_run = any(not isinstance(one, Exception) and one.run for _, one in rows)
    unit = next((one.throughput.unit for _, one in rows if not isinstance(one, Exception) and one.throughput), "samples")
    head = ["on", "", "memory", "step", f"{unit}/s", "MFU", *(("run", "money", "energy") if has_run else (f"$ per 1B {unit}",))]
    table = [head, *(_row(name, one, has_run) for name, one in rows)]
    lines = laid_out(table, left=(0, 1))
    errors = [f"{name}: {one}" for name, one in rows if isinstance(one, Exception)]
    return [f"{model}, by {objective}", *lines, *errors]


def laid_out(table: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Lines of a table; columns of numbers end below each other."""
    wide = [max(map(len, column)) for column in zip(*table, strict=True)]
    cells = [[f"{text:<{size}}" if place in left else f"{text:>{size}}" for place, (text, size) in enumerate(zip(row, wide, strict=True))]
             for row in table]  # fmt: skip
    return ["  ".join(row).rstrip() for row in cells]


def _rate(value: float) -> str:
    from foretell.report.words import number

    return human_count(value) if value >= 1000 else number(value)


def _row(name: str, found: Any, has_run: bool) -> list[str]:
    if isinstance(found, Exception):
        return [name, "refused", *[""] * (7 if has_run else 5)]
    memory = f"{gib(found.memory.device_bytes).removesuffix(' GiB')} of {gib(found.memory.capacity_bytes)}"
    verdict = {"no": "does not fit"}.get(found.verdict, found.verdict)
    if not found.time:
        return [name, verdict, memory, *[""] * (6 if has_run else 4)]
    step = f"{found.time.step_seconds * 1e3:,.4g} ms"
    row = [name, verdict, memory, step, _rate(found.throughput.per_second), f"{found.mfu.value:.0%}" if found.mfu else ""]
    if not has_run:
        return [*row, f"{found.cost.per_billion:,.2f}" if found.cost and found.cost.per_billion is not None else ""]
    run = found.run
    energy = f"{run.joules / 3.6e6:,.3g} kWh" if run and run.joules is not None else ""
    return [*row, human_seconds(run.seconds) if run else "", f"${run.money:,.0f}" if run and run.money is not None else "", energy]
