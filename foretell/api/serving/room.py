"""`foretell fit MODEL --serve`: does a model fit where it is to be served, for how many requests at once, and how long may one be?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from foretell.api.serving.forecast import ServedModel, ServingAsked, ServingForecast, answer, served_model
from foretell.errors import UserError
from foretell.lower.serving_formats import refusal as format_refusal
from foretell.lower.serving_ranks import blocks_of, heads
from foretell.lower.serving_ranks import refusal as heads_refusal
from foretell.plan.types import ServeLayout
from foretell.quantities import NO
from foretell.simulate.serving.layout import LayoutCosts, LayoutShares

LENGTHS = (2048, 8192, 32768, 131072)
"""Tokens of a request, of which is told how many are served at once."""


@dataclass(frozen=True, kw_only=True)
class RoomChange:
    """What would fit instead."""

    change: str
    flag: str
    """For the command line."""
    pages: int
    at_once: int
    """Requests of the load's mean length, or of 2,048 tokens."""
    runs_today: bool
    """By `foretell serve` itself."""


@dataclass(frozen=True, kw_only=True)
class ServingRoom:
    """An answer: the forecast, and what it means for requests."""

    forecast: ServingForecast
    at_once: tuple[tuple[int, int], ...]
    """Tokens of a request → how many of these the pages hold at once; no more than run at a time."""
    uses: tuple[tuple[str, int], ...]
    """What uses the memory, the largest first."""
    lacking_bytes: int
    """Of the device that lacks most; 0: it fits."""
    would_fit: tuple[RoomChange, ...]

    @property
    def fits(self) -> bool:
        return self.forecast.verdict != NO

    def to_json(self) -> dict[str, Any]:
        return {
            "forecast": self.forecast.to_json(), "fits": self.fits,
            "at_once": [{"tokens": tokens, "requests": many} for tokens, many in self.at_once],
            "uses": [{"what": what, "bytes": size} for what, size in self.uses], "lacking_bytes": self.lacking_bytes,
            "would_fit": [asdict(one) for one in self.would_fit],
        }  # fmt: skip


def room(asked: ServingAsked) -> ServingRoom:
    """The most pages that fit, if none are asked for, on as few ranks as hold the model; where nothing fits, what would."""
    model, shares = served_model(asked), LayoutShares({}, {})
    costs = _fewest(model, asked, shares)
    layout = costs.layout
    pages = asked.pages if asked.pages is not None else max(1, costs.most_pages())
    costs.layout = replace(layout, pages=pages)
    found = answer(model, costs, asked)
    mean = _mean(asked)
    lengths = sorted({mean, *LENGTHS}) if asked.load is not None else list(LENGTHS)
    most = found.longest
    at_once = tuple((tokens, _held(found, tokens)) for tokens in lengths if tokens <= most)
    uses = [("weights", found.weights_bytes), ("pages", found.pages_bytes), ("largest step", found.step_bytes), ("context", found.context_bytes)]
    fits = found.verdict != NO
    return ServingRoom(
        forecast=found, at_once=at_once, uses=tuple(sorted(uses, key=lambda one: -one[1])),
        lacking_bytes=0 if fits else max(0, found.device_bytes - found.capacity_bytes),
        would_fit=() if fits else tuple(_would(model, asked, costs.layout, shares, mean)),
    )  # fmt: skip


def _mean(asked: ServingAsked) -> int:
    return LENGTHS[0] if asked.load is None else max(1, round(sum(asked.load.mean)))


def _held(found: ServingForecast, tokens: int) -> int:
    return min(found.running, found.pages // -(-tokens // found.page_tokens))


def _fewest(model: ServedModel, asked: ServingAsked, shares: LayoutShares) -> LayoutCosts:
    """The layout as asked; of several devices as few ranks as hold the model, and replicas on the rest."""
    layout, count = asked.layout, model.cluster.count
    if count == 1 or layout.devices > 1:
        return model.costs(layout, shares)
    found = None
    for tp in _widths(model, 1 if layout.invariant else count):
        found = model.costs(replace(layout, tp=tp, replicas=count // tp), shares)
        if found.most_pages() if asked.pages is None else found.largest(asked.pages).verdict != NO:
            break
    assert found is not None
    return found


def _widths(model: ServedModel, count: int) -> list[int]:
    node = model.cluster.devices_per_domain or model.cluster.devices_per_node
    return [tp for tp in range(1, min(count, node, heads(model.trace)[0]) + 1) if tp & (tp - 1) == 0 and heads_refusal(model.trace, tp) is None]


def _would(model: ServedModel, asked: ServingAsked, layout: ServeLayout, shares: LayoutShares, mean: int) -> Iterator[RoomChange]:
    """Changes that make it fit, the smallest first: fewer pages, a smaller step, more ranks, formats of fewer bits."""
    device = model.cluster.device
    changes: list[tuple[str, str, ServeLayout]] = [("fewer pages", "--pages {pages}", layout)]
    if layout.running > 8:
        changes.append((f"a smaller step ({8} sequences, 128 tokens)", "--running 8 --step-tokens 128", replace(layout, running=8, tokens=128)))
    changes += [(f"weights in {name}", f"--weights {name}", replace(layout, weights=name)) for name in ("fp8", "int8", "int4")
                if layout.weights == "bf16" and format_refusal(device, name, layout.kv) is None]  # fmt: skip
    for tp in () if layout.invariant else (2, 4, 8):
        if tp > layout.tp and heads_refusal(model.trace, tp) is None:
            changes.append((f"{tp} devices, tp {tp}", f"--on {tp}x{device.name}", replace(layout, tp=tp, replicas=1)))
    if len(blocks_of(model.trace).each) >= 16 and not layout.invariant:
        changes.append((f"16 devices, tp 8, pp 2 on {device.name}", f"--on 2x8x{device.name}", replace(layout, tp=8, pp=2, replicas=1)))
    for change, flag, other in changes:
        try:
            costs = _on_more(model, other, shares)
        except UserError:
            continue
        pages = costs.most_pages()
        if pages * layout.page < min(mean, 2 * layout.page) or (flag.startswith("--pages") and asked.pages is None):
            continue
        many = min(other.running, pages // -(-mean // layout.page))
        yield RoomChange(change=change, flag=flag.format(pages=pages), pages=pages, at_once=many, runs_today=not other.not_run_yet)


def _on_more(model: ServedModel, layout: ServeLayout, shares: LayoutShares) -> LayoutCosts:
    """On as many such devices as that takes."""
    cluster = model.cluster
    if layout.devices > cluster.count:
        from foretell.hardware import parse

        name = f"2x8x{cluster.device.name}" if layout.devices > 8 else f"{layout.devices}x{cluster.device.name}"
        cluster = parse(name)
    return replace(model, cluster=cluster).costs(layout, shares)
