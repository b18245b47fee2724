"""Releases of torch: what each does in foretell's table is what its own code did, and one that is not in it says so.

`tests/data/releases` holds dispatch traces of the second training step of small models, by release. No GPU: the released
wheel for CUDA ran on fake CUDA tensors, with a stand-in for the CUDA runtime that names a device of compute capability 9.0
(benchmarks/releases.py). The wheel's own code chose kernels and casts. The same way gave the lists that were recorded with 2.11
on an H200. `sdpa_choices.json` has what each release chose for attention on devices of other capabilities, asked the same way.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import api
from foretell.hardware import overhead, parse
from foretell.price.bands import CATALOGUE, OWN, Evidence, factors
from foretell.quantities import FITS, NO, TIGHT
from foretell.report.terminal import screen
from foretell.simulate.memory.memory import careful_limit, predict_memory
from foretell.trace.cuda import versions
from foretell.trace.cuda.attention import choose
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.types import Trace

RELEASES = Path(__file__).parents[1] / "data" / "releases"
KNOWN = tuple(one.version for one in versions.table()[0])
FOLLOWS = {"aten.new_zeros.default": "aten.zeros.default"}
"""Ops that the installed torch writes another way: not foretell's choice."""
NO_BYTES = ("aten.detach.default", "aten.empty.memory_format")
"""Of which releases have more or fewer around recompute: the same storage, and tensors of no elements."""
NEWER, OLDER = "2.99.0", "2.4.1"

installed_is_known = pytest.mark.skipif(not versions.checked(torch.__version__), reason="ops follow the installed torch, which was not checked")


@functools.cache
def recorded(release: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((RELEASES / f"{release}.json.gz").read_bytes()))


@functools.cache
def traced(name: str, release: str) -> Counter[Any]:
    case = recorded(KNOWN[0])["cases"][name]
    source = Source(model=case["model"], **case["source"])
    trace = capture(lambda: load(source), Recipe(**case["recipe"]), release=release)
    return Counter(_ops(trace))


def _ops(trace: Trace) -> Iterator[Any]:
    names = [name for name, times in trace.schedule["steady_step"] for _ in range(times) if name != "zero_grad"]
    for op in (op for name in names for op in trace.programs[name].ops):
        if not op.name.startswith("foretell.") and op.name not in NO_BYTES:
            yield _plain(op.name, [ref.spec for ref in op.inputs], [ref.spec for ref in op.outputs])


def told(name: str, release: str) -> Counter[Any]:
    data = recorded(release)
    specs = [(tuple(shape), dtype) for shape, dtype in data["specs"]]
    rows = ((data["names"][op], [specs[i] for i in inputs], [specs[i] for i in outputs]) for op, inputs, outputs in data["cases"][name]["ops"])
    return Counter(_plain(*row) for row in rows if row[0] not in NO_BYTES)


def _plain(name: str, inputs: list[Any], outputs: list[Any]) -> Any:
    """Without the inputs of ops that releases write another way."""
    if name in FOLLOWS or name in FOLLOWS.values():
        return FOLLOWS.get(name, name), tuple(outputs)
    return name, tuple(inputs), tuple(outputs)


CASES = sorted(recorded(KNOWN[0])["cases"])


# ---------------------------------------------------------------------- the rules


def test_every_known_release_was_recorded_somewhere() -> None:
    assert tuple(sorted(KNOWN, key=versions.minor)) == KNOWN and len(CASES) >= 12
    for release in KNOWN:
        assert versions.minor(recorded(release)["torch"]) == versions.minor(release)
        assert set(recorded(release)["cases"]) == set(CASES)


AGAIN = (
    "attention-bf16-autocast", "encoder-adam-loop", "encoder-adamw-foreach", "encoder-bf16-autocast", "encoder-full", "encoder-momentum-fused",
    "losses-fp16-autocast", "norms-fp16-autocast", "encoder-adam", "attention-bf16", "attention-fp32",
    "encoder-selective", "encoder-fp16-autocast",
)  # fmt: skip
ALIKE = pytest.mark.slow(reason="the rules of releases change the same ops in others that run: another optimizer, precision or way to recompute")


@installed_is_known
@pytest.mark.parametrize("name", [pytest.param(name, marks=ALIKE if name in AGAIN else ()) for name in CASES])
def test_choices_of_each_release_are_its_own(name: str) -> None:
    """The installed torch traces with the choices of each release: the ops are those that the release itself ran."""
    for release in KNOWN:
        ours, real = traced(name, release), told(name, release)
        assert ours == real, f"{release}: only foretell {ours - real}, only torch {real - ours}"


def test_every_rule_is_seen_in_what_was_recorded() -> None:
    """At each bound of a rule some model's ops change, so that a rule with another bound fails above."""
    for rule in versions.table()[1].values():
        for _, bound in rule.bounds:
            at = [versions.minor(one) for one in KNOWN].index(bound)
            assert any(told(name, KNOWN[at - 1]) != told(name, KNOWN[at]) for name in CASES), rule.name
            assert rule.holds(KNOWN[at - 1]) != rule.holds(KNOWN[at])


def test_attention_choices_of_each_release() -> None:
    """On devices from Turing to Blackwell, as each release's own code chose."""
    grid = json.loads(gzip.decompress((RELEASES / "sdpa_choices.json.gz").read_bytes()))
    assert {one["torch"][:4] for one in grid["chosen"]} == set(KNOWN)
    rows = [row for row in itertools.product(*grid["axes"].values()) if not (row[5] and (row[3] or row[2][0] != row[2][1]))]
    wrong: Counter[Any] = Counter()
    for position, (name, head, (queries, keys), kind, dropout, causal, grad, gqa) in enumerate(rows):
        dtype = getattr(torch, name)
        query = torch.empty(2, 8, queries, head, dtype=dtype, device="meta", requires_grad=grad)
        key = torch.empty(2, 2 if gqa else 8, keys, head, dtype=dtype, device="meta", requires_grad=grad)
        shape = (1, 1, queries, keys) if kind == "bcast" else (2, 8, queries, keys)
        mask = torch.empty(shape, dtype=torch.bool if kind == "bool" else dtype, device="meta") if kind else None
        for one in grid["chosen"]:
            capability = (one["capability"][0], one["capability"][1])
            ours = choose(query, key, key, mask, dropout, causal, gqa, capability, grad, one["torch"])
            real = grid["choices"][int(one["choices"][position])]
            if ours != real:
                wrong[one["torch"], capability, ours, real, name, head] += 1
    assert not wrong


def test_versions_are_read_as_torch_writes_them() -> None:
    written = {"2.11.0+cu130": (2, 11), "2.13.0a0+git1234": (2, 13), "2.14.0.dev20261101": (2, 14), "nightly": None}
    assert {one: versions.minor(one) for one in written} == written
    some = ("2.9.1", "2.11.0", "2.12.1", "3.0.0", "nightly")
    assert [versions.holds(versions.RMS_NORM_IN_FP32, one) for one in some] == [False, False, True, True, True]
    assert [versions.holds(versions.DROPOUT_IN_CUDNN, one) for one in some] == [True, True, False, False, False]
    with pytest.raises(ValueError, match="no bounds"):
        _ = versions.ReleaseRule(name="x", versions="==2.12", changes="", source="").bounds


# ---------------------------------------------------------------------- a release that was not checked


def test_an_unknown_release_says_so() -> None:
    first, last = KNOWN[0], KNOWN[-1]
    said = f"torch {NEWER}+cu140 is newer than what foretell was checked with ({first} to {last}): bands are wider"
    assert versions.doubt(f"{NEWER}+cu140") == said
    assert "is older than" in versions.doubt(OLDER) and "is none of" in versions.doubt("nightly")
    assert all(versions.doubt(one) == "" for one in ("", *(f"{one}.7" for one in KNOWN)))
    assert "recorded on a GPU" in versions.choices_of("2.11.0") and "not on a GPU" in versions.choices_of("2.13.0")
    assert "not checked" in versions.choices_of(NEWER)


@functools.cache
def small(release: str | None = None) -> Trace:
    return capture(lambda: load(Source(model="gpt-tiny", micro_batch=4)), Recipe(), release=release)


def of_unknown(trace: Trace) -> Trace:
    return replace(trace, meta={**trace.meta, "versions": {"torch": NEWER}})


def test_an_unknown_release_widens_memory() -> None:
    cluster = parse("H100")
    extra = overhead(cluster.device, "2.11")
    known, unknown = (predict_memory(trace, cluster, extra).memory for trace in (small("2.12.0"), of_unknown(small("2.12.0"))))
    assert (known.allocated_bytes, known.reserved_bytes) == (unknown.allocated_bytes, unknown.reserved_bytes)
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes"):
        (low, high), (wide_low, wide_high) = known.bands[name], unknown.bands[name]
        assert wide_high - wide_low == pytest.approx(versions.UNCHECKED_FACTOR * (high - low), rel=1e-6, abs=4)
    assert NEWER in unknown.provenance["allocated_bytes"] and "checked with" not in known.provenance["allocated_bytes"]


def test_an_unknown_release_moves_verdicts_to_the_careful_side() -> None:
    """Whatever a device holds: never a better verdict than under a known release, and a worse one in between."""
    whole = parse("H100")
    extra = overhead(whole.device, "2.11")
    order = {FITS: 0, TIGHT: 1, NO: 2}
    need = predict_memory(small("2.12.0"), whole, extra).memory.device_bytes
    seen = set()
    for share in (0.97, 0.99, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.08, 1.1, 1.15, 1.3):
        cluster = replace(whole, device=replace(whole.device, memory_bytes=int(need * share)))
        known, unknown = (predict_memory(trace, cluster, extra).verdict for trace in (small("2.12.0"), of_unknown(small("2.12.0"))))
        assert order[unknown] >= order[known], share
        seen.add((known, unknown))
    assert any(order[unknown] > order[known] for known, unknown in seen) and (FITS, FITS) in seen and (NO, NO) in seen
    capacity, beside = 80 << 30, 1 << 30
    assert careful_limit(of_unknown(small("2.12.0")), capacity, beside) < careful_limit(small("2.12.0"), capacity, beside)


def test_an_unknown_release_widens_time() -> None:
    for device in (OWN, CATALOGUE):
        low, high = factors(Evidence(device=device))
        wide_low, wide_high = factors(Evidence(device=device, widening=versions.UNCHECKED_FACTOR))
        assert (wide_low, wide_high) == pytest.approx((low**2, high**2)) and wide_low < low < high < wide_high


@pytest.mark.slow(reason="fit from its beginning; what becomes wider and more careful is tested above")
def test_the_answer_of_an_unknown_release_is_wider_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the installed version to what is printed: the whole way of `fit`."""

    def answer() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        return api.fit(model, (torch.zeros(8, 64),), loss=lambda output, _: output.float().mean(), hardware="H200", advice_seconds=0)

    known = answer()
    monkeypatch.setattr(torch, "__version__", f"{NEWER}+cu140")
    unknown = answer()
    assert known.time is not None and unknown.time is not None
    assert unknown.memory.reserved_bytes == known.memory.reserved_bytes and unknown.time.step_seconds == known.time.step_seconds
    assert unknown.time.high_seconds > known.time.high_seconds and unknown.time.low_seconds < known.time.low_seconds
    assert "is newer than what foretell was checked with" in unknown.assumptions[0]
    assert "is newer than what foretell was checked" in " ".join(str(screen.render(unknown)).split())
    assert not any("checked with" in line for line in known.assumptions)
