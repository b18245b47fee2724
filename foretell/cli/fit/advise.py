"""`foretell plan advise`: what would make a step faster, or make it fit, each change predicted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from foretell.cli import common
from foretell.cli.fit.fit import check_step
from foretell.cli.options import taking
from foretell.options import AdviseOptions


@taking(AdviseOptions)
def advise(
    model: str = typer.Argument(..., metavar="MODEL", help="As for `fit`: a zoo name, hf:TYPE, timm:NAME or file.py:function."),
    on: str = typer.Option(..., "--on", metavar="HW", show_default=False, help="H100, H100:8, 2x8xH100, auto (this machine) or cluster.toml."),
    *,
    micro_batch: int | None = typer.Option(None, metavar="N", help="Samples in one forward and backward, on each device; default: as `fit`."),
    seq: int | None = typer.Option(None, metavar="N", help="Tokens per sample; default: the model's usual."),
    options: dict[str, Any],
    compile_how: str | None = typer.Option(None, "--compile-how", metavar="HOW", help="What torch.compile has already: model, blocks or graphs."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """What would make one step of MODEL on HW faster: each change predicted as `fit` would, and the best of them together.

    Where the step does not fit: what would make it fit. Exit 0 it fits, 1 it does not, 2 bad input.
    """
    options |= {"micro_batch": micro_batch, "seq": seq, "compile": compile_how or options["compile"]}
    check_step(model, on, options)
    doing = common.Doing(f"advising on {model}")

    def work() -> Any:
        from foretell import api

        return api.advise(model, hardware=on, progress=doing.tell, **options)

    answer, found = common.call(work, doing)
    if json:
        from foretell.report import schema

        return common.emit_json({**schema.answer(answer), "faster": None if found is None else asdict(found)}) or _status(answer)
    typed = [word for word in common.typed() if word not in ("--debug", "--no-cache")]
    if found is None:
        common.emit_screen(answer, ["fit", *typed[1:]])
        return _status(answer)
    from foretell.report.terminal.faster import lines

    common.emit("\n".join(lines(answer, found, typed, common.width())))
    return _status(answer)


def _status(answer: Any) -> int:
    return common.YES if answer.fits else common.NO_OR_FAILED
