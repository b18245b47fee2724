"""`foretell run box PLAN`: one rank of a plan on this device, the others replaced by stand-ins; predicted beside measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.hardware.types import Cluster
    from foretell.plan.types import Plan
    from foretell.report.terminal.box import Boxed
    from foretell.runtime.box.run import BoxRequest, Rehearsal
    from foretell.search.boxed import Expected

STEPS = 10
NEITHER = ("resume", "out", "save_every", "mtbf", "keep", "eval_every", "eval_batches", "init_from", "init_missing", "log")
"""Options of a run that say nothing to a box, which keeps nothing and learns nothing."""


def box(
    plan: Path = typer.Argument(..., metavar="PLAN", show_default=False, help="A plan file, or a run folder."),
    rank: int = typer.Option(0, "--rank", metavar="N", help="Which rank of the plan runs here."),
    steps: int = typer.Option(STEPS, "--steps", min=1, max=10_000, metavar="N",
        help="Measured steps: so many as planned, so many whose communication takes no time."),
    device: str = typer.Option("auto", metavar="auto|cpu|cuda", help="Where to run; auto: what the plan is for."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Run one rank of PLAN on this device, the other ranks replaced by stand-ins that take the modelled time.

    Prints predicted beside measured: step time, exposed communication, memory. Needs one device, however many the plan has. Nothing
    is saved, and the loss means nothing. Exit 0 within the predicted range, 1 outside or does not fit.
    """
    from foretell.plan import file

    wanted = file.read_training(plan / "plan.json" if plan.is_dir() else plan)
    return rehearsed(wanted, {"rank": rank, "steps": steps}, device, json=json)


def of_run(plan: Plan, asked: dict[str, Any], device: str, *, json: bool, given: dict[str, Any]) -> int:
    """`foretell run PLAN --box`: the first rank, with the data and the seed of a run."""
    useless = [f"--{name.replace('_', '-')}" for name in NEITHER if given.get(name)]
    if useless:
        raise UserError(f"--box keeps nothing and trains nothing, and {useless[0]} was given", f"leave out {' and '.join(useless)}, or --box")
    if asked.get("steps", STEPS) < 1:
        raise UserError(f"--steps {asked['steps']} was asked for, and a box measures at least one", "--steps 10")
    how: dict[str, Any] = {name: asked[name] for name in ("steps", "data", "seed", "scratch") if name in asked}
    return rehearsed(plan, {"steps": STEPS, **how}, device, json=json)


def rehearsed(plan: Plan, how: dict[str, Any], device: str, *, json: bool) -> int:
    from foretell.runtime.process.signals import EARLY, Signals, Stopped, exit_status

    where, cluster = _place(plan, how.get("rank", 0), device)
    doing = common.Doing(f"rank {how.get('rank', 0)} of {plan.mesh.world} in a box")
    with Signals(phase=EARLY):
        try:
            found = common.call(lambda: _boxed(plan, cluster, how, where, doing), doing)
        except Stopped as left:
            return _tell_stopped(left.signal, exit_status(left.signal), json=json)
    return _tell(found, json=json)


# --- before ----------------------------------------------------------------------------------------------------------


def _place(plan: Plan, rank: int, device: str) -> tuple[str, Cluster]:
    """The kind of device to run on; whatever can be refused without building anything is refused here."""
    from foretell.hardware import parse
    from foretell.plan import legal
    from foretell.plan.facts import facts_of
    from foretell.plan.mesh import check_rank
    from foretell.runtime.process import launch

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device} is not known", "auto, cpu or cuda")
    check_rank(plan, rank)
    if launch.is_rank():
        raise UserError("a box is one process, and this one was started as a rank of several", "start it without torchrun")
    cluster = common.call(lambda: parse(plan.hardware), f"looking at {plan.hardware}")
    legal.check(plan, facts_of(plan, cluster))
    wanted = cluster.device
    if device == "auto" and wanted.backend in ("mps", "xpu", "rocm"):
        problem = f"the plan is for {wanted.name} ({wanted.backend}), and a box runs on NVIDIA GPUs and on CPUs"
        raise UserError(problem, "--device cpu, which runs the same program and compares nothing")
    if device != "auto":
        return device, cluster
    if wanted.backend == "cpu":
        return "cpu", cluster
    if not launch.gpus() and not common.call(_cuda, "looking for a GPU"):
        raise UserError(
            f"the plan is for {plan.hardware} and this machine has no GPU",
            "a machine with one such GPU, or --device cpu, which runs the same program and compares nothing",
        )
    return "cuda", cluster


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


# --- the work --------------------------------------------------------------------------------------------------------


def _boxed(plan: Plan, cluster: Cluster, how: dict[str, Any], device: str, doing: common.Doing) -> Boxed:
    """Predict, check that it fits, run."""
    from foretell.runtime.box.run import BoxRequest, rehearse
    from foretell.runtime.parallel.ranks import device_of
    from foretell.search.boxed import expect, scripts

    device_of(device)
    asked = BoxRequest(device=device, **{**how, "scratch": Path(how["scratch"]) if how.get("scratch") else None})
    doing.tell("predicting")
    expected = expect(plan, asked.rank, cluster=cluster)
    _refuse_too_large(expected, asked)
    found = rehearse(plan, *scripts(plan, asked.rank, expected, cluster), asked, say=doing.tell)
    return _compared(plan, cluster, expected, found, device)


def _refuse_too_large(expected: Expected, asked: BoxRequest) -> None:
    """Against all of this device: on a CPU one rank has what the plan's ranks would share."""
    import torch

    from foretell.hardware.this_machine import usable_ram
    from foretell.report.terminal.box import too_large

    there = torch.cuda.get_device_properties(0).total_memory if asked.device == "cuda" else usable_ram() or expected.capacity_bytes
    why = too_large(asked.rank, expected.told(), expected.uses, there)
    if why:
        failed = UserError(why, "recompute blocks, a smaller micro-batch, or let `foretell plan` find one that fits")
        failed.exit_code = common.NO_OR_FAILED
        raise failed


def _compared(plan: Plan, cluster: Cluster, expected: Expected, found: Rehearsal, kind: str) -> Boxed:
    from foretell.report.terminal import box as page
    from foretell.search.solve.choose import told

    why, seconds, memory = page.unlike(cluster, found.device, kind, plan.mesh.world)
    notes = [page.STAND_INS if plan.mesh.world > 1 else page.ALONE, *([why] if why else [])]
    if expected.step_seconds is None:
        notes.append(f"nothing is known of the speed of {cluster.device.name}: messages take their time, steps have no prediction")
    if kind == "cpu":
        notes.append("a CPU has no allocator to ask: memory is predicted and not measured")
    if not found.finite:
        notes.append("some loss or gradient was not finite: those steps skip the update and are quicker")
    return page.Boxed(
        model=str(plan.model.get("model", "")), plan=told(plan), hardware=plan.hardware, predicted=expected.told(),
        measured=found.to_json(), notes=tuple(notes),
        lines=page.lines_of(expected.told(), expected.bands, found.to_json(), seconds=seconds, memory=memory),
    )  # fmt: skip


# --- telling ---------------------------------------------------------------------------------------------------------


def _tell(found: Boxed, *, json: bool) -> int:
    from foretell.report.terminal import box as page

    if json:
        common.emit_json({"box": {"status": "done", **found.to_json()}})
    else:
        common.emit(page.render(found, common.width(), ascii_only=common.ascii_only(sys.stdout)))
    return common.NO_OR_FAILED if found.ok is False else common.YES


def _tell_stopped(signal: str, status: int, *, json: bool) -> int:
    if json:
        common.emit_json({"box": {"status": "stopped", "signal": signal}})
    else:
        common.emit(f"stopped ({signal}); nothing was measured, and a box saves nothing", sys.stderr)
    return status
