"""From a model's name to a server that is ready: weights, pages, tokenizer, engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretell.checkpoint.pretrained import load_into
from foretell.errors import UserError
from foretell.plan.text import shell_word
from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.http import HttpServer
from foretell.serve.text import words_of
from foretell.serve.thread import EngineThread
from foretell.trace.load.model import Source, load
from foretell.units import human_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is to be served, and how."""

    model: str
    overrides: Mapping[str, Any]
    weights: Path | None
    tokenizer: str | None
    device: str
    dtype: str
    pages: int
    size: int
    running: int
    tokens: int
    share: bool
    queue: int
    seed: int


class Started:
    """A server with all that it holds."""

    def __init__(self, setup: Setup, engine: ServingEngine, server: HttpServer, notes: list[str]) -> None:
        self.setup, self.engine, self.server, self.notes = setup, engine, server, notes

    def about(self) -> dict[str, Any]:
        """ByteWords of weights and pages as they are, and what fits into the pages."""
        runner = self.engine.runner
        weights = sum(one.nbytes for one in {id(tensor): tensor for tensor in runner.model.state_dict().values()}.values())
        a_token = runner.pool.nbytes // (self.setup.pages * self.setup.size)
        return {
            "model": self.setup.model, "device": str(runner.device), "dtype": str(runner.dtype).removeprefix("torch."), "weights_bytes": weights,
            "kv_bytes": runner.pool.nbytes, "kv_bytes_per_token": a_token, "pages": self.setup.pages, "page_tokens": self.setup.size,
            "tokens": self.setup.pages * self.setup.size, "longest_request": self.engine.longest, "running": self.setup.running,
            "step_tokens": self.setup.tokens, "notes": self.notes,
        }  # fmt: skip

    def told(self, host: str, port: int) -> str:
        about = self.about()
        call = '{"prompt": "Once upon a time", "max_tokens": 32}'
        return "\n".join([
            f"{about['model']} on {about['device']}, {about['dtype']}: weights {human_bytes(about['weights_bytes'])}, "
            f"keys and values {human_bytes(about['kv_bytes'])} ({about['pages']} pages of {about['page_tokens']} tokens, "
            f"{human_bytes(about['kv_bytes_per_token'])} a token)",
            f"room for {about['tokens']:,} tokens at once; the longest request {about['longest_request']:,}; "
            f"{about['running']} sequences and {about['step_tokens']} tokens a step",
            *self.notes,
            f"ready at http://{host}:{port}/v1   (Ctrl-C finishes what is under way)",
            f"try: curl http://{host}:{port}/v1/completions -d {shell_word(call)}",
        ])  # fmt: skip

    def run(self, host: str, port: int, ready: Callable[[int], None]) -> None:
        asyncio.run(self.server.serve(host, port, ready))


def started(setup: Setup) -> Started:
    """Build, load, check against the model's own forward; raises UserError for what cannot be served."""
    device = _device(setup.device)
    if setup.dtype not in ("auto", *DTYPES):
        raise UserError(f"--dtype {setup.dtype}", f"auto, {', '.join(DTYPES)}")
    torch.manual_seed(setup.seed)
    model = load(Source(model=setup.model, overrides=dict(setup.overrides))).model
    notes = []
    if setup.weights is not None:
        notes += load_into(model, setup.weights).lines()
    else:
        notes.append("no weights were given: they are random numbers, and so are the answers (--init-from PATH)")
    dtype = DTYPES[("fp32" if device.type == "cpu" else "bf16") if setup.dtype == "auto" else setup.dtype]
    model = model.to(device=device, dtype=dtype)
    limits = StepLimits(running=setup.running, tokens=max(setup.tokens, setup.running))
    engine = ServingEngine(model, pages=setup.pages, size=setup.size, limits=limits, share=setup.share)
    words = words_of(setup.tokenizer, engine.runner.words)
    keeper = EngineThread(engine, most_waiting=setup.queue)
    return Started(setup, engine, HttpServer(keeper, words, setup.model), notes)


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise UserError(f"--device {name}", "auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda, and PyTorch sees no CUDA device here", "--device cpu")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)
