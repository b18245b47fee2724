"""`foretell serve`: a model behind OpenAI's HTTP interface, on plain PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from foretell.cli import common
from foretell.cli.serve.asked import ENGINE, INVARIANT
from foretell.cli.serve.ended import ended, plan_json
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.plan.types import Plan
    from foretell.serve.start import Setup


def serve(
    context: typer.Context,
    model: str = typer.Argument(..., metavar="MODEL | PLAN", help="A zoo name, hf:TYPE or hf:FOLDER, FILE.py:FUNCTION; or a plan of plan --serve."),
    weights: Path | None = typer.Option(
        None, "--init-from", metavar="PATH", help="Weights: a safetensors file, a Hugging Face folder, a run or a checkpoint."
    ),
    tokenizer: str | None = typer.Option(None, "--tokenizer", metavar="FOLDER", help="A local tokenizer; without, each byte is a token."),
    override: list[str] = typer.Option([], "--set", metavar="NAME=VALUE", help="A size of the model, such as layers=4."),
    device: str = typer.Option("auto", "--device", metavar="auto|cpu|cuda", help="Where it runs."),
    dtype: str = typer.Option("auto", "--dtype", metavar="auto|fp32|bf16|fp16", help="Of weights, keys and values; auto: fp32 on a CPU, else bf16."),
    pages: int = typer.Option(1024, "--pages", help="Pages of the KV cache, allocated at once: no share of memory is guessed."),
    size: int = typer.Option(16, "--page", help="Tokens of a page."),
    running: int = typer.Option(64, "--running", help="Sequences that are generated at a time, at most."),
    tokens: int = typer.Option(512, "--tokens", help="Tokens that a step computes, at most: long prompts go in such pieces."),
    share: bool = typer.Option(True, "--share/--no-share", help="Prompts that begin alike share pages."),
    replicas: int = typer.Option(1, "--replicas", help="With --on: so many servers, each with its share of the requests."),
    tp: int = typer.Option(1, "--tp", metavar="N", help="Ranks that share every layer, each with its own heads."),
    pp: int = typer.Option(1, "--pp", metavar="N", help="Ranks that have the blocks one after the other; as many steps are under way."),
    weight_format: str = typer.Option("bf16", "--weights", metavar="FORMAT", help="bf16, fp8, int8, int4: run on a CPU, forecast with --on."),
    kv: str = typer.Option("bf16", "--kv", metavar="FORMAT", help="Keys and values in bf16, fp8 or int8; run on a CPU, forecast with --on."),
    queue: int = typer.Option(1024, "--queue", help="Requests that may wait; more are told to come back (429)."),
    host: str = typer.Option("127.0.0.1", "--host", help="The address to listen at. There is no password: leave it to this machine."),
    port: int = typer.Option(8000, "--port", help="0: any that is free."),
    on: str | None = typer.Option(None, "--on", metavar="HW", help="Serve nothing: predict it on this device, such as H100."),
    load: str | None = typer.Option(
        None, "--load", metavar="LOAD", help='With --on: "rate=8, in=1024±512, out=256±128", users=32, or a .csv of requests.'
    ),
    slo: str | None = typer.Option(
        None, "--slo", metavar="LIMITS", help="With --load: ttft=500ms,tpot=40ms; the highest rate that keeps them is told."
    ),
    eject: Path | None = typer.Option(
        None, "--eject", metavar="FILE.py", help="Serve nothing: write a small server in one file that needs torch alone."
    ),
    engine: str = typer.Option("foretell", "--engine", metavar="ENGINE", help=ENGINE),
    graphs: bool = typer.Option(True, "--graphs/--no-graphs", help="On a GPU: launches of a step are replayed as a CUDA graph."),
    compiled: bool = typer.Option(True, "--compile/--no-compile", help="On a GPU: layers under torch.compile, as one piece of code."),
    invariant: bool = typer.Option(False, "--invariant", help=INVARIANT),
    seed: int = typer.Option(0, "--seed", help="Of the weights, where none are given."),
    out: Path | None = typer.Option(None, "--out", metavar="FOLDER", help="Record steps and requests there, for foretell report; it stays small."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Serve MODEL: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. Ctrl-C or SIGTERM finishes what is under way.

    The model stays as it is: its attention is taken over from outside, keys and values are held in pages.
    """
    if model.endswith(".json") and not model.startswith("hf:"):
        from foretell.cli.serve.planned import from_plan

        return from_plan(context, serve, model)
    _check(pages=pages, page=size, running=running, tokens=tokens, queue=queue, replicas=replicas, tp=tp, pp=pp)
    if invariant and (eject is not None or engine != "foretell"):
        raise UserError("--invariant is of foretell's own engine", "leave it out, or --eject and --engine")
    if eject is not None:
        from foretell.cli.serve.ejected import written

        return written(model, override, eject, {"pages": pages, "size": size, "running": running, "tokens": tokens}, seed=seed, json=json)
    if engine != "foretell":
        if on is None:
            raise UserError(f"--engine {engine} without --on: other engines are forecast, not run", f"add --on HW, or plan export --to {engine}")
        from foretell.cli.serve.engine import told_engine

        return told_engine(model, on, override, engine, weight_format, load=load, slo=slo, json=json)
    if on is not None:
        from foretell.cli.serve.forecast import told

        sizes = {"pages": pages, "size": size, "running": running, "tokens": tokens, "share": share, "compiled": compiled, "invariant": invariant}
        ranks = {"replicas": replicas, "tp": tp, "pp": pp, "weights": weight_format, "kv": kv}
        return told(model, on, override, dtype, {**sizes, **ranks}, load=load, slo=slo, graphs=graphs, json=json)
    _check_run(load, slo, replicas, port)
    from foretell.options import words
    from foretell.serve.start import Setup

    asked = Setup(
        model=model, overrides=words.overrides(override), weights=weights, tokenizer=tokenizer, device=device, dtype=dtype, pages=pages, size=size,
        running=running, tokens=tokens, share=share, queue=queue, seed=seed, tp=tp, pp=pp, graphs=graphs, compiled=compiled, invariant=invariant,
        weight_format=weight_format, kv=kv,
    )  # fmt: skip
    return _run(asked, host, port, out, context.obj, json=json)


def _run(asked: Setup, host: str, port: int, out: Path | None, plan: Plan | None, *, json: bool) -> int:
    """Until it is asked to end; 1 where it ended by itself."""
    from foretell.serve.record import ServeRecord
    from foretell.serve.start import started

    record = ServeRecord(out)
    with common.progress(f"building {asked.model}"):
        server = started(asked, record)

    def ready(actual: int) -> None:
        about = server.about()
        record.about({"serve": about, "plan": None if plan is None else plan_json(plan)})
        if json:
            common.emit_json({"serve": {**about, "host": host, "port": actual}})
        else:
            common.emit(server.told(host, actual))

    lost = server.run(host, port, ready)
    ended(server, record, plan, quiet=json)
    if lost:
        common.emit(f"the server ended: {lost}; requests under way were told", sys.stderr)
    return int(bool(lost))


def _check_run(load: str | None, slo: str | None, replicas: int, port: int) -> None:
    """What is only foretold is refused where a server is to run."""
    if load is not None or slo is not None:
        raise UserError("--load and --slo are of a forecast", "add --on HW, such as --on H100")
    if replicas > 1:
        raise UserError(f"--replicas {replicas}: foretell serve runs one", "a server for each, or --on 8xH100 to forecast them")
    if not 0 <= port < 65536:
        raise UserError(f"port {port}", "0 to 65535; 0 is any that is free")


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"--{name} {number}", f"--{name} of at least 1")
