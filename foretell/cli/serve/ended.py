"""What `foretell serve PLAN` says at its end: what its requests got, beside what is predicted of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.cli import common
from foretell.cli.serve.figures import beside_lines

if TYPE_CHECKING:
    from foretell.plan.types import Plan
    from foretell.serve.record import ServeRecord
    from foretell.serve.start import Started


def ended(server: Started, record: ServeRecord, plan: Plan | None, *, quiet: bool) -> None:
    """Print it, and write it into the record."""
    record.close()
    found = None
    if plan is not None:
        from foretell.api.serving.beside import beside

        with common.progress("predicting what was served"):
            found = beside(plan, record.requests, str(server.about()["device"]))
    record.about({
        "serve": server.about(), "plan": None if plan is None else plan_json(plan), "steps": record.steps,
        "beside": None if found is None else found.to_json(),
    })  # fmt: skip
    if found is None or quiet:
        return
    lost = f", without {found.left_out} cancelled or failed" if found.left_out else ""
    head = f"served    {found.requests:,} requests{lost}; "
    if found.predicted is None:
        common.emit(f"{head}no prediction beside them: {found.why_not}")
        return
    common.emit("\n".join([f"{head}these requests as predicted, and as measured in the server:", *beside_lines(found.predicted, found.measured)]))


def plan_json(plan: Plan) -> object:
    from foretell.plan.file import to_json

    return to_json(plan)
