"""`foretell verify`: does a plan compute what one process computes?"""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common

if TYPE_CHECKING:
    from foretell.runtime.check.twin import Twin
    from foretell.runtime.check.verify import Difference, PlanCheck

ASSUMPTIONS = (
    "a plan that is right on a small twin of the same classes and axes is right on the model",
    "compiled graphs are run without generating code for them",
)


def verify(
    plan: Path = typer.Argument(..., metavar="PLAN", help="A plan file."),
    steps: int = typer.Option(10, "--steps", min=1, max=1000, help="Optimizer steps whose losses are compared."),
    limit: float = typer.Option(
        120.0, "--limit", min=1.0, metavar="SECONDS", help="Longest time that one case may take."
    ),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Run a small twin of PLAN on processes of this machine, beside one process that runs it plainly in fp32.

    Losses and gradients must agree. Exit 0 if they do, 1 if they do not.
    """
    from foretell.plan import file
    from foretell.plan.legal import check

    asked = file.read_training(plan)
    check(asked)
    return _verify(str(plan), asked, steps, limit, json=json)


def _verify(name: str, asked: Any, steps: int, limit: float, *, json: bool) -> int:
    start, cases_of = common.call(_verifier, "importing torch")
    with start(asked, steps=steps, limit_s=limit) as verifier:
        twin = common.call(verifier.prepare, f"scaling {asked.model['model']} down")
        cases = cases_of(twin.plan)
        if not json:
            common.emit("\n".join(_head(name, twin, steps, max(len(case.name) for case in cases))))
        found: list[tuple[PlanCheck, Difference]] = []
        for number, case in enumerate(cases, 1):
            run = partial(verifier.run, case)
            found.append((case, common.call(run, f"case {number} of {len(cases)}: {case.name}")))
            if not json:
                common.emit(_line(*found[-1], max(len(case.name) for case in cases)))
    good = all(one.good for _, one in found)
    if json:
        from foretell.api.runs import Verification

        told = Verification(plan=name, steps=steps, twin=twin, cases=tuple(found))
        common.emit_json({"assumptions": list(ASSUMPTIONS), "verification": told.to_json()})
    else:
        common.emit(f"\nthe plan {'computes' if good else 'does NOT compute'} what one process computes")
    return common.YES if good else common.NO_OR_FAILED


def _verifier() -> tuple[Any, Any]:
    from foretell.runtime.check import verify

    return verify.Verifier, verify.cases_of


# --- for people ------------------------------------------------------------------------------------------------------


def _head(name: str, twin: Twin, steps: int, width: int) -> list[str]:
    scaled = textwrap.wrap(", ".join(twin.notes) or "nothing", common.width() - 10)
    world = twin.plan.mesh.world
    return [
        f"{name}: a twin with {twin.parameters:,} parameters on {world} process{'es' if world > 1 else ''}, {steps} steps",
        *(f"{'scaled' if place == 0 else '':<10}{line}" for place, line in enumerate(scaled)),
        "",
        f"{'case':<{width}}  {'ranks':>5}  {'loss off by':<18}  max gradient error (tensor)",
    ]


def _line(case: PlanCheck, found: Difference, width: int) -> str:
    begin = f"{case.name:<{width}}  {case.plan.mesh.world:>5}  "
    if found.problem and found.loss != found.loss:
        return f"{begin}FAILED: {found.problem}"
    loss = f"{found.loss:.0e} of {found.loss_bound:.0e}"
    gradient = f"{found.gradient:.0e} of {found.gradient_bound:.0e}  {found.gradient_name}"
    wrong = "" if found.good else f"  WRONG{': ' + found.problem if found.problem else ''}"
    return f"{begin}{loss:<18}  {gradient}{wrong}"
