"""`plan --on A,B,C`: the best plan on each of several kinds of hardware, a row each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from foretell.cli import common
from foretell.cli.fit import table as fit_table
from foretell.errors import ForetellError
from foretell.report.command import with_flag
from foretell.units import gib, human_count, human_seconds

if TYPE_CHECKING:
    from foretell.api.plans import PlanAnswer

Found = Any  # a PlanAnswer, or the error that stood in its way


def answer(
    model: str, hardware: Sequence[str], plan_on: Callable[[str], PlanAnswer], objective: str, doing: common.Doing, *, json: bool
) -> int:  # fmt: skip
    """Search each, sort what was found by the objective, and tell all in one table. No plan is written: which one, the user says next."""

    def work() -> list[tuple[str, Found]]:
        found: list[tuple[str, Found]] = []
        for one in hardware:
            doing.tell(f"on {one}")
            try:
                found.append((one, plan_on(one)))
            except ForetellError as error:
                found.append((one, error))
        return found

    rows = [(name, found, None if isinstance(found, Exception) else found.run) for name, found in common.call(work, doing)]
    rows.sort(key=lambda row: _rank(_best(row[1]), row[2], objective))
    if json:
        told = [
            {"on": name, **({"error": str(found), "run": None} if isinstance(found, Exception) else found.to_json())} for name, found, _ in rows
        ]  # fmt: skip
        common.emit_json({"model": model, "objective": objective, "answers": told})
    else:
        common.emit("\n".join(_lines(model, rows, objective)))
    return common.YES if any(_best(found) is not None for _, found, _ in rows) else common.NO_OR_FAILED


def _best(found: Found) -> Any:
    return None if isinstance(found, Exception) else found.plan


def _rank(plan: Any, run: Any, objective: str) -> tuple[bool, float]:
    """What was found first, by the objective, for the same work."""
    if plan is None:
        return True, 0.0
    said = plan.predicted
    amount = next((said[name] for name in ("tokens_per_step", "samples_per_step") if said.get(name)), 1)
    value: float | None = {
        "cost": run.money if run else said.get("dollars_per_step"), "energy": run.joules if run else said.get("joules_per_step"),
        "smallest": plan.mesh.world,
    }.get(objective, run.seconds if run else said.get("step_seconds"))  # fmt: skip
    each = 1 if run or objective == "smallest" else amount
    return False, float("inf") if value is None else value / each


def _lines(model: str, rows: Sequence[tuple[str, Found, Any]], objective: str) -> list[str]:
    runs = any(run is not None for *_, run in rows)
    unit = next((name for _, found, _ in rows for name in ("tokens", "samples") if (best := _best(found)) and f"{name}_per_second" in best.predicted),
                "samples")  # fmt: skip
    head = ["on", "devices", "memory", "step", f"{unit}/s", *(("run", "money", "energy") if runs else (f"$ per 1B {unit}",)), "plan"]
    table = [head, *(_row(name, found, run, unit, runs) for name, found, run in rows)]
    first = fit_table.laid_out(table, left=(0, len(head) - 1))
    nothing = [f"{name}: {found if isinstance(found, Exception) else _why_not(found)}" for name, found, _ in rows if _best(found) is None]
    best = next((name for name, found, _ in rows if _best(found) is not None), None)
    typed = [word for word in common.without_script(common.typed()) if word not in ("--debug", "--no-cache")]
    script = ["--", *words] if (words := common.script_words()) else []
    last = [f"Write it:  {shlex.join(['foretell', *with_flag(typed, f'--on {best}'), *script])}"] if best else []
    return [f"{model}, best plans by {objective}", *first, *nothing, *last]


def _row(name: str, found: Found, run: Any, unit: str, runs: bool) -> list[str]:
    from foretell.search.solve.choose import told

    plan, wide = _best(found), 3 if runs else 1
    if plan is None:
        return [name, "", "refused" if isinstance(found, Exception) else "nothing fits", "", "", *[""] * wide, ""]
    said = plan.predicted
    memory = f"{gib(said['memory_bytes']).removesuffix(' GiB')} of {gib(said['capacity_bytes'])}"
    if "step_seconds" not in said:
        return [name, str(plan.mesh.world), memory, "", "", *[""] * wide, told(plan)]
    row = [name, str(plan.mesh.world), memory, f"{said['step_seconds'] * 1e3:,.4g} ms", human_count(said[f"{unit}_per_second"])]
    if runs:
        energy = f"{run.joules / 3.6e6:,.3g} kWh" if run and run.joules is not None else ""
        row += [human_seconds(run.seconds) if run else "", f"${run.money:,.0f}" if run and run.money is not None else "", energy]
    else:
        money = said.get("dollars_per_step")
        row += [f"{money / said[f'{unit}_per_step'] * 1e9:,.2f}" if money is not None else ""]
    return [*row, told(plan)]


def _why_not(found: PlanAnswer) -> str:
    choice = found.choice
    assert choice is not None
    if choice.infeasible is not None:
        return f"the nearest plan is {gib(choice.infeasible.bytes_short)} short"
    return "; ".join(one.why for one in choice.reasons[:2]) or "no plan was found"
