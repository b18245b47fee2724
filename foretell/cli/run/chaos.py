"""`foretell run chaos PLAN`: faults on purpose; does the run survive them, and does it compute what it would have?"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common
from foretell.errors import UserError

if TYPE_CHECKING:
    from foretell.plan.types import Plan
    from foretell.runtime.chaos.campaign import ChaosTrial
    from foretell.runtime.chaos.trial import ChaosRequest

STEPS, LIMIT_SECONDS = 60, 300.0
NAMES = "kill, kill-cold, kill-saving, kill-twice, kill-all, standby, hang, damaged, supervisor, sigterm, notice, full-disk, loader, clock"
MOST_TRIALS, MOST_STEPS = 1000, 1_000_000


def chaos(
    plan: Path = typer.Argument(..., metavar="PLAN", show_default=False, help="A plan file, or a run folder."),
    faults: str | None = typer.Option(None, "--faults", metavar="NAMES", show_default=False,
        help=f"With commas; default: all of {NAMES}."),
    trials: int = typer.Option(1, "--trials", metavar="N", help="Of each fault, at other moments."),
    seed: int = typer.Option(0, "--seed", metavar="N", help="Seed for moments, ranks and what is damaged."),
    steps: int = typer.Option(STEPS, "--steps", metavar="N", help="Steps of each run."),
    save_every: int | None = typer.Option(None, "--save-every", metavar="N", show_default=False,
        help="Steps between checkpoints; default: a twelfth of the steps."),
    data: str | None = typer.Option(None, "--data", metavar="FOLDER|FILE.PY", show_default=False, help="As of `foretell run`."),
    device: str = typer.Option("auto", "--device", metavar="auto|cpu|cuda", help="Where to run."),
    out: Path | None = typer.Option(None, "--out", metavar="FOLDER", show_default=False,
        help="Trials and what went wrong; default runs/chaos-PLAN. One that is there goes on where it was stopped."),
    limit: float = typer.Option(LIMIT_SECONDS, "--limit", metavar="SECONDS", help="Longest time for a run to start, to train again or to end."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Try faults on PLAN: run it supervised with and without each, and compare losses and checkpoints:

    foretell chaos plan.json --faults kill,hang,damaged --trials 3

    kill -9, hangs, damaged checkpoints, a full disk, notices, ... at random moments of short runs on this machine. Prints fault →
    survived, seconds to the next step, samples lost and repeated. Exit 0 if every fault was survived, 1 if anything was lost.
    """
    from foretell.plan import file
    from foretell.runtime.chaos.faults import FAULTS

    names = _names(faults, list(FAULTS))
    asked = _checked(trials, seed, steps, save_every, device, limit)
    path = plan / "plan.json" if plan.is_dir() else plan
    wanted = file.read(path)
    if wanted.sync is not None and wanted.sync.quorum:
        raise UserError("a lost replica of this plan (sync.quorum) changes what is trained, and no twin says what it should be",
                        "try it on the plan without sync.quorum; benchmarks/diloco_churn.py does it for replicas")  # fmt: skip
    request = _request(wanted, path, out or Path("runs") / f"chaos-{_stem(path)}", asked, data)
    doing = common.Doing("faults on purpose")
    with contextlib.ExitStack() as stack:
        stack.callback(_end_line)
        found = common.call(lambda: _campaign(wanted, request, names, trials, seed, doing), doing)
    return _tell(found, request, json=json)


def _names(typed: str | None, known: list[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in typed.split(",") if name.strip())) if typed is not None else known
    if not names:
        raise UserError("--faults names no fault", f"with commas: {','.join(known)}")
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"{wrong[0]!r} is no fault", ", ".join(known))
    return names


def _checked(trials: int, seed: int, steps: int, save_every: int | None, device: str, limit: float) -> dict[str, Any]:
    if sys.platform != "linux":
        raise UserError("faults are done to processes by what Linux says of them, and this is another system", "run it on Linux")
    if not 1 <= trials <= MOST_TRIALS:
        raise UserError(f"--trials {trials} is no number of trials", f"ask for 1 to {MOST_TRIALS:,}")
    if seed < 0:
        raise UserError(f"--seed must not be negative, got {seed}", "give --seed 0 or more")
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device} is not known", "auto, cpu or cuda")
    if not 0 < limit < float("inf"):
        raise UserError(f"--limit must be a number of seconds, got {limit}", f"give such as --limit {LIMIT_SECONDS:.0f}")
    if not 0 < steps <= MOST_STEPS:
        raise UserError(f"--steps {steps} is no number of steps", f"give such as --steps {STEPS}")
    return {"steps": steps, "save_every": max(1, steps // 12) if save_every is None else save_every, "device": device, "limit_s": limit}


def _request(plan: Plan, path: Path, work: Path, asked: dict[str, Any], data: str | None) -> ChaosRequest:
    """Whatever can be refused without a run is refused here."""
    from foretell.plan.legal import check
    from foretell.runtime.chaos.trial import ChaosRequest
    from foretell.runtime.process import launch

    check(plan)
    if launch.is_rank():
        raise UserError("this starts ranks itself, and was started as a rank of several", "start it without torchrun")
    device = asked.pop("device")
    launch.check_room(plan, device)
    if work.exists() and not work.is_dir():
        raise UserError(f"--out {work} is a file", "give a folder, or one that is not there yet")
    words = ("--device", device, *(("--data", data) if data is not None else ()))
    request = ChaosRequest(plan=path, world=plan.mesh.world, work=work, words=words, **asked)
    if problem := request.check():
        raise UserError(problem, f"--steps {STEPS}")
    return request


def _stem(path: Path) -> str:
    name = path.parent.name if path.name == "plan.json" and path.parent.name else path.stem
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.") or "plan"


def _campaign(plan: Plan, request: ChaosRequest, names: list[str], trials: int, seed: int, doing: common.Doing) -> list[ChaosTrial]:
    from foretell.plan import file
    from foretell.runtime.chaos.campaign import campaign

    identity = {
        "plan": hashlib.sha256(file.text_of(plan).encode()).hexdigest(), "model_file": _code(plan), "steps": request.steps,
        "save_every": request.save_every, "words": list(request.words),
    }  # fmt: skip
    return campaign(request, names, trials, seed, identity=identity, per_step=plan.global_batch, say=doing.tell, tell=_note)


def _code(plan: Plan) -> str:
    """What the model's file says, where it is one: another text is another run."""
    path = Path(str(plan.model.get("model", "")).rpartition(".py")[0] + ".py")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.name != ".py" and path.is_file() else ""


# --- telling ---------------------------------------------------------------------------------------------------------


def _note(one: ChaosTrial) -> None:
    """A line for each trial, as it is known."""
    from foretell.runtime.chaos.table import why

    how = "not tried" if one.not_tried else "survived" if one.good else f"LOST: {why(one)}"
    seconds = f", {one.seconds:.1f} s to the next step" if one.good and one.seconds is not None else ""
    _end_line()
    common.emit(f"{one.fault} after step {one.step}: {how}{seconds}", sys.stderr)


def _end_line() -> None:
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            sys.stderr.write("\r\x1b[K")


def _tell(found: list[ChaosTrial], request: ChaosRequest, *, json: bool) -> int:
    from foretell.runtime.chaos.campaign import TRIALS
    from foretell.runtime.chaos.table import render, rows_by_fault

    lost = [one for one in found if not one.good and not one.not_tried]
    tried = [one for one in found if not one.not_tried]
    if json:
        status = "lost" if lost else "survived" if tried else "not tried"
        content = {"status": status, "ranks": request.world, "steps": request.steps, "save_every": request.save_every,
                   "trials": str(request.work / TRIALS), "faults": rows_by_fault(found)}  # fmt: skip
        common.emit_json({"chaos": content})
    else:
        common.emit(render(found))
        common.emit(f"\n{len(tried)} trials on {request.world} rank{'s' if request.world > 1 else ''}, {request.steps} steps each, "
                    f"a checkpoint every {request.save_every}: " + (f"{len(lost)} LOST something; what they left is in {request.work}" if lost else
                    "nothing was lost" if tried else "none could be tried"))  # fmt: skip
    return common.YES if tried and not lost else common.NO_OR_FAILED
