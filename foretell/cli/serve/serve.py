"""`foretell serve`: a model behind OpenAI's HTTP interface, on plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import typer

from foretell.cli import common
from foretell.errors import UserError


def serve(
    model: str = typer.Argument(..., metavar="MODEL", help="A zoo name, hf:TYPE or hf:FOLDER, or FILE.py:FUNCTION."),
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
    queue: int = typer.Option(1024, "--queue", help="Requests that may wait; more are told to come back (429)."),
    host: str = typer.Option("127.0.0.1", "--host", help="The address to listen at. There is no password: leave it to this machine."),
    port: int = typer.Option(8000, "--port", help="0: any that is free."),
    seed: int = typer.Option(0, "--seed", help="Of the weights, where none are given."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:
    """Serve MODEL: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics. Ctrl-C or SIGTERM finishes what is under way.

    The model stays as it is: its attention is taken over from outside, keys and values are held in pages.
    """
    _check(pages=pages, page=size, running=running, tokens=tokens, queue=queue)
    if not 0 <= port < 65536:
        raise UserError(f"port {port}", "0 to 65535; 0 is any that is free")
    from foretell.options import words
    from foretell.serve.start import Setup, started

    asked = Setup(
        model=model, overrides=words.overrides(override), weights=weights, tokenizer=tokenizer, device=device, dtype=dtype, pages=pages, size=size,
        running=running, tokens=tokens, share=share, queue=queue, seed=seed,
    )  # fmt: skip
    with common.progress(f"building {model}"):
        server = started(asked)

    def ready(actual: int) -> None:
        about = server.about()
        if json:
            common.emit_json({"serve": {**about, "host": host, "port": actual}})
        else:
            common.emit(server.told(host, actual))

    server.run(host, port, ready)
    return 0


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"--{name} {number}", f"--{name} of at least 1")
