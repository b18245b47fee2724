"""The figures that README and docs/accuracy.md quote, computed from the rows kept in benchmarks/."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from foretell.prove import run, seal, tell

ROOT = Path(__file__).resolve().parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
PAGE = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
RESULTS, SEALED = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "sealed"
Row = dict[str, Any]


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of benchmarks/, under a name of its own: one is called `time`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def errors(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """Of (predicted, measured), in percent."""
    return [100 * (predicted / measured - 1) for predicted, measured in pairs]


def signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f} %".replace("-", "−")


def cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)).rstrip() + " |"


def quoted(*texts: str) -> None:
    """All of these are on the page of accuracy."""
    assert [text for text in texts if text not in PAGE] == []


def in_readme(*texts: str) -> None:
    assert [text for text in texts if text not in README] == []


# ---------------------------------------------------------------------------------------------- sealed


def test_the_sealed_forecast() -> None:
    path = SEALED / "2026-11-15-h200.json"
    sealed, digest = seal.read(path)
    found = tell.judged(sealed, run.read_rows(run.rows_path(path), digest))
    total = tell.summary(sealed, found)

    def line(title: str, name: str, digits: tuple[int, int, int], more: str = "") -> str:
        one = total["quantities"][name]
        return cells(
            title, f"{one['held']} of {one['rows']}", f"{one['median_percent']:.{digits[0]}f} %",
            f"{one['p90_percent']:.{digits[1]}f} %", signed(one["worst_percent"], digits[2]) + more,
        )  # fmt: skip

    allocated, device = total["quantities"]["allocated"], total["quantities"]["device"]
    in_readme(
        cells("peak memory allocated", f"{allocated['rows']} configurations drawn at random", f"{allocated['median_percent']:.2f} %",
              f"{allocated['p90_percent']:.1f} %"),
        cells("peak memory on the device, CUDA context included", f"{device['rows']} of them", f"{device['median_percent']:.1f} %",
              f"{device['p90_percent']:.1f} %"),
    )  # fmt: skip
    plain = max((100 * one.errors["allocated"] for one in found if one.row.config.compile != "graphs"), key=abs)
    quoted(
        f"| {total['rows']} drawn at random " + line("step time", "seconds", (1, 0, 0)),
        line("allocated", "allocated", (2, 1, 0), f" (CUDA graphs; else {signed(plain, 1)})"),
        line("reserved", "reserved", (1, 1, 1)),
        line("device, context included", "device", (1, 1, 1)),
    )
    limits = total["limits"]
    words = {1: "one"}
    quoted(
        f"{limits['rows']} of the {total['rows']} were run near a memory limit: of {limits['said_to_fit']} said to fit, "
        f"{words.get(limits['wrong_fits'], limits['wrong_fits'])} ran out of memory; of {limits['refused']} refused, "
        f"{limits['refused_and_ran']} ran."
    )


@pytest.mark.parametrize(
    ("name", "title", "digits"),
    [("zoo-forecast", "78 of the zoo", 1), ("zoo-forecast-2", "the same again, laws mended between", 2)],
)
def test_sealed_forecasts_of_the_zoo(name: str, title: str, digits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo, path = script("zoo", monkeypatch), SEALED / f"{name}.jsonl"
    zoo.seal_of(path)
    said = zoo.rows_of(path)
    assert len(said) == 78
    measured = {key: row["measured"] for key, row in zoo.measured_of(path, RESULTS / "zoo.jsonl").items()}
    both = [(row["predicted"], measured[row["key"]]) for row in said if "seconds" in measured.get(row["key"], {})]
    held = sum(predicted["low"] <= found["seconds"] <= predicted["high"] for predicted, found in both)
    seconds, allocated = (errors((one[name], two[name]) for one, two in both) for name in ("seconds", "allocated"))
    quoted(
        cells(f"{title}; {len(both)} ran", "step time", f"{held} of {len(both)}",
              *spread(seconds, 1, 1), signed(max(seconds, key=abs), 0)),
        cells("allocated", "–", *spread(allocated, 2, 2), signed(max(allocated, key=abs), digits)),
    )  # fmt: skip


def spread(found: Sequence[float], middle: int, most: int) -> tuple[str, str]:
    sizes = sorted(map(abs, found))
    return f"{statistics.median(sizes):.{middle}f} %", f"{tell.ninety(sizes):.{most}f} %"


# ---------------------------------------------------------------------------------------------- published


def test_published_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    published = script("published", monkeypatch)
    kept = rows("published.jsonl")
    whole = published.overall(kept, [])
    without = published.overall(rows("published_left_out.jsonl"), [])
    mean, median = "mape_percent_mean_over_sources", "median_error_percent"
    in_readme(cells("published runs, 1 to 3,072 GPUs, each source left out", f"{without['rows']} runs", f"{without[median]} %", ""))
    quoted(
        f"{whole['rows']} scored of {whole['eligible']} that are fully specified",
        f"the mean error over their {whole['sources']} sources is {without[mean]} % and the median over rows {without[median]} % where each source",
        f"With all constants, fitted with these rows in view, they are {whole[mean]} % and {whole[median]} %",
    )


# ---------------------------------------------------------------------------------------------- shared probes


def test_the_shared_file_of_an_h200() -> None:
    page = " ".join((ROOT / "docs" / "share.md").read_text(encoding="utf-8").split())
    every = rows("share_hub.jsonl")
    assert {row["from"] for row in every} == {"sealed"} and f"| {len(every)} sealed steps |" in page
    medians = []
    for which, title in (("full", "full probe"), ("share", "shared file, correcting the full probe"), ("alone", "shared file, fitted alone")):
        found = [abs(error) for error in errors((row[which], row["measured"]) for row in every)]
        medians.append(statistics.median(found))
        p90 = statistics.quantiles(found, n=10, method="inclusive")[8]
        assert cells(title, f"{medians[-1]:.2f} %", f"{statistics.mean(found):.2f} %", f"{p90:.1f} %") in page
    assert medians[1] - medians[0] < 1 < medians[2] - medians[0], "within one point, and not where it is fitted alone"


# ---------------------------------------------------------------------------------------------- rows that were seen


def test_memory() -> None:
    every = rows("memory.jsonl")
    plain = [row for row in every if "kind" not in row]
    names = {
        "allocated": "allocated (`max_memory_allocated`)", "reserved": "reserved (`max_memory_reserved`)",
        "device": "device (context and libraries included)",
    }  # fmt: skip
    for name, title in names.items():
        found = errors((row["predicted"][name], row["measured"][name]) for row in plain)
        quoted(cells(title, spread(found, 2, 2)[0], signed(max(found, key=abs), 1)))
    before = errors((row["predicted_before_the_run"]["allocated"], row["measured"]["allocated"]) for row in plain)
    sharded = [row["predicted"]["reserved"] == row["measured"]["reserved"] for row in every if row.get("kind") == "fsdp"]
    quoted(
        f"{len(plain)} training configurations on an H200",
        f"as predicted before the run, the worst allocated error was {signed(max(before, key=abs), 1)}",
        f"equal to the byte in {sum(sharded)} of {len(sharded)} cases",
    )


def test_limits() -> None:
    def line(title: str, ran: Sequence[tuple[bool, bool]]) -> str:
        fits, refused = ([came for said, came in ran if said is wanted] for wanted in (True, False))
        return cells(title, len(ran), len(fits), fits.count(False), len(refused), refused.count(True))

    before = [
        [(row.get("verdict_before_the_run", row["verdict"]) != "no", row["ran"]) for row in rows(f"{name}.jsonl") if row.get("ran") is not None]
        for name in ("limits", "limits_families")
    ]
    again = [json.loads(one) for one in (RESULTS.parent / "data" / "memory_again.jsonl").read_text(encoding="utf-8").splitlines()]
    today = [
        (verdict != "no", limit["ran"])
        for row in again for limit, verdict in zip(row["measured"]["limits"], row["predicted"].get("verdicts", ()), strict=True)
    ]  # fmt: skip
    quoted(
        line("44 configurations of models of the zoo and of transformers", before[0]),
        line("50 models of families that nothing was fitted to", before[1]),
        line("as today's rules say, of both, without LoRA", today),
    )
    said = [ran for some in before for fits, ran in some if fits]
    fits = [ran for verdict, ran in today if verdict]
    assert all(fits), "the pages say none"
    in_readme(f"Of {len(said)} runs said to fit within ±10 % of the memory limit before they were run, {said.count(False)} ran out of memory; "
              f"by today's rules none of {len(fits)} did.")  # fmt: skip


def test_time(monkeypatch: pytest.MonkeyPatch) -> None:
    host_bound, every = script("time", monkeypatch).host_bound, rows("time.jsonl")

    def line(title: str, some: Sequence[Row], name: str, middle: int = 1, worst: bool = False) -> str:
        found = errors((row["predicted"][name], row["measured"][name]) for row in some)
        median, most = spread(found, middle, 1)
        return cells(title, len(found), median, most + (f" (worst {signed(max(found, key=abs), 1)})" if worst else ""))

    device, host = ([row for row in every if host_bound(row) is bound] for bound in (False, True))
    compiled = [row for row in every if row["config"]["mode"] == "compiled"]
    roofline = errors((row["predicted"]["roofline_seconds"], row["measured"]["seconds"]) for row in device)
    quoted(
        line("step time, device-bound", device, "seconds"),
        line("step time, waiting for the host", host, "seconds"),
        line("joules of a step", every, "joules"),
        line("torch.compile: peak allocated", compiled, "allocated", 2, worst=True),
        f"{len(every)} training configurations: {len(every) - len(compiled)} eager ones",
        f"and {len(compiled)} compiled ones",
        f"A plain roofline is off by {spread(roofline, 0, 0)[0]} on the device-bound rows.",
    )


def test_the_loop() -> None:
    small, large = rows("run.jsonl")[-2:]
    assert (small["name"], large["name"]) == ("124M", "1.3B")
    times = [row["tokens_per_second"]["foretell"] / row["tokens_per_second"]["by_hand"] for row in (small, large)]
    said, took = ([1e3 * value for value in some] for some in (
        [small["predicted_seconds"], large["predicted_seconds"]],
        [small["seconds"]["foretell"], large["seconds"]["foretell"]],
    ))  # fmt: skip
    in_readme(
        f"{times[0]:.3f} times (GPT 124M) and {times[1]:.3f} times (1.3B)",
        f"predicted {said[0]:.1f} and {said[1]:.0f} ms a step, measured {took[0]:.1f} and {took[1]:.0f} ms",
    )


def test_changes_predicted_before_they_were_run() -> None:
    sealed = {(row["question"], row["flag"]): row["speedup"] for row in map(json.loads, (SEALED / "advice-h200.jsonl").read_text().splitlines())}
    kept = rows("advice_drawn.jsonl")
    pairs = [(sealed[row["question"], row["flag"]], row["measured"]["gain"]) for row in kept]
    close = sum(abs(1 / said - 1 / gain) <= 0.10 for said, gain in pairs)  # of the step that is saved
    assert all(gain > 1 for _, gain in pairs)
    in_readme(f"Of {len(pairs)} further ones, predicted before any run, all were faster, {close} within 10 points")
