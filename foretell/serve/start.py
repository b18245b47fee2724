"""From a model's name to a server that is ready: weights, pages, tokenizer, engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretell.checkpoint.pretrained import load_into
from foretell.errors import UserError
from foretell.lower.serving_formats import known_kv, known_weights
from foretell.plan.text import shell_word
from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.formats import narrowed
from foretell.serve.http import HttpServer
from foretell.serve.text import words_of
from foretell.serve.thread import EngineLost, EngineThread
from foretell.trace.load.model import Source, load
from foretell.units import human_bytes

if TYPE_CHECKING:
    from foretell.serve.ranks.controller import RankProcesses
    from foretell.serve.record import ServeRecord

RANDOM = "no weights were given: they are random numbers, and so are the answers (--init-from PATH)"
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
    tp: int = 1
    """Ranks that share every layer."""
    pp: int = 1
    """Ranks that have blocks one after the other."""
    graphs: bool = True
    """On a GPU, of one rank."""
    compiled: bool = True
    invariant: bool = False
    """The bits of an answer depend on nothing else that is served; of one rank."""
    weight_format: str = "bf16"
    """Of blocks; bf16: the model's own. On a CPU, of one rank."""
    kv: str = "bf16"
    """Of keys and values, likewise."""


class Started:
    """A server with all that it holds."""

    def __init__(
        self, setup: Setup, engine: ServingEngine, server: HttpServer, notes: list[str], ranks: RankProcesses | None = None
    ) -> None:  # fmt: skip
        self.setup, self.engine, self.server, self.notes, self.ranks = setup, engine, server, notes, ranks

    def about(self) -> dict[str, Any]:
        """ByteWords of weights and pages as they are, and what fits into the pages."""
        runner: Any = self.engine.runner
        if self.ranks is not None:
            weights, kept = sum(runner.weights_bytes), sum(runner.kv_bytes)
        else:
            weights = sum(one.nbytes for one in {id(tensor): tensor for tensor in runner.model.state_dict().values()}.values())
            kept = runner.pool.nbytes
        a_token = kept // (self.setup.pages * self.setup.size)
        return {
            "model": self.setup.model, "device": str(runner.device), "dtype": str(runner.dtype).removeprefix("torch."), "weights_bytes": weights,
            "kv_bytes": kept, "kv_bytes_per_token": a_token, "pages": self.setup.pages, "page_tokens": self.setup.size,
            "tokens": self.setup.pages * self.setup.size, "longest_request": self.engine.longest, "running": self.setup.running,
            "step_tokens": self.setup.tokens, "invariant": self.setup.invariant, "weights": self.setup.weight_format, "kv": self.setup.kv,
            "notes": self.notes,
            "tp": self.setup.tp, "pp": self.setup.pp, "rank_processes": self.ranks.ids if self.ranks is not None else [],
        }  # fmt: skip

    def told(self, host: str, port: int) -> str:
        about = self.about()
        call = '{"prompt": "Once upon a time", "max_tokens": 32}'
        invariant = ["invariant: the bits of an answer depend on nothing else that is served"] if self.setup.invariant else []
        ranks = f" (tp {self.setup.tp}, pp {self.setup.pp}: {self.setup.tp * self.setup.pp} ranks)" if self.ranks is not None else ""
        held = [f"{name} {what}" for name, what in ((self.setup.weight_format, "weights"), (self.setup.kv, "keys and values")) if name != "bf16"]
        dtype = ", ".join((about["dtype"], *held))
        return "\n".join([
            f"{about['model']}{ranks} on {about['device']}, {dtype}: weights {human_bytes(about['weights_bytes'])}, "
            f"keys and values {human_bytes(about['kv_bytes'])} ({about['pages']} pages of {about['page_tokens']} tokens, "
            f"{human_bytes(about['kv_bytes_per_token'])} a token)",
            f"room for {about['tokens']:,} tokens at once; the longest request {about['longest_request']:,}; "
            f"{about['running']} sequences and {about['step_tokens']} tokens a step",
            *invariant,
            *self.notes,
            f"ready at http://{host}:{port}/v1   (Ctrl-C finishes what is under way)",
            f"try: curl http://{host}:{port}/v1/completions -d {shell_word(call)}",
        ])  # fmt: skip

    def run(self, host: str, port: int, ready: Callable[[int], None]) -> str:
        """Until it is asked to end; else why it ended."""
        try:
            asyncio.run(self.server.serve(host, port, ready))
        finally:
            if self.ranks is not None:
                self.ranks.close()
        return self.server.keeper.lost


def started(setup: Setup, record: ServeRecord | None = None) -> Started:
    """Build, load, check against the model's own forward; raises UserError for what cannot be served."""
    device = _device(setup.device)
    if setup.dtype not in ("auto", *DTYPES):
        raise UserError(f"--dtype {setup.dtype}", f"auto, {', '.join(DTYPES)}")
    notes = [] if setup.weights is not None else [RANDOM]
    _refuse_formats(setup, device)
    if setup.tp * setup.pp > 1:
        if setup.invariant:
            raise UserError(f"--tp {setup.tp} --pp {setup.pp} with --invariant, which is of one rank", "one rank, or no --invariant")
        return _ranked(replace(setup, device=device.type), notes, record)
    model, lines = _loaded(setup, device)
    notes += lines
    model = model.to(device)
    limits = StepLimits(running=setup.running, tokens=max(setup.tokens, setup.running), invariant=setup.invariant)
    engine = ServingEngine(
        narrowed(model, setup.weight_format), pages=setup.pages, size=setup.size, limits=limits, share=setup.share, compiled=setup.compiled,
        graphs=setup.graphs, kv=setup.kv,
    )  # fmt: skip
    notes += engine.runner.notes
    words = words_of(setup.tokenizer, engine.runner.words)
    keeper = EngineThread(engine, most_waiting=setup.queue, record=record)
    return Started(setup, engine, HttpServer(keeper, words, setup.model), notes)


def _refuse_formats(setup: Setup, device: torch.device) -> None:
    known_weights(setup.weight_format), known_kv(setup.kv)
    if (setup.weight_format, setup.kv) == ("bf16", "bf16"):
        return
    asked = f"--weights {setup.weight_format} --kv {setup.kv}"
    if device.type != "cpu":
        raise UserError(f"{asked} on {device.type}: foretell has no kernel for fewer bits", "leave them out, or --device cpu; --on HW forecasts them")
    if setup.tp * setup.pp > 1:
        raise UserError(f"{asked} with --tp {setup.tp} --pp {setup.pp}: formats are of one rank", "one rank, or 16 bits")


def _ranked(setup: Setup, notes: list[str], record: ServeRecord | None) -> Started:
    from foretell.serve.ranks.controller import RankedRunner, RankLayout, RankProcesses
    from foretell.serve.ranks.engine import RankedEngine

    if setup.device == "cuda" and torch.cuda.device_count() < setup.tp * setup.pp:
        there = torch.cuda.device_count()
        raise UserError(f"--tp {setup.tp} --pp {setup.pp} wants {setup.tp * setup.pp} GPUs, and there are {there}", "fewer ranks, or --device cpu")
    layout = RankLayout(tp=setup.tp, pp=setup.pp)
    told = {**asdict(setup), "overrides": dict(setup.overrides), "weights": None if setup.weights is None else str(setup.weights)}
    try:
        ranks = RankProcesses(layout, told)
    except EngineLost as error:
        raise UserError(f"the ranks did not start: {error}", "see what they said above") from error
    try:
        runner = RankedRunner(ranks.links, layout, ranks.ended)
        limits = StepLimits(running=setup.running, tokens=max(setup.tokens, setup.running))
        engine = RankedEngine(runner, pages=setup.pages, size=setup.size, limits=limits, share=setup.share)
        words = words_of(setup.tokenizer, runner.words)
    except EngineLost as error:
        ranks.close()
        raise UserError(f"the ranks did not start: {error}", "see what they said above") from error
    except BaseException:
        ranks.close()
        raise
    keeper = EngineThread(engine, most_waiting=setup.queue, record=record)
    return Started(setup, engine, HttpServer(keeper, words, setup.model), notes, ranks)


def built(setup: Mapping[str, Any]) -> nn.Module:
    """The whole model, as a rank builds it before it keeps its part."""
    asked = Setup(**{**setup, "weights": None if setup["weights"] is None else Path(setup["weights"])})
    return _loaded(asked, torch.device(asked.device))[0]


def _loaded(setup: Setup, device: torch.device) -> tuple[nn.Module, list[str]]:
    """A model with its weights in the dtype it is served in, and what is to be said of them."""
    torch.manual_seed(setup.seed)
    model = load(Source(model=setup.model, overrides=dict(setup.overrides))).model
    lines = [] if setup.weights is None else list(load_into(model, setup.weights).lines())
    return model.to(DTYPES[("fp32" if device.type == "cpu" else "bf16") if setup.dtype == "auto" else setup.dtype]), lines


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise UserError(f"--device {name}", "auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("--device cuda, and PyTorch sees no CUDA device here", "--device cpu")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)
