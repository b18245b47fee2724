"""`foretell tune serve`: settings of a server for a load, searched by prediction, the best of them measured on this machine.

    seconds of steps   the path (lower, price, simulate) where this device is known; else fitted to steps measured here
      ▼ search         search.serving.settings: all that the load could use, request by request
      ▼ measured       as `foretell serve` starts, the best predicted, then neighbours of the best measured (serve.tune)
      ▼ carried over   what the same search finds best on another device, measured here
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.api.serving.forecast import PRECISIONS, ServedModel, ServingAsked, served_model
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.lower.serving import StepShape
from foretell.plan.precision import in_plan
from foretell.plan.recipe import model_of
from foretell.plan.types import Mesh, Plan, ServeLayout
from foretell.price.serving.measured_steps import MeasuredSteps, fitted
from foretell.search.serving.settings import (
    TUNED,
    ServeFigures,
    SettingsPoint,
    SettingsQuestion,
    best_of,
    different,
    key_of,
    neighbours,
    predicted,
    ranked,
    search,
    with_pages,
)
from foretell.serve.tune.table import MeasuredSettings, TuneTable
from foretell.serve.tune.trial import ServedWhat, calibrated, measured
from foretell.simulate.serving.layout import LayoutCosts, LayoutShares
from foretell.simulate.serving.load import Load
from foretell.simulate.serving.records import INSIDE, Limit
from foretell.trace.load.model import Source, check

MEMORY_SHARE = 0.25
"""Of this machine's memory, that pages on a CPU take at most."""
CALIBRATION_SECONDS = 2.5
CALIBRATED = 64
"""Sequences that steps are measured with, where none can be predicted."""
MOST_CALIBRATION_PAGES = 8192
WINDOW = 10.0
"""Seconds of arrivals that settings are compared by, at most."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TuneAsked:
    """What settings are wanted for, and how much may be measured."""

    what: ServedWhat
    load: Load
    load_text: str
    limit: Limit
    slo: str
    table: Path
    base: ServeLayout = field(default_factory=ServeLayout)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    most: int = 6
    """Settings that are measured, besides those carried over."""
    seconds: float = 20.0
    repeats: int = 1
    carried_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class TunedSettings:
    """Settings, predicted and measured."""

    layout: ServeLayout
    predicted: ServeFigures
    measured: ServeFigures | None
    failed: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": key_of(self.layout), "predicted": self.predicted.to_json(),
            "measured": None if self.measured is None else self.measured.to_json(), "failed": self.failed,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TuneAnswer:
    """An answer."""

    points: tuple[TunedSettings, ...]
    """That were measured, the best first."""
    failed: tuple[TunedSettings, ...]
    usual: TunedSettings | None
    """As `foretell serve` starts without being told more."""
    carried: TunedSettings | None
    carried_from: str
    looked: int
    """Settings that were predicted."""
    resumed: int
    """Rows of the table that were there."""
    law: MeasuredSteps | None
    """Seconds of steps as they were measured here; None: predicted."""
    plan: Plan | None
    interrupted: bool
    notes: tuple[str, ...]

    @property
    def best(self) -> TunedSettings | None:
        return self.points[0] if self.points else None

    @property
    def keeps(self) -> bool:
        best = self.best
        return best is not None and best.measured is not None and best.measured.inside >= INSIDE

    def to_json(self) -> dict[str, Any]:
        return {
            "best": None if self.best is None else self.best.to_json(), "keeps": self.keeps,
            "points": [one.to_json() for one in self.points], "failed": [one.to_json() for one in self.failed],
            "usual": None if self.usual is None else self.usual.to_json(),
            "carried_from": self.carried_from, "carried": None if self.carried is None else self.carried.to_json(),
            "carried_loss": loss(self.best, self.carried), "looked_at": self.looked, "resumed": self.resumed,
            "law": None if self.law is None else self.law.to_json(), "interrupted": self.interrupted, "notes": list(self.notes),
        }  # fmt: skip


def loss(best: TunedSettings | None, other: TunedSettings | None) -> float | None:
    """Share of the best rate that other settings lose, as measured."""
    if best is None or other is None or best.measured is None or other.measured is None or not best.measured.good:
        return None
    return 1 - other.measured.good / best.measured.good


@dataclass(frozen=True, kw_only=True)
class TunedMachine:
    """This machine: what it is, and what prices steps on it."""

    device: str
    """As a plan names it."""
    kind: str
    question: SettingsQuestion
    law: MeasuredSteps | None
    notes: tuple[str, ...]


def tune(asked: TuneAsked, tell: Tell = lambda _: None) -> TuneAnswer:
    """Search and measure. Interrupted, it answers with what was measured; nothing measured is lost."""
    _check(asked)
    table = TuneTable(asked.table, identity(asked))
    resumed = table.resumed
    here = this_machine(asked, table, tell)
    tell("predicting settings")
    found = search(replace(here.question, seconds=_window(asked)), tell)
    if not found:
        raise UserError(f"no settings hold the longest request of {asked.load.longest:,} tokens here", "shorter requests, or --pages")
    usual = _usual(here.question)
    over, notes = carried_over(asked, here, tell)
    interrupted = False
    try:
        for layout in _to_measure(asked, here.question, found, usual, table):
            _measured(asked, layout, table, tell)
        if over is not None:
            _measured(asked, over, table, tell)
    except KeyboardInterrupt:
        if not table.rows:
            raise
        interrupted = True
    rows = [_tuned(here.question, row) for row in table.rows.values() if _as_asked(asked, row)]
    points = [point for point, _ in best_of([(one, one.measured) for one in rows if one.measured is not None])]
    busy = max((row.busy for row in table.rows.values()), default=0.0)
    cores = os.cpu_count() or 1
    notes += (f"other programs used this machine (load average {busy:.1f} on {cores} cores): --repeats 3 is surer",) if busy > cores / 2 else ()
    by_key = {str(key_of(one.layout)): one for one in rows}

    def row(layout: ServeLayout | None) -> TunedSettings | None:
        return None if layout is None else by_key.get(str(key_of(layout)))

    answer = TuneAnswer(
        points=tuple(points), failed=tuple(one for one in rows if one.measured is None), usual=row(usual), carried=row(over),
        carried_from=asked.carried_from or "", looked=len(found), resumed=resumed, law=here.law, plan=None, interrupted=interrupted,
        notes=(*here.notes, *notes),
    )  # fmt: skip
    return replace(answer, plan=_plan(asked, here, answer)) if answer.keeps else answer


def _as_asked(asked: TuneAsked, row: MeasuredSettings) -> bool:
    """Rows of a time when less was fixed do not count."""
    return all(row.settings[name] == value or (name == "tokens" and value < row.settings["running"]) for name, value in asked.fixed.items())


def _check(asked: TuneAsked) -> None:
    """What can be refused before anything is started."""
    what = asked.what
    if what.device not in ("auto", "cpu") and not what.device.startswith("cuda"):
        raise UserError(f"--device {what.device}", "auto, cpu or cuda")
    if what.dtype not in ("auto", *PRECISIONS):
        raise UserError(f"--dtype {what.dtype}", f"auto, {', '.join(PRECISIONS)}")
    if asked.carried_from is not None and parse(asked.carried_from).device.backend == "cpu":
        raise UserError(f"--carried-from {asked.carried_from}: steps on a CPU are not predicted", "a GPU, such as --carried-from H100")
    check(Source(model=what.model, overrides=dict(what.overrides)))


# ---------------------------------------------------------------------- what prices steps here


def identity(asked: TuneAsked) -> dict[str, Any]:
    """What must be the same for a row to count again."""
    import torch

    from foretell import __version__

    recorded = "" if not asked.load.recorded else hashlib.sha256(repr(asked.load.recorded).encode()).hexdigest()[:12]
    weights = asked.what.weights
    stamp = "" if weights is None or not Path(weights).exists() else str(Path(weights).stat().st_mtime_ns)
    return {
        "model": asdict(asked.what), "weights_stamp": stamp, "load": f"{asked.load}, seed={asked.load.seed}{recorded}", "slo": asked.slo,
        "seconds": asked.seconds, "repeats": asked.repeats, "torch": torch.__version__, "foretell": __version__,
        "device": parse("auto").device.name if asked.what.device != "cpu" else "cpu",
        "base": {name: getattr(asked.base, name) for name in ("tp", "pp", "compiled")},
    }  # fmt: skip


def this_machine(asked: TuneAsked, table: TuneTable, tell: Tell) -> TunedMachine:
    cluster = parse("auto")
    on_gpu = asked.what.device != "cpu" and cluster.device.backend in ("cuda", "rocm")
    if asked.what.device.startswith("cuda") and not on_gpu:
        raise UserError(f"--device {asked.what.device}, and PyTorch sees no CUDA device here", "--device cpu")
    if asked.base.devices > 1 and on_gpu and asked.base.devices > cluster.count:
        raise UserError(f"tp {asked.base.tp} and pp {asked.base.pp} on {cluster.count} GPUs", "fewer ranks, or --device cpu")
    ahead = on_gpu and asked.base.devices == 1
    question = SettingsQuestion(
        load=asked.load, limit=asked.limit, seconds=_seconds(asked), base=asked.base, price=_none, most_pages=_no_pages, fixed=asked.fixed,
        graphs=ahead, ahead=ahead,
    )  # fmt: skip
    if on_gpu:
        tell(f"tracing {asked.what.model}")
        try:
            model = served_model(_asked_of(asked, "auto"))
            return TunedMachine(device=cluster.device.name, kind="gpu", question=priced(question, model), law=None, notes=())
        except UserError as error:
            notes: tuple[str, ...] = (f"steps are not predicted here ({error.problem}): they were measured",)
    else:
        notes = ("steps on a CPU are not predicted: they were measured here, at the load's lengths",)
    law, token_bytes = _law(asked, table, question, tell)
    room = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if on_gpu:
        room = MEMORY_SHARE * cluster.device.memory_bytes
    question = replace(question, price=lambda layout: law.seconds, most_pages=lambda layout: int(room / (token_bytes * layout.page)))
    return TunedMachine(device=cluster.device.name if on_gpu else "cpu", kind="gpu" if on_gpu else "cpu", question=question, law=law, notes=notes)


def _seconds(asked: TuneAsked) -> float:
    return asked.load.seconds if asked.load.kind == "trace" else asked.seconds


def _window(asked: TuneAsked) -> float:
    """Seconds of arrivals that settings are compared by: the measured ones are predicted whole."""
    return min(_seconds(asked), WINDOW)


def _none(layout: ServeLayout) -> Callable[[StepShape], float]:
    raise NotImplementedError


def _no_pages(layout: ServeLayout) -> int:
    return MOST_CALIBRATION_PAGES


def _asked_of(asked: TuneAsked, hardware: str) -> ServingAsked:
    what = asked.what
    return ServingAsked(model=what.model, hardware=hardware, overrides=what.overrides, precision=what.dtype, load=asked.load, limit=asked.limit)


def priced(question: SettingsQuestion, model: ServedModel) -> SettingsQuestion:
    """The question with steps of a model on a device, by the path."""
    shares = LayoutShares({}, {})
    known: dict[bool, LayoutCosts] = {}
    pages: dict[tuple[Any, ...], int] = {}

    def costs(layout: ServeLayout) -> LayoutCosts:
        if layout.graphs not in known:
            known[layout.graphs] = model.costs(layout, shares)
        return known[layout.graphs].limited(layout)

    def most_pages(layout: ServeLayout) -> int:
        key = (layout.running, layout.tokens, layout.page, layout.graphs)
        if key not in pages:
            pages[key] = costs(layout).about_most_pages()
        return pages[key]

    return replace(question, price=lambda layout: costs(layout).seconds, most_pages=most_pages)


def _law(asked: TuneAsked, table: TuneTable, question: SettingsQuestion, tell: Tell) -> tuple[MeasuredSteps, int]:
    """Seconds of steps here, and bytes of a token's keys and values; of the table, if it has them."""
    if table.law is None:
        tell("measuring steps")
        load = asked.load
        most = int(load.amount) if load.kind in ("users", "all") else CALIBRATED
        running = int(asked.fixed.get("running", min(CALIBRATED, 1 << max(0, most - 1).bit_length())))
        layout = replace(asked.base, running=running, tokens=max(running, int(asked.fixed.get("tokens", 512))))
        whole = with_pages(question, layout)
        if whole is None:
            whole = replace(layout, pages=MOST_CALIBRATION_PAGES)
        shapes, took, token_bytes = calibrated(asked.what, whole, load, min(CALIBRATION_SECONDS, asked.seconds))
        table.add_law({"law": fitted(shapes, took).to_json(), "token_bytes": token_bytes})
    return MeasuredSteps.from_json(table.law["law"]), int(table.law["token_bytes"])


# ---------------------------------------------------------------------- what is measured


def _usual(question: SettingsQuestion) -> ServeLayout | None:
    """As `foretell serve` starts; its pages too, where the longest request fits into them."""
    plain = ServeLayout()
    own = {name: getattr(plain, name) for name in TUNED} | dict(question.fixed)
    layout = replace(question.base, **own)
    if not question.graphs:
        layout = replace(layout, graphs=question.base.graphs)
    layout = replace(layout, tokens=max(layout.tokens, layout.running))
    return layout if layout.pages * layout.page >= question.load.longest else with_pages(question, layout)


def carried_over(asked: TuneAsked, here: TunedMachine, tell: Tell) -> tuple[ServeLayout | None, tuple[str, ...]]:
    """What the same search finds best on another device, as far as it can be here."""
    if asked.carried_from is None:
        return None, ()
    tell(f"searching settings for {asked.carried_from}")
    model = served_model(_asked_of(asked, asked.carried_from))
    there = search(priced(replace(here.question, seconds=_window(asked), graphs=True, ahead=asked.base.devices == 1), model))
    if not there:
        return None, (f"{asked.carried_from} has no room for the load's longest request: nothing is carried over",)
    best = there[0].layout
    if not here.question.graphs:
        best = replace(best, graphs=here.question.base.graphs)
    layout = with_pages(here.question, best)
    if layout is None:
        return None, (f"settings found best on {asked.carried_from} do not fit here",)
    return layout, ()


def _to_measure(
    asked: TuneAsked, question: SettingsQuestion, found: list[SettingsPoint], usual: ServeLayout | None, table: TuneTable
) -> Iterator[ServeLayout]:
    """The usual settings, half of the others by prediction, then neighbours of the best measured in the order predicted."""
    tried: list[ServeLayout] = []

    def fresh(layout: ServeLayout) -> bool:
        return all(key_of(layout) != key_of(one) for one in tried) and len(tried) < asked.most

    if usual is not None:
        tried.append(usual)
        yield usual
    for one in different(found, max(1, asked.most // 2)):
        if fresh(one.layout):
            tried.append(one.layout)
            yield one.layout
    while len(tried) < asked.most:
        known = [(layout, row.figures) for layout in tried if (row := table.known(layout)) is not None and row.figures is not None]
        around: list[ServeLayout] = [] if not known else [one for one in neighbours(question, best_of(known)[0][0]) if fresh(one)]
        order = ranked([predicted(question, one) for one in around]) or [one for one in found if fresh(one.layout)]
        if not order:
            return
        tried.append(order[0].layout)
        yield order[0].layout


def _measured(asked: TuneAsked, layout: ServeLayout, table: TuneTable, tell: Tell) -> MeasuredSettings:
    row = table.known(layout)
    if row is None:
        tell(f"measuring {told(layout)}")
        row = measured(asked.what, layout, asked.load, asked.limit, asked.seconds, asked.repeats)
        table.add(row)
    return row


def told(layout: ServeLayout) -> str:
    """Settings in a few words."""
    more = [f"{layout.pages} pages of {layout.page}"]
    more += [] if layout.share else ["prompts not shared"]
    more += [] if layout.graphs else ["no graphs"]
    return f"{layout.running} running, {layout.tokens} tokens a step, {', '.join(more)}"


def _tuned(question: SettingsQuestion, row: MeasuredSettings) -> TunedSettings:
    layout = replace(question.base, **row.settings)
    return TunedSettings(layout=layout, predicted=predicted(question, layout).figures, measured=row.figures, failed=row.failed)


def _plan(asked: TuneAsked, here: TunedMachine, answer: TuneAnswer) -> Plan:
    best = answer.points[0]
    assert best.measured is not None
    layout = replace(best.layout, load=asked.load_text, slo=asked.slo)
    figures = {
        "inside": best.predicted.inside, "ttft_p95_seconds": best.predicted.ttft_p95, "tpot_p95_seconds": best.predicted.tpot_p95,
        "output_tokens_per_second": best.predicted.tokens_per_second, "measured": best.measured.to_json(),
    }  # fmt: skip
    if answer.law is not None:
        figures["steps"] = answer.law.to_json()
    dtype = asked.what.dtype if asked.what.dtype != "auto" else "fp32" if here.kind == "cpu" else "bf16"
    source = Source(model=asked.what.model, overrides=dict(asked.what.overrides))
    note = f"tuned on {here.device}: {len(answer.points)} settings measured with {asked.load_text}"
    return Plan(
        model=model_of(source), hardware="auto" if here.kind == "cpu" else here.device, mesh=Mesh(tp=layout.tp, pp=layout.pp),
        precision=in_plan(dtype) or "fp16-mixed", serve=layout, predicted={"serving": figures}, notes=(note,),
    )  # fmt: skip
