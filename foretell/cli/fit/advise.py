"""`foretell plan advise`: what would make a step faster, or make it fit, each change predicted."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from foretell.cli import common
from foretell.cli.fit.fit import TIME_LIMIT, check_step, hints, overrides


def advise(
    model: str = typer.Argument(..., metavar="MODEL", help="As for `fit`: a zoo name, hf:TYPE, timm:NAME or file.py:function."),
    on: str = typer.Option(..., "--on", metavar="HW", show_default=False, help="H100, H100:8, 2x8xH100, auto (this machine) or cluster.toml."),
    micro_batch: int = typer.Option(1, metavar="N", help="Samples in one forward and backward, on each device."),
    seq: int | None = typer.Option(None, metavar="N", help="Tokens per sample; default: the model's usual."),
    image: int | None = typer.Option(None, metavar="N", help="Side of the image in pixels; default: the model's usual."),
    optimizer: str = typer.Option("adamw-fused", metavar="NAME", help="As for `fit`."),
    precision: str | None = typer.Option(None, metavar="NAME", help="As for `fit`; default: by device."),
    recompute: str = typer.Option("none", metavar="HOW", help="none, full (every block) or selective."),
    accumulate: int = typer.Option(1, metavar="N", help="Micro-batches per optimizer step."),
    clip: float | None = typer.Option(None, metavar="X", help="Clip the gradient norm to X; default: no clipping."),
    lora: int | None = typer.Option(None, metavar="RANK", help="As for `fit`."),
    nf4: bool = typer.Option(False, "--nf4", help="As for `fit`."),
    freeze: list[str] = typer.Option([], metavar="PREFIX", help="As for `fit`; may be repeated."),
    infer: bool = typer.Option(False, "--infer", help="One forward without gradients instead of a training step."),
    compile: bool = typer.Option(False, "--compile", help="The model runs under torch.compile already."),
    compile_how: str | None = typer.Option(None, "--compile-how", metavar="HOW", help="The same; model, blocks or graphs."),
    expandable_segments: bool = typer.Option(False, "--expandable-segments", help="As for `fit`."),
    channels_last: bool = typer.Option(False, "--channels-last", help="Images and convolutions are in torch.channels_last already."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a setting of the model; may be repeated."),
    hint: list[str] = typer.Option([], metavar="PATTERN=NUMBER", help="As for `fit`; may be repeated."),
    loss: str | None = typer.Option(None, metavar="FILE.PY:FUNCTION", help="Loss of (output, batch); default: the model's own."),
    seconds: float = typer.Option(300.0, metavar="S", help="After which no further change is predicted."),
    time_limit: float = TIME_LIMIT,
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    no_cache: bool = typer.Option(False, "--no-cache", help="Trace again, and keep nothing."),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """What would make one step of MODEL on HW faster: each change predicted as `fit` would, and the best of them together.

    Where the step does not fit: what would make it fit. Exit 0 it fits, 1 it does not, 2 bad input.
    """
    options: dict[str, Any] = {
        "optimizer": optimizer, "precision": precision, "recompute": recompute, "accumulate": accumulate, "clip": clip, "infer": infer,
        "micro_batch": micro_batch, "seq": seq, "image": image, "loss": loss, "overrides": overrides(settings), "cache": not no_cache,
        "lora": lora, "nf4": nf4, "freeze": tuple(freeze), "hints": hints(hint), "expandable_segments": expandable_segments,
        "compile": compile_how or compile, "channels_last": channels_last, "time_limit": time_limit,
    }  # fmt: skip
    check_step(model, on, options)
    doing = common.Doing(f"advising on {model}")

    def work() -> Any:
        from foretell import api

        return api.advise(model, hardware=on, seconds=seconds, progress=doing.tell, **options)

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
