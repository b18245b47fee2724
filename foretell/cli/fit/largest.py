"""`fit --micro-batch max`, `fit --seq max`: the largest that fits."""

from __future__ import annotations

from typing import Any

from foretell.cli import common
from foretell.errors import UserError
from foretell.options.words import MAX
from foretell.units import gib


def answer(model: str, on: str, options: dict[str, Any], json: bool) -> int:
    """Predict sizes until the largest that fits is known, and tell it with the reason why the next one does not."""
    axes = [name for name in ("micro_batch", "seq") if options[name] == MAX]
    if len(axes) > 1:
        raise UserError("--micro-batch max and --seq max together have many answers", "give one of them a number")
    axis = axes[0]
    doing = common.Doing(f"predicting {model}")
    option = f"--{axis.replace('_', '-')}"

    def work() -> Any:
        from foretell import api
        from foretell.search.advice.largest import LONG

        def attempt(size: int) -> Any:
            return api.fit(model, hardware=on, **{**options, axis: size, "advice_seconds": 0.0})

        return api.most(attempt, progress=lambda size: doing.tell(f"{option} {size}"), first=LONG if axis == "seq" else 1)

    found = common.call(work, doing)
    if json:
        from foretell.report import schema

        told = {"axis": axis, "size": found.size, "next_size": found.next_size, "next_short": found.next_short, "why": found.why,
                "tight": found.tight}  # fmt: skip
        common.emit_json({**schema.answer(found.answer), "largest": told})
    else:
        from foretell.report.words import folded

        common.emit_answer(found.answer)
        lines = [_words(option, found)]
        lines += [f"tight      {option} about {found.tight}: so long it runs, with less to spare"] if found.tight is not None else []
        common.emit("\n".join(folded(lines, common.width())))
    return common.YES if found.size else common.NO_OR_FAILED


def _words(option: str, found: Any) -> str:
    if not found.size:
        return f"largest    none: {option} {found.next_size} is {gib(found.next_short)} short"
    if found.why:
        return f"largest    {option} {found.size}; {found.next_size} is refused: {found.why}"
    if found.next_short <= 0:
        return f"largest    {option} {found.size}; {found.next_size} may not fit: it leaves {gib(-found.next_short)}, within the uncertainty"
    return f"largest    {option} {found.size}; {found.next_size} is {gib(found.next_short)} short"
