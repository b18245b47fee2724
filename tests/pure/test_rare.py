"""Ops whose seconds neither FLOPs nor bytes tell: which they are, their laws against measured rows, and who waits for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import UserError
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.hardware.probe import alone as measured_alone
from foretell.hardware.probe import journal as journals
from foretell.hardware.probe.cases import irregular as probed
from foretell.hardware.probe.cases.families import Draw
from foretell.hardware.probe.harvest import specs
from foretell.hardware.profile import OpRow, journal_path, save
from foretell.price import machine as machines
from foretell.price.host import COUNTS, START, HostModel, call_seconds, matrix_seconds, waiting
from foretell.price.kernels.features import Shape, describe
from foretell.price.kernels.irregular import ASKED, FAMILY, GUESS, KINDS, unmeasured
from foretell.price.kernels.laws import by_laws, laws_of
from foretell.price.kernels.memory_bound import mover
from foretell.price.kernels.ops import OpModel
from foretell.price.kernels.shapes import short
from foretell.price.speeds import alone
from foretell.price.time import Machine, synchronises, unmeasured_ops
from foretell.quantities import ASSUMED, MEASURED
from foretell.simulate.time.step import plan_time
from foretell.trace.record.attributes import attributes
from foretell.trace.types import Op, Program, Ref, TensorSpec, Trace

H200 = parse("H200")
PROFILES = Path(probed.__file__).parents[2] / "profiles"


class Seen(TorchDispatchMode):
    """Every op that really runs, as a trace would describe it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Shape] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.found.append(Shape(str(func), specs((args, kwargs or {})), specs(output), attributes(func, args)))
        return output


def run(call: Any) -> list[Shape]:
    seen = Seen()
    with seen:
        call()
    return seen.found


X, V = torch.randn(7, 5, 5), torch.randn(50)
DEFINITE = X @ X.mT + 5 * torch.eye(5)
REAL = {
    "factor": (
        lambda: torch.linalg.svd(X), lambda: torch.linalg.eigh(DEFINITE), lambda: torch.linalg.qr(X), lambda: torch.linalg.cholesky(DEFINITE),
        lambda: torch.linalg.inv(DEFINITE), lambda: torch.linalg.solve(DEFINITE, X), lambda: torch.linalg.det(X), lambda: torch.linalg.eig(X),
        lambda: torch.linalg.solve_triangular(DEFINITE, X, upper=True), lambda: torch.linalg.lu_factor(DEFINITE),
    ),
    "sample": (
        lambda: F.grid_sample(torch.randn(2, 3, 8, 8), torch.rand(2, 4, 4, 2), align_corners=False),
        lambda: F.grid_sample(torch.randn(2, 3, 8, 8, 8), torch.rand(2, 4, 4, 4, 3), align_corners=False),
        lambda: F.grid_sample(torch.randn(2, 3, 8, 8, requires_grad=True), torch.rand(2, 4, 4, 2), align_corners=False).sum().backward(),
    ),
    "search": (lambda: torch.searchsorted(V.sort().values, V), lambda: torch.bucketize(V, V.sort().values)),
    "count": (
        lambda: torch.unique(V), lambda: torch.unique_consecutive(V), lambda: torch.unique(X[0], dim=0), lambda: torch.histc(V),
        lambda: torch.bincount(torch.arange(9)), lambda: torch.nonzero(V), lambda: torch.masked_select(V, V > 0), lambda: V[V > 0],
        lambda: torch.repeat_interleave(torch.arange(4)), lambda: V.clone().__setitem__(V > 0, 0.0),
    ),
    "distance": (lambda: torch.cdist(X, X), lambda: torch.cdist(X.clone().requires_grad_(), X, p=1.0).sum().backward()),
    "draw": (lambda: torch.multinomial(V.abs(), 3), lambda: torch.randperm(9)),
    "scalar": (lambda: V.sum().item(), lambda: torch.linalg.inv(DEFINITE)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_really_runs_has_its_kind(kind: str) -> None:
    from foretell.price.kernels.irregular import kind_of

    for call in REAL[kind]:
        found = [shape for shape in run(call) if kind_of(short(shape.name), shape) == kind]
        assert found, f"nothing of {kind} among {[shape.name for shape in run(call)]}"
        for shape in found:
            described = describe(shape, H200.device)
            assert described is not None and described.family == FAMILY and described.base > 0
            assert all(value >= 0 and np.isfinite(value) for value in (*described.terms.values(), *described.values.values()))
            assert {term.partition(":")[2] for term in described.terms} & set(GUESS[kind]), "a guess counts some of its terms"


def test_numbers_pick_and_masks_make_the_host_wait() -> None:
    by_number = run(lambda: V[torch.arange(4)])[-1]
    by_mask = run(lambda: V[V > 0])[-1]
    assert describe(by_number, H200.device).family == "stream"  # type: ignore[union-attr]
    assert describe(by_mask, H200.device).family == FAMILY  # type: ignore[union-attr]


def test_a_repeat_by_a_plain_number_is_no_rare_op() -> None:
    from foretell.price.kernels.irregular import kind_of

    assert not any(kind_of(short(shape.name), shape) for shape in run(lambda: V.repeat_interleave(2)))


def test_terms_grow_as_the_work_does() -> None:
    def terms(shape: tuple[int, ...]) -> dict[str, float]:
        x = TensorSpec(shape, "float32")
        return describe(Shape("aten._linalg_svd.default", (x,), (x,), ()), H200.device).terms  # type: ignore[union-attr]

    one, many = terms((1, 100, 100)), terms((8, 100, 100))
    assert many["svd:each"] == 8 * one["svd:each"] and many["svd:each_column"] == 8 * one["svd:each_column"]
    assert terms((8, 200, 200))["svd:each_square"] == pytest.approx(4 * many["svd:each_square"])
    assert "svd:each" not in terms((8, 16, 16)), "small ones are taken apart side by side"
    assert terms((132, 16, 16))["svd:side_by_side"] == terms((2, 16, 16))["svd:side_by_side"] == terms((133, 16, 16))["svd:side_by_side"] / 2


def test_a_sum_along_other_dimensions_goes_step_by_step() -> None:
    across, down = (run(functools.partial(torch.cumsum, torch.randn(300, 4), dim))[-1] for dim in (1, 0))
    across_said, down_said = (mover("cumsum", shape, H200.device) for shape in (across, down))
    assert down_said.terms["down"] == pytest.approx(300e-7) and "down" not in across_said.terms
    assert (across_said.key, down_said.key) == ("cumsum:last", "cumsum:other")


# ---------------------------------------------------------------- against measured rows


@functools.cache
def measured() -> journals.Measured:
    """Rows of names that may be rare; there are a hundred times as many others."""
    about, entries = journals.read(PROFILES / "H200-SXM-141GB.rows.jsonl.gz")
    kept = []
    for entry in entries:
        rows = [row for row in entry.content["rows"] if short(row[0]) in ASKED] if entry.stage == "ops" else []
        kept += [journals.JournalEntry(entry.stage, entry.spent, {**entry.content, "rows": rows})] if rows else []
    return journals.measured(about, kept, "quick")


@functools.cache
def described() -> list[tuple[Any, Any, tuple[str, int]]]:
    """Every such row that launches something, what it is in numbers, and its case."""
    shapes = [Shape(row.name, row.inputs, row.outputs, row.attrs) for row in measured().rows]
    found = zip(measured().rows, (describe(shape, H200.device) for shape in shapes), measured().groups, strict=True)
    return [one for one in found if one[1] is not None]


def held_out(family: str, names: tuple[str, ...] = ()) -> tuple[list[Any], np.ndarray, np.ndarray, np.ndarray]:
    """Rows of every fifth case, their measured seconds, and what laws of the other cases say."""
    kept = [one for one in described() if one[1].family == family and (not names or short(one[0].name) in names)]
    out = np.array([hash_of(group) % 5 == 0 for _, _, group in kept])
    seconds = np.array([row.seconds for row, _, _ in kept])
    said = [told for _, told, _ in kept]
    laws = laws_of([d for d, o in zip(said, out, strict=True) if not o], seconds[~out])
    tested = [(row, d) for (row, d, _), o in zip(kept, out, strict=True) if o]
    return [row for row, _ in tested], seconds[out], by_laws([d for _, d in tested], laws), np.array([d.base for _, d in tested])


def hash_of(group: tuple[str, int]) -> int:
    return sum(map(ord, group[0])) + group[1]


def error(said: np.ndarray, seconds: np.ndarray) -> float:
    return float(np.median(np.abs(said / seconds - 1)))


@pytest.mark.slow(reason="all laws fitted anew; single laws are held below")
def test_laws_say_what_held_out_rows_took() -> None:
    rows, seconds, said, guess = held_out(FAMILY)
    assert len(rows) > 60
    assert error(said, seconds) < 0.25 < error(guess, seconds) < 1.0
    assert float(np.mean(np.abs(np.log(said / seconds)) < np.log(2))) > 0.8, "four of five within a factor of two"


@pytest.mark.parametrize(("names", "most"), [(("_linalg_svd",), 0.4), (("_linalg_eigh",), 0.4), (("_cdist_forward",), 0.15)])
def test_laws_of_one_op(names: tuple[str, ...], most: float) -> None:
    _, seconds, said, _ = held_out(FAMILY, names)
    assert len(seconds) >= 3 and error(said, seconds) < most


def test_bytes_alone_say_nothing_of_a_decomposition() -> None:
    """What was said before there were laws: as many bytes as it reads and writes."""
    rows, seconds, said, _ = held_out(FAMILY, ("_linalg_svd", "_linalg_eigh", "linalg_qr"))
    moved = np.array([2e-6 + sum(s.nbytes for s in (*row.inputs, *row.outputs)) / H200.device.memory_bandwidth_bytes_per_second for row in rows])
    assert error(moved, seconds) > 0.9 and error(said, seconds) < 0.5


# ---------------------------------------------------------------- the step


def svd_trace(count: int = 1) -> Trace:
    x = TensorSpec((64, 64, 64), "float32")
    ops = tuple(Op("aten._linalg_svd.default", (Ref(0, x),), (Ref(1, x),), "", "forward", 1) for _ in range(count))
    return Trace({"p": Program("p", ops)}, {"steady_step": (("p", 1),)}, {}, ())


def test_an_old_profile_still_answers_and_says_what_it_assumes() -> None:
    profile = find_profile(H200.device.name)
    assert profile is not None and FAMILY in profile.ops
    old = replace(
        profile, ops={name: family for name, family in profile.ops.items() if name != FAMILY}, date="2020-01-01T00:00:00+00:00",
        host={name: value for name, value in profile.host.items() if name != "waits"},
    )  # fmt: skip
    new_machine, old_machine = machines.machine(H200.device, profile), machines.machine(H200.device, old)
    assert new_machine is not None and old_machine is not None
    assert unmeasured_ops(svd_trace(), old_machine) == ("_linalg_svd",) and unmeasured_ops(svd_trace(), new_machine) == ()
    before, after = (plan_time(svd_trace(), alone(known))[0] for known in (old_machine, new_machine))
    assert before.provenance == ASSUMED and after.provenance == MEASURED
    assert after.step_seconds == pytest.approx(68.9e-3, rel=0.4), "64 matrices of 64 × 64, as measured"
    assert 1 / 5 < before.step_seconds / after.step_seconds < 5, "a guess, and no wild one"


def test_ops_that_are_measured_are_not_said_to_be_assumed() -> None:
    mm = Shape("aten.mm.default", (TensorSpec((8, 8), "float32"),) * 2, (TensorSpec((8, 8), "float32"),), ())
    assert unmeasured([mm], {}) == ()


def plain_machine(waits: dict[str, bool]) -> Machine:
    weights = {name: 20e-6 if name == "forward" else 0.0 for name in COUNTS}
    return Machine(ops=OpModel(H200.device, {}), host=HostModel(weights, {"": 0.0}, waits=waits))


def test_the_host_waits_for_what_it_must_know() -> None:
    """Work for the device, then a count, then many small ops: with the wait, the host asks for those only afterwards."""
    big, small, mask = TensorSpec((8192, 8192), "bfloat16"), TensorSpec((8, 8), "bfloat16"), TensorSpec((64,), "bool")
    work = [Op("aten.mm.default", (Ref(0, big),) * 2, (Ref(1, big),), "", "forward", 1) for _ in range(10)]
    count = Op("aten.nonzero.default", (Ref(2, mask),), (Ref(3, TensorSpec((64, 1), "int64")),), "", "forward", 0)
    rest = [Op("aten.mm.default", (Ref(4, small),) * 2, (Ref(4, small),), "", "forward", 1) for _ in range(400)]
    trace = Trace({"p": Program("p", (*work, count, *rest))}, {"steady_step": (("p", 1),)}, {}, ())
    waiting_one, going_on = plain_machine({}), plain_machine({"nonzero": False})
    assert synchronises(count, waiting_one) and not synchronises(count, going_on)
    long, short_ = (plan_time(trace, alone(known))[0] for known in (waiting_one, going_on))
    device = sum(seconds for _, seconds in ((op, waiting_one.ops.seconds([_shape(op)])[_shape(op)]) for op in work))
    assert long.step_seconds == pytest.approx(device + 400 * 20e-6, rel=0.05)
    assert short_.step_seconds < 0.8 * long.step_seconds


def _shape(op: Op) -> Shape:
    return Shape(op.name, tuple(ref.spec for ref in op.inputs), tuple(ref.spec for ref in op.outputs), op.attrs)


def row(name: str, shape: tuple[int, ...], host: float) -> OpRow:
    x = TensorSpec(shape, "float32")
    return OpRow(f"aten.{name}.default", (x,), (x,), (), 1e-3, 0.0, host)


def test_rows_say_who_waits_and_what_each_matrix_costs_the_host() -> None:
    rows = [row("_linalg_svd", (b, 8, 8), 0.0) for b in (1, 2, 3)] + [row("linalg_qr", (b, 8, 8), 100e-6 + (b - 1) * 50e-6) for b in (1, 1, 5, 9)]
    rows += [row("linalg_cholesky_ex", (b, 8, 8), 40e-6) for b in (1, 100, 200)]
    calls = call_seconds((one.name, one.host_seconds) for one in rows)
    assert "_linalg_svd" not in calls, "a wait is no call"
    assert waiting(rows) == {"_linalg_svd": True, "linalg_cholesky_ex": False, "linalg_qr": False}
    assert matrix_seconds(rows, calls) == {"linalg_qr": pytest.approx(50e-6)}
    x = TensorSpec((11, 8, 8), "float32")
    op = Op("aten.linalg_qr.default", (Ref(0, x),), (Ref(1, x),), "", "forward", 1)
    model = HostModel({**START, "call": 1.0}, calls, turns=matrix_seconds(rows, calls), waits=waiting(rows))
    assert model.issue(op) == pytest.approx(START["forward"] + 100e-6 + 10 * 50e-6)
    assert model.call("_linalg_svd") == 0.0
    assert HostModel.from_dict(model.to_dict()).waits == model.waits
    assert HostModel.from_dict({name: value for name, value in model.to_dict().items() if name != "waits"}).waits == {}


# ---------------------------------------------------------------- the probe


@pytest.mark.parametrize("family", sorted(probed.RARE))
def test_every_case_really_runs_and_has_something_to_time(family: str) -> None:
    for index in range(4):
        torch.manual_seed(index)
        shapes = run(probed.RARE[family][0](Draw(1000 + index, "cpu", 0.001)))
        assert any(probed.worth(shape.name, family) for shape in shapes)


def test_rows_go_into_the_journal_in_the_place_of_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foretell.hardware.probe.machine import about

    here = about("cpu")
    path = tmp_path / "CPU.json"
    profile = find_profile("CPU")
    assert profile is not None
    save(profile, path)
    kept = journals.JournalEntry("ops", 0.1, {"case": ["linear", 0], "rows": []})
    old = journals.JournalEntry("ops", 0.1, {"case": ["singular", 0], "rows": [row("_linalg_svd", (1, 2, 2), 0.0).to_list()]})
    journals.write(journals.packed_path(journal_path(path)), here, [kept, old])
    monkeypatch.setattr(measured_alone, "SECONDS", 0.7)
    assert measured_alone.main([str(path), "--only", "singular"]) == 0
    _, entries = journals.read(journals.packed_path(journal_path(path)))
    assert entries[0] == kept and old not in entries and len(entries) > 1
    assert all(entry.content["case"][0] == "singular" for entry in entries[1:])


def journal_beside(path: Path, families: Sequence[str]) -> Path:
    """A profile of this machine's CPU and a journal with an empty case of each family."""
    from foretell.hardware.probe.machine import about

    profile = find_profile("CPU")
    assert profile is not None
    save(profile, path)
    journal = journals.packed_path(journal_path(path))
    journals.write(journal, about("cpu"), [journals.JournalEntry("ops", 0.1, {"case": [family, 0], "rows": []}) for family in families])
    return journal


def test_only_what_the_journal_lacks_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = ("searching", "choosing")
    journal = journal_beside(tmp_path / "CPU.json", ["linear", *(family for family in probed.RARE if family not in lacking)])
    _, before = journals.read(journal)
    assert measured_alone.main([str(tmp_path / "CPU.json"), "--missing", "--seconds", "0.7"]) == 0
    assert "measuring searching, choosing\n" in capsys.readouterr().out
    _, after = journals.read(journal)
    measured = [entry for entry in after if entry.content["case"][0] in lacking]
    assert measured and sorted((entry for entry in after if entry not in measured), key=str) == sorted(before, key=str)


def test_a_journal_that_has_all_is_left_as_it_is(tmp_path: Path) -> None:
    journal = journal_beside(tmp_path / "CPU.json", [*probed.RARE])
    before = journal.read_bytes()
    assert measured_alone.main([str(tmp_path / "CPU.json"), "--missing"]) == 0
    assert journal.read_bytes() == before


def test_families_can_be_named() -> None:
    with pytest.raises(UserError, match="no family 'nosuch'"):
        measured_alone.main(["--only", "nosuch"])
    with pytest.raises(UserError, match="--missing needs a profile"):
        measured_alone.main(["--missing"])


@pytest.mark.slow(reason="all masks are drawn; that cases of every family run is tested above")
def test_masks_are_measured_at_no_length_that_is_known_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 queries or keys to a tile, none leaves 64 over."""
    seen: list[int] = []

    def look(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.extend((q.shape[2], k.shape[2]))
        assert more["attn_mask"].shape[2:] == (q.shape[2], k.shape[2])
        return q * 1.0  # what it is does not matter here

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    for index in range(60):
        run(probed.RARE["masked"][0](Draw(index, "cpu", 0.003)))
    assert len(seen) == 120 and all(length % 128 != 64 for length in seen)
