"""`foretell fit MODEL --on HW`: does it fit, how long does a step take, what does it cost?"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from foretell.cli import common
from foretell.cli.fit import beside as side_by_side
from foretell.cli.fit import largest as fit_most
from foretell.cli.fit import table as fit_table
from foretell.cli.options import taking
from foretell.cli.serve import asked as serving
from foretell.errors import UserError
from foretell.options import FitOptions
from foretell.options.words import MAX
from foretell.quantities import FITS

FASTER_SECONDS = 8.0
"""After which `fit` begins no further prediction of what would make a step faster; FORETELL_FASTER_SECONDS says another, 0 none at all."""
@taking(FitOptions)
def fit(
    context: typer.Context,
    model: str | None = typer.Argument(None, metavar="MODEL | -- python SCRIPT ...", show_default=False,
        help="Zoo name, hf:TYPE, hf:ORG/NAME, hf:config.json, timm:NAME, torchvision:NAME or file.py:function; or -- and your script's command."),
    on: str = typer.Option(..., "--on", metavar="HW", show_default=False,
                           help="H100, H100:8, 2x8xH100, H100,memory=60GiB, auto (this machine), cluster.toml; several with commas: a table."),
    *,
    options: dict[str, Any],
    compile_how: str | None = typer.Option(None, "--compile-how", metavar="HOW",
                                           help="model (as --compile), blocks (each block by itself), graphs (model, with CUDA graphs)."),
    objective: str = typer.Option("time", metavar="WHAT", help="How to sort several kinds of hardware: time, cost or energy."),
    beside: list[str] = typer.Option([], metavar="MODEL[,KEY=VALUE]...", help=side_by_side.HELP),
    footprint: bool = typer.Option(False, "--footprint", help="Hardware footprint of the run by MFU and device lifetime, with embodied carbon."),
    from_: Path | None = typer.Option(None, "--from", metavar="FILE", show_default=False,
        help="Take options from a file of torchtitan, accelerate, DeepSpeed, transformers' Trainer or Lightning; options typed here win."),
    serve: bool = typer.Option(False, "--serve", help="Serving: pages of keys and values, the largest step, how many requests at once."),
    load: str | None = typer.Option(None, "--load", metavar="LOAD", help=serving.LOAD),
    slo: str | None = typer.Option(None, "--slo", metavar="LIMITS", help=serving.SLO),
    pages: int | None = typer.Option(None, "--pages", metavar="N", help="With --serve: pages of the KV cache; default: the most that fit."),
    page: int = typer.Option(16, "--page", metavar="N", help="With --serve: tokens of a page."),
    running: int = typer.Option(64, "--running", metavar="N", help="With --serve: sequences that are generated at a time."),
    step_tokens: int = typer.Option(512, "--step-tokens", metavar="N", help="With --serve: tokens that a step computes."),
    weights: str = typer.Option("bf16", "--weights", metavar="FORMAT", help="With --serve: bf16, fp8, int8 or int4 (assumed, not measured)."),
    kv: str = typer.Option("bf16", "--kv", metavar="FORMAT", help="With --serve: keys and values in bf16, fp8 or int8 (assumed, not measured)."),
    invariant: bool = typer.Option(False, "--invariant", help=f"With --serve: {serving.INVARIANT}"),
    verbose: bool = typer.Option(False, "--verbose", help=common.VERBOSE_HELP),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Predict whether one step of MODEL fits on HW, how long it takes and what it costs. Exit 0 it fits (or is tight), 1 it does not, 2 bad input."""
    options["compile"] = compile_how or options["compile"]
    script = common.script_words()
    sizes = {"pages": pages, "page": page, "running": running, "step_tokens": step_tokens}
    if serve:
        from foretell.cli.fit.serve import room_command

        return room_command(model, on, options, context, sizes, load=load, slo=slo, weights=weights, kv=kv, invariant=invariant, json=json)
    serving.refuse_without(context, "load", "slo", "weights", "kv", "invariant", *sizes)
    if script is not None:
        return _follow(model, script, on, {**options, "json": json}, context)
    theirs, on = (None, on) if from_ is None else take_over(from_, on, options, context)
    model = model or (None if theirs is None else theirs["model"])
    if model is None:
        raise UserError("no model is named", "foretell fit MODEL --on HW, or foretell fit --on HW -- python train.py ...")
    many = _several(model, on, options, objective, alone=bool(beside or footprint or options["trace_out"]), json=json)
    if many is not None:
        return many
    if footprint and not any(options[name] for name in ("tokens", "samples", "epochs")):
        raise UserError("--footprint is of a whole run, and none is given", "add --tokens, --samples or --epochs")
    if options["infer"] and not (beside or footprint or options["trace_out"]) and count_of(on) > 1:
        return _serve(model, on, options, json)
    prediction, said = _answered(model, on, options, advises=options["cache"] and not (json or beside))
    beside_it = side_by_side.predicted(model, on, options, beside) if beside else None
    return _told(prediction, on, {} if theirs is None else {"from": theirs}, _used_up(prediction, on) if footprint else None, beside_it, json, said)


def _serve(model: str, on: str, options: dict[str, Any], json: bool) -> int:
    """Inference on several devices: a copy on each, or where none holds one, a split over all of them."""
    from foretell.cli.plan.infer import fit_command

    prediction, _ = _answered(model, on, {**options, "advice_seconds": 0.0}, advises=False)
    return _told(prediction, on, {}, None, None, json, False) if prediction.fits else fit_command(prediction, on, options, json)


def _told(prediction: Any, on: str, told: dict[str, Any], used_up: Any, beside_it: Any, json: bool, said: bool) -> int:
    _emit_json(prediction, told, used_up, beside_it) if json else _emit(prediction, used_up, beside_it, on, said)
    return common.YES if prediction.fits and (beside_it is None or beside_it[0].fits) else common.NO_OR_FAILED


def _several(model: str, on: str, options: dict[str, Any], objective: str, *, alone: bool, json: bool) -> int | None:
    """Check what was asked; answer where several kinds of hardware are named, or the largest size is asked for."""
    hardware = fit_table.several(on)
    plain = {name: 1 if value == MAX else value for name, value in options.items()}
    for one in hardware:
        check(model, one, plain)
    largest = plain != options
    if len(hardware) == 1 and not largest:
        return None
    if alone or (len(hardware) > 1 and largest):
        raise UserError("several kinds of hardware or max, and --beside, --footprint, --trace-out or both of them", "ask for one at a time")
    if largest:
        return fit_most.answer(model, on, options, json)
    return fit_table.answer(model, hardware, options, objective, json)


_OF_A_SCRIPT = ("hints", "expandable_segments", "tokens", "samples", "epochs", "dataset_size", "region", "price", "trace_out", "time_limit",
                "keep_writes", "cache")  # fmt: skip
"""Options beside a script: all others the script says itself."""
_OF_EVERY = ("on", "verbose", "json", "debug")


def _follow(model: str | None, words: Sequence[str], on: str, options: dict[str, Any], context: typer.Context) -> int:
    """Answer for a script, as it is."""
    common.check_beside_script(model, context, (*_OF_A_SCRIPT, *_OF_EVERY), "change it in the script or its arguments")
    check_run(options)
    doing = common.Doing(f"following {' '.join(words)}")

    def work() -> Any:
        from foretell import api

        return api.fit_script(words, hardware=on, progress=doing.tell, **{name: options[name] for name in _OF_A_SCRIPT})

    prediction = common.call(work, doing)
    if prediction.verdict == FITS and options["cache"] and not (options["json"] or options["keep_writes"]):
        common.emit_answer(prediction)
        _faster_script(words, on, options)
    else:
        _emit_json(prediction, {}, None, None) if options["json"] else _emit(prediction, None, None, on)
    return common.YES if prediction.fits else common.NO_OR_FAILED


def _faster_script(words: Sequence[str], on: str, options: dict[str, Any]) -> None:
    from foretell import api
    from foretell.errors import ForetellError
    from foretell.report.terminal.faster import top

    if not _faster_seconds():
        return
    doing = common.Doing("predicting what would make it faster")
    asked = {"hardware": on, "seconds": _faster_seconds(), "time_limit": options["time_limit"], "hints": options["hints"]}
    try:
        found = common.call(lambda: api.faster_script(words, **asked), doing)
    except ForetellError:
        return  # the answer is there; what cannot be followed again has no advice
    lines = top(found, (), common.width())
    common.emit("\n".join(lines)) if lines else None


def _emit_json(prediction: Any, told: dict[str, Any], used_up: Any, beside_it: Any) -> None:
    from foretell.report import schema

    more = {} if used_up is None else {"footprint": [one.to_json() for one in used_up]}
    more |= {} if beside_it is None else {"beside": beside_it[0].to_json()}
    common.emit_json({**schema.answer(prediction), **told, **more})


def _answered(model: str, on: str, options: dict[str, Any], *, advises: bool) -> tuple[Any, bool]:
    """The prediction, and whether its answer was printed: at once where looking for advice takes a while after it."""
    doing = common.Doing(f"tracing {model}")
    asked = {**options, "progress": doing.tell}
    if not advises:
        return common.call(lambda: _predict(model, on, asked), doing), False
    answer = common.call(lambda: _predict(model, on, {**asked, "advice_seconds": 0.0}), doing)
    common.emit_answer(answer)
    if answer.verdict == FITS:
        _faster(model, answer, on, options)
        return answer, True
    doing = common.Doing("predicting what would make it fit")
    return common.call(lambda: _predict(model, on, {**options, "progress": doing.tell}), doing), True


def _faster(model: str, answer: Any, on: str, options: dict[str, Any]) -> None:
    """Print the largest gains below the answer, as far as a few seconds tell."""
    from foretell import api
    from foretell.report.terminal.faster import top

    if not _faster_seconds():
        return
    doing = common.Doing("predicting what would make it faster")
    found = common.call(lambda: api.faster(model, answer, hardware=on, seconds=_faster_seconds(), joins=False, progress=doing.tell, **options), doing)
    lines = top(found, _without_run(common.typed()), common.width())
    common.emit("\n".join(lines)) if lines else None


def _faster_seconds() -> float:
    """As the user says it, else the usual."""
    text = os.environ.get("FORETELL_FASTER_SECONDS", "")
    return float(text) if re.fullmatch(r"\d+(\.\d*)?", text) else FASTER_SECONDS


def _without_run(words: Sequence[str]) -> list[str]:
    """What was typed, without the options of a whole run, which `advise` has not."""
    from foretell.report.command import without

    found = list(words)
    for option in ("--tokens", "--samples", "--epochs", "--dataset-size", "--region", "--price", "--objective", "--trace-out"):
        found = without(found, option, has_value=True)
    return [word for word in found if word not in ("--debug", "--footprint", "--verbose")]


def _emit(prediction: Any, used_up: Any, beside_it: Any, on: str, said: bool = False) -> None:
    typed = [word for word in common.typed() if word not in ("--debug", "--no-cache", "--verbose")]
    if not said:
        common.emit_screen(prediction, typed)
    elif prediction.verdict != FITS:
        common.emit_advice(prediction, typed)
    if used_up is not None:
        from foretell.report.terminal.footprint import lines

        common.emit("\n".join(lines(used_up, parse_device(on))))
    if beside_it is not None:
        side_by_side.show(*beside_it)


def _predict(model: str, on: str, options: dict[str, Any]) -> Any:
    from foretell import api

    return api.fit(model, hardware=on, **options)


def parse_device(on: str) -> Any:
    from foretell.hardware import parse

    return parse(on).device


def count_of(on: str) -> int:
    from foretell.hardware import parse

    return parse(on).count


def _used_up(prediction: Any, on: str) -> tuple[Any, ...]:
    """Devices that the run uses up: as predicted first, then by MFU and lifetime. Nothing where no speed is known."""
    from foretell.hardware import footprint
    from foretell.price.footprint import scenarios

    device, run, mfu = parse_device(on), prediction.run, prediction.mfu
    if run is None or mfu is None:
        return ()
    made, flops = footprint(device), run.steps * mfu.flops_per_step
    own = scenarios(flops, device, dtype=mfu.peak_dtype, mfus=(mfu.value,), lifetimes=(made.lifetime_years if made else 4.0,))
    return (*own, *scenarios(flops, device, dtype=mfu.peak_dtype))


def take_over(path: Path, on: str, options: dict[str, Any], context: typer.Context) -> tuple[dict[str, Any], str]:
    """Put what another tool's file says into the options, unless it was typed; what was taken and not, and where to run."""
    from foretell.export.read import layout, read, words
    from foretell.plan.types import Mesh

    if options["infer"]:
        raise UserError("--from takes options of training, and --infer is inference", "leave one of them out")
    theirs = read(path)
    typed = {name: options[name] for name in options if name in context.params and is_typed(context, name)}
    if is_typed(context, "compile") or is_typed(context, "compile_how"):
        typed["compile"] = options["compile"]
    sizes = {name: value for name, value in typed.items() if value != MAX}
    on, said, devices = spread(on, layout.ranks(theirs, sizes))
    found = in_file(path, lambda: layout.described(theirs, sizes, devices))
    whole = found.mesh == Mesh(dp_shard=count_of(fit_table.several(on)[0]))
    if not whole or (devices > 1 and not found.reshard) or isinstance(found.recompute, int):
        kept = ", reshard_after_forward=False" if devices > 1 and not found.reshard else ""
        every = f", one of {found.recompute} blocks recomputed" if isinstance(found.recompute, int) else ""
        raise UserError(f"{path} has {layout.told(found.mesh)}{kept}{every}, which `fit` does not predict", f"foretell plan --on {on} --from {path}")
    values = {name: getattr(found, name) for name in ("micro_batch", "accumulate", "precision", "optimizer", "clip", "recompute", "compile")}
    values["seq"] = theirs.options.get("seq")
    if values["clip"] == 0:
        values["clip"] = None
    options.update({name: value for name, value in values.items() if value is not None and name not in typed})
    shown = {"model": context.params.get("model"), **{name: value for name, value in typed.items() if name in values}}
    told = words.content(theirs, path, shown, [said] if said else [])
    if not common.wants_json():
        common.emit("\n".join(words.lines(theirs, told)), sys.stderr)
    return {**told, "model": theirs.options.get("model")}, on


def is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def in_file(path: Path, work: Any) -> Any:
    """What is wrong with a file's values, with its name before it."""
    try:
        return work()
    except UserError as error:
        raise UserError(f"{path}: {error.problem}", error.remedy) from None


def spread(on: str, ranks: int | None) -> tuple[str, str, int]:
    """The hardware with as many devices as a file has ranks, where no number was typed; what was changed, and how many ranks that makes."""
    from foretell.hardware import parse

    kinds = [parse(one) for one in fit_table.several(on)]
    counts = sorted({kind.count for kind in kinds})
    if len(counts) > 1:
        raise UserError(f"--on {on} has hardware of {' and '.join(map(str, counts))} devices, and a file has one layout", "name one number of them")
    if ranks in (None, counts[0]):
        return on, "", counts[0]
    if kinds[0].device.backend == "cpu":  # whose cores its processes share
        return on, "", ranks
    head, comma, rest = on.partition(",")
    if len(kinds) > 1 or counts[0] > 1 or head.strip().casefold().startswith("auto") or head.endswith((".toml", ".json")):
        return on, "", counts[0]
    wide = f"{head.strip()}:{ranks}{comma}{rest}"
    return wide, f"{ranks} ranks → --on {wide}", ranks


def check(model: str, on: str, options: dict[str, Any]) -> None:
    """Raise at once what is wrong with the input as far as that can be seen without torch."""
    check_step(model, on, options)
    check_run(options)


def check_step(model: str, on: str, options: dict[str, Any]) -> None:
    """The same of the model, its batch, how it is trained and where."""
    from foretell.hardware import parse
    from foretell.options.adapters import adapters_of
    from foretell.options.kernels import kernels_of
    from foretell.options.sync import sync_of
    from foretell.plan.precision import read
    from foretell.trace.load.model import Source
    from foretell.trace.load.model import check as check_source
    from foretell.trace.recipe import Recipe

    of_source = ("overrides", "micro_batch", "seq", "image", "loss")
    check_source(Source(model=model, **{name: options[name] for name in of_source if options[name] is not None}))
    if not on.strip().casefold().startswith("auto"):  # only torch knows this machine
        kernels_of(options.get("kernels"), parse(on), "")
    of_recipe = ("optimizer", "recompute", "accumulate", "clip", "freeze", "loss_chunks")
    given = {name: options[name] for name in of_recipe if name in options} | {"mode": "infer" if options.get("infer") else "train"}
    given |= adapters_of(options)
    sync_of(options)
    Recipe(**given | ({"precision": read(options["precision"], False)} if options["precision"] is not None else {}))


def check_run(options: dict[str, Any]) -> None:
    """Raise what is wrong with a whole run, its region and price, and where its timeline is to go."""
    from foretell.hardware import carbon_g_per_kwh
    from foretell.simulate.wishes import Amount

    Amount.of(**{name: options[name] for name in ("tokens", "samples", "epochs", "dataset_size")})
    if options["dataset_size"] is not None and options["epochs"] is None:
        raise UserError("--dataset-size is given without --epochs", "add --epochs N, or say the whole as --samples N")
    if options["region"] is not None:
        carbon_g_per_kwh(options["region"])
    if options["price"] is not None and not 0 <= options["price"] < math.inf:
        remedy = "give US dollars of one device and hour, such as --price 2.5"
        raise UserError(f"--price {options['price']:g} is no price", remedy)
    if options["trace_out"] is not None:
        _check_writable(Path(options["trace_out"]))


def _check_writable(path: Path) -> None:
    """Before the work, not after it."""
    if path.is_dir() or not path.name:
        raise UserError(f"--trace-out {str(path)!r} is a folder", "name a file in it, such as step.json")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--trace-out {str(path)!r}: there is no folder {str(path.parent)!r}", "make it, or name another")
