"""`foretell run PLAN`: train as the plan says; alone, under torchrun, or as as many processes as the plan wants."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foretell.cli import common, compare
from foretell.cli.options import taking
from foretell.cli.run import box as boxes
from foretell.errors import UserError
from foretell.options import RunOptions

if TYPE_CHECKING:
    from foretell.plan.types import Plan
    from foretell.report.comparison import Comparison
    from foretell.runtime.process.signals import Signals
    from foretell.runtime.process.supervise.elastic import Elastic
    from foretell.runtime.process.supervise.keep import Supervision
    from foretell.runtime.train.outcome import RunOutcome
    from foretell.search.profiles.learn import Taught

PLAIN_SECONDS = 5.0
"""Off a terminal, a line at most this often."""


@taking(RunOptions)
def run(
    plan: Path = typer.Argument(..., metavar="PLAN", show_default=False, help="A plan file; or a run folder, with --resume or --again."),
    *,
    options: dict[str, Any],
    again: bool = typer.Option(False, "--again", help="A new run of a run folder's plan, with its settings, in another folder."),
    update_profile: bool = typer.Option(False, "--update-profile", help=compare.UPDATE_HELP),
    box: bool = typer.Option(False, "--box", help="Train nothing: rehearse rank 0 here, the other ranks stand-ins (`foretell run box`)."),
    json: bool = typer.Option(False, "--json", help=common.JSON_HELP),
    debug: bool = typer.Option(False, "--debug", help=common.DEBUG_HELP),
) -> int:  # fmt: skip
    """Train as PLAN says, and measure it. Ctrl-C saves and ends; --resume continues bit for bit.

    Works alone, under torchrun, and by itself starts as many processes as the plan wants on this machine.
    """
    from foretell.plan import file
    from foretell.runtime.process import launch

    wished = RunOptions(**options)
    out, device = Path(wished.out) if wished.out else None, wished.device
    resume = wished.resume or _restarted(out)
    before = _before(plan, out, resume=resume, again=again) if not box else {}
    plan, out = _paths(plan, out, resume)
    asked = before | wished.asked()
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {device} is not known", "auto, cpu or cuda")
    wanted = file.read_training(plan)
    if box:
        return boxes.of_run(wanted, asked, device, json=json, given={**asked, "out": out, "resume": resume})
    how = _supervision(wished)
    _refuse_strangers(wanted)
    if not launch.is_rank() and (wanted.mesh.world > 1 or how.restarts or how.notices or how.replan):
        return _launch(wanted, plan, asked, out, device, how, resume=resume)
    if launch.is_rank() and not launch.launcher_lives() and how.restarts:
        raise UserError("--max-restarts is for ranks that foretell starts itself", "give it to torchrun: torchrun --max-restarts N ...")
    if launch.is_rank() and not launch.launcher_lives() and how.replan:
        raise UserError("--replan is for ranks that foretell starts itself", "leave it out under torchrun")
    if not launch.is_rank():
        _refuse_memory(asked, how)
    with _noticing(how):
        return _here(wanted, plan, asked, out, device, resume=resume, json=json, teaches=update_profile)


def _refuse_strangers(plan: Plan) -> None:
    """Replicas that come and go are started by foretell alone, which knows when one is lost."""
    from foretell.runtime.process import launch
    from foretell.runtime.process.replica import role

    if plan.sync is not None and plan.sync.quorum and launch.is_rank() and role() is None:
        raise UserError("the plan has sync.quorum, and torchrun starts all ranks again when one is lost", "start it with `foretell run` alone")


def _restarted(out: Path | None) -> bool:
    """Whether `foretell run supervise` has started this command before, and the run in --out began then: it goes on."""
    from foretell.runtime.process.launch import RESTARTS
    from foretell.runtime.train.folder import PLAN

    return os.environ.get(RESTARTS, "0") not in ("", "0") and out is not None and (out / PLAN).is_file()


def _supervision(wished: RunOptions) -> Supervision:
    from foretell.runtime.process.supervise.keep import Supervision

    if wished.max_restarts < 0:
        raise UserError(f"--max-restarts must not be negative, got {wished.max_restarts}", "give --max-restarts 0 or more")
    if wished.ranks is not None and not wished.elastic:
        raise UserError("--ranks says with how many ranks a run goes on, and it may not change them", "give --elastic too")
    if wished.elastic and not wished.max_restarts:
        raise UserError("--elastic goes on without a rank whose restarts are used up, and there are none", "give --max-restarts N too")
    if (wished.elastic or wished.replan) and wished.no_save:
        raise UserError(f"--{'elastic' if wished.elastic else 'replan'} goes on from checkpoints, and --no-save has none", "leave out --no-save")
    return Supervision(
        restarts=wished.max_restarts, standby=wished.standby, notices=wished.notice or (), elastic=wished.elastic,
        ranks=Path(wished.ranks) if wished.ranks is not None else None, replan=wished.replan,
    )  # fmt: skip


def _elastic(plan: Plan, out: Path, how: Supervision, *, exact: bool) -> Elastic | None:
    """What knows other plans of the run; of an exact one, those with other replicas alone."""
    from foretell.runtime.parallel import exact_plans
    from foretell.runtime.process import launch
    from foretell.runtime.process.supervise.elastic import Answer, Elastic

    def plan_for(plan: Plan, ranks: Sequence[int]) -> Plan:
        if exact:
            return exact_plans.plan_for(plan, ranks[0])
        from foretell.search.other_ranks import plan_for

        return plan_for(plan, ranks)

    def better(plan: Plan, seconds: float, message_seconds: float) -> Answer:
        from foretell.search.as_measured import SlowStep, replanned

        found = replanned(plan, SlowStep(seconds=seconds, message_seconds=message_seconds), (plan.mesh.world,))
        figures = {"measured_seconds": seconds, "message_seconds": message_seconds, "work_factor": found.work, "message_factor": found.messages,
                   "now_seconds": found.now_seconds, "best_seconds": found.best_seconds}  # fmt: skip
        return found.plan, found.why or found.words(seconds), figures

    def grown(plan: Plan, settings: Mapping[str, Any]) -> Plan:
        from foretell.search.other_ranks import plan_for

        model = {key: plan.model[key] for key in ("model", "seq", "image", "loss") if key in plan.model}
        overrides = {**plan.model.get("overrides", {}), **settings}
        return plan_for(plan.with_(model={**model, "overrides": overrides}), (plan.mesh.world,))

    if not how.elastic and not how.replan:
        return None
    if how.replan and exact:
        raise UserError("--replan looks for plans that compute otherwise, and --exact keeps every bit", "give one of the two")
    if plan.sync is not None:
        raise UserError(f"--{'elastic' if how.elastic else 'replan'} keeps the training as it is, and replicas that step alone train otherwise "
                        "in another number", "leave it out, or plan without --sync-every")  # fmt: skip
    if how.replan:
        os.environ[launch.REPLANS] = "1"
    return Elastic(plan, plan_for if how.elastic else None, out, _say, how.ranks, *((better, grown) if how.replan else ()))


def _noticing(how: Supervision) -> contextlib.AbstractContextManager[object]:
    """Under torchrun the first rank looks for notices, and tells itself; elsewhere whoever has started the ranks does."""
    from foretell.runtime.process import launch
    from foretell.runtime.process.supervise.notices import Notices

    if launch.launcher_lives() or not common.speaks():
        return contextlib.nullcontext()
    return Notices(how.notices, _say, lambda: os.kill(os.getpid(), signal.SIGUSR1))


def _before(path: Path, out: Path | None, *, resume: bool, again: bool) -> dict[str, Any]:
    """Settings of the run that is to be run again. A folder that holds a run is not run as though it were a plan."""
    from foretell.runtime.train import folder

    if again and resume:
        raise UserError("--again starts a new run, and --resume goes on with one", "give one of the two")
    if again and not path.is_dir():
        raise UserError(f"--again needs a run folder, and {path} is {'a file' if path.exists() else 'not there'}", "foretell run runs/NAME --again")
    if not path.is_dir() or resume:
        return {}
    if not again:
        if out is None:
            folder.refuse_past(path)
        return {}
    settings = folder.read_settings(path)
    if settings is None:
        folder.refuse_past(path)
        raise UserError(f"{path} holds no run with settings to use again", "give a plan file")
    return settings.asked()


def _paths(plan: Path, out: Path | None, resume: bool) -> tuple[Path, Path | None]:
    """The plan file and the run folder; a run folder stands for its plan, and to resume, for itself."""
    if plan.is_dir():
        out = out or (plan if resume else None)
        plan = plan / "plan.json"
    if resume and out is None:
        raise UserError("--resume needs the run to resume", "give its folder: foretell run runs/NAME --resume")
    return plan, out


# --- starting --------------------------------------------------------------------------------------------------------


def _launch(
    plan: Plan, path: Path, asked: dict[str, Any], out: Path | None, device: str, how: Supervision, *, resume: bool
) -> int:  # fmt: skip
    """As many processes as the plan wants, on this machine."""
    from foretell.runtime.process import launch
    from foretell.runtime.process.apart import apart
    from foretell.runtime.process.supervise.keep import Keeper
    from foretell.runtime.process.supervise.replicas import ReplicaKeeper
    from foretell.runtime.train import folder

    launch.check_room(plan, device)
    out = out or folder.usual_path(plan)
    apart(lambda: folder.check(plan, asked, resume=resume))
    before = folder.read_settings(out) if resume else None
    exact = bool(asked.get("exact")) if before is None else before.exact
    _refuse_memory(asked, how)
    memory = _memory(out) if asked.get("memory_every", before.memory_every if before is not None else 0) else None
    if exact:
        os.environ.setdefault(folder.THREADS, "1")  # not what is left of the cores, which another number of ranks would change
    given = any(word == "--out" or word.startswith("--out=") for word in common.typed())
    words = [*common.typed(), *([] if given else ["--out", str(out)])]
    keeps = plan.sync is not None and plan.sync.quorum > 0  # the others go on
    saves = asked.get("save_every") or asked.get("mtbf") or memory
    if how.restarts and not keeps and not asked.get("no_save") and not (saves or resume):
        _say("no checkpoint is saved on the way: a restart begins at the first step; --save-every N or --mtbf TIME saves some")
    elastic = _elastic(plan, out, how, exact=exact)
    if plan.sync is not None and plan.sync.quorum:
        if memory is not None:
            raise UserError("--memory-every with a quorum", "--save-every: replicas that go on need no state in memory")
        keeper: ReplicaKeeper | Keeper = ReplicaKeeper(words, plan.mesh.dp_replicate, plan.sync.quorum, out, how=how, say=_say)
    else:
        keeper = Keeper(words, plan.mesh.world, out, how=how, say=_say, elastic=elastic, memory=memory)
    ended = keeper.run()
    if ended.problem:
        more = "" if how.restarts or not ended.fault else "--max-restarts 3 restarts a run that ends so"
        hint = "; ".join(filter(None, [ended.remedy, _last_words(out), more]))
        failed = UserError(ended.problem, _resume_words(path, out, f"{hint}; "))
        failed.exit_code = 1
        raise failed
    return ended.status


def _refuse_memory(asked: dict[str, Any], how: Supervision) -> None:
    """Raise where checkpoints in memory are asked for, and nothing would read them."""
    if asked.get("memory_every") and not how.restarts:
        raise UserError("--memory-every keeps checkpoints for restarts, and there are none", "give --max-restarts N too")


def _memory(out: Path) -> Path:
    from foretell.checkpoint import memory

    return memory.folder_of(out)


def _say(text: str) -> None:
    """A line of its own, also where a live line is on the screen."""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            sys.stderr.write("\r\x1b[K")
    common.emit(text, sys.stderr)


def _last_words(out: Path) -> str:
    """Which checkpoint a run that failed left behind."""
    from foretell.checkpoint import store
    from foretell.runtime.train.folder import CHECKPOINTS

    kept = store.complete(out / CHECKPOINTS)
    return f"the last checkpoint is of step {kept[0].step}" if kept else "there is no checkpoint yet"


def _here(
    plan: Plan, path: Path, asked: dict[str, Any], out: Path | None, device: str, *, resume: bool, json: bool,
    teaches: bool,
) -> int:  # fmt: skip
    from foretell.runtime.process.signals import EARLY, Signals, Stopped, exit_status
    from foretell.runtime.train import folder

    folder.check(plan, asked, resume=resume)
    screen = LiveScreen()
    with Signals(lambda text: screen.say(text) if common.speaks() else None, phase=EARLY) as signals:
        try:
            outcome = _trained(plan, asked, screen, out, device, signals, resume=resume)
        except Stopped as left:
            screen.end()
            return _tell_early(left.signal, exit_status(left.signal), json=json)
        if isinstance(outcome, int):
            return outcome
        screen.end()
        compared = compare.written(outcome.folder) if outcome.measurement is not None and common.speaks() else None
        if common.speaks():
            _keep_traces(plan, outcome.folder)
        taught = None
        if teaches and compared is not None:
            taught = common.call(lambda: compare.learned(outcome.folder, compared, device), "learning from the run")
        return _tell(outcome, path, compared, taught, json=json)


def _trained(
    plan: Plan, asked: dict[str, Any], screen: LiveScreen, out: Path | None, device: str, signals: Signals, *, resume: bool
) -> RunOutcome | int:
    """How the run ended; an exit status where it failed and it is not on this rank to tell."""
    from foretell.runtime.process import launch

    command = shlex.join(["foretell", *common.typed()])
    try:
        with common.stdout_aside():
            return _run(plan, asked, screen, out, device, command, signals, resume=resume)
    except UserError as error:
        screen.end()
        if getattr(error, "transient", False):
            launch.tell_launcher({launch.TRANSIENT: True, launch.CAUSE: getattr(error, "told", "")})
        speaks = getattr(error, "speaks", None)
        if getattr(error, "died", False) and launch.launcher_lives():
            return common.NO_OR_FAILED  # who started us says it, and knows the signal
        if speaks and not common.speaks():
            print(f"error: {error}", file=sys.stderr, flush=True)
        if speaks is False:
            return error.exit_code
        raise


def _keep_traces(plan: Plan, folder: Path) -> None:
    """For `foretell report`; a run without them is as good."""
    from foretell.report.html.detail import keep_traces

    with contextlib.suppress(UserError, OSError):
        keep_traces(plan, folder)


def _run(
    plan: Plan, asked: dict[str, Any], screen: LiveScreen, out: Path | None, device: str, command: str, signals: Signals, *,
    resume: bool,
) -> RunOutcome:  # fmt: skip
    try:
        from foretell.runtime.train.run import run
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError("torch is not installed", "pip install 'torch>=2.11'") from error
    if plan.compile == "none" and "compiled" not in plan.kernels.values():
        from foretell.trace.sandbox import light_dynamo

        light_dynamo.install()  # an optimizer asks for torch's compiler, which takes a fifth of a start
    return run(plan, asked, screen=screen, out=out, resume=resume, device=device, command=command, signals=signals)


# --- speaking --------------------------------------------------------------------------------------------------------


class LiveScreen:
    """One live line on a terminal; elsewhere a line now and then. All of it on stderr."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        self.live = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.open = False
        self.last = 0.0

    def step(self, text: str, step: int) -> None:
        if not common.speaks():
            return
        now = time.monotonic()
        if self.live:
            self._write("\r" + common.encodable(text, self.stream)[: common.width() - 1] + "\x1b[K")
            self.open = True
        elif step <= 1 or now - self.last >= PLAIN_SECONDS:
            self.last = now
            self._write(common.encodable(text, self.stream) + "\n")

    def say(self, text: str) -> None:
        self.end()
        self._write(common.encodable(text, self.stream) + "\n")

    def end(self) -> None:
        """Leave the live line as it is."""
        if self.open:
            self.open = False
            self._write("\n")

    def _write(self, text: str) -> None:
        """A terminal that is closed, or a reader that is gone, is no reason to stop training."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            common.to_nowhere(self.stream)


def _tell_early(signal: str, status: int, *, json: bool) -> int:
    """A run that was asked to stop before its first step was done: nothing of it is left."""
    if json:
        content = {
            "status": "stopped", "step": 0, "folder": None, "checkpoint": None, "measurement": None, "comparison": None, "profile": None,
        }  # fmt: skip
        common.emit_json({"run": content})
    else:
        common.emit(f"stopped before the first step ({signal}); nothing was trained, so nothing was saved")
    return status


def _tell(outcome: RunOutcome, path: Path, compared: Comparison | None, taught: Taught | None, *, json: bool) -> int:
    from foretell.runtime.process.signals import exit_status

    status = exit_status(outcome.signal) if outcome.status == "stopped" else common.YES
    measured = outcome.measurement
    if json:
        content = {
            "status": outcome.status, "step": outcome.step, "folder": str(outcome.folder),
            "checkpoint": str(outcome.saved.path) if outcome.saved else None,
            "measurement": measured.to_json() if measured else None,
            "comparison": compared.to_json() if compared else None, "profile": compare.as_json(taught) if taught else None,
        }  # fmt: skip
        common.emit_json({"run": content})
        return status
    common.emit("\n".join(_lines(outcome, path)))
    if compared is not None and compared.comparable:
        common.emit("")
        compare.show(compared)
    elif compared is not None and compared.busy:
        common.emit(compared.busy)
    compare.tell_goodput(outcome.folder)
    if taught is not None:
        common.emit("\n".join(compare.told(taught)))
    return status


def _lines(outcome: RunOutcome, path: Path) -> list[str]:
    from foretell.runtime.train.log import seconds
    from foretell.units import human_bytes

    found = outcome.measurement
    lines = [f"{outcome.status} after step {outcome.step}" + (f" ({outcome.signal})" if outcome.status == "stopped" else "")]
    if found is not None:
        assert found.first_loss is not None and found.last_loss is not None, "a run reads its loss"
        lines.append(f"loss       {found.first_loss:.4f} → {found.last_loss:.4f}"
                     + (f", held out {found.eval_loss:.4f}" if found.eval_loss is not None else ""))  # fmt: skip
        lines.append(f"step       {seconds(found.step_seconds)} ({seconds(found.p10_seconds)}–{seconds(found.p90_seconds)})"
                     f"  {found.per_second:,.0f} {found.unit}/s" + (f"  MFU {100 * found.mfu:.1f} %" if found.mfu else "")
                     + f"  loop {100 * found.overhead:.2f} %")  # fmt: skip
        peak = f"allocated {human_bytes(found.allocated_bytes)}, " if found.allocated_bytes else ""
        lines.append(f"memory     {peak}host {human_bytes(found.host_bytes)} a process")
        if found.joules_per_step is not None:
            watts = found.joules_per_step / found.step_seconds
            lines.append(f"energy     {found.joules_per_step:,.3g} J a step, {watts:,.0f} W, by the GPU's counter")
    lines.append(f"written    {outcome.folder}")
    if outcome.saved is not None:
        lines.append(f"checkpoint {outcome.saved.path}  {human_bytes(outcome.saved.bytes)}")
        if outcome.status == "stopped":
            lines.append(_resume_words(path, outcome.folder, ""))
    return lines


def _resume_words(path: Path, out: Path, begin: str) -> str:
    device = [word for place, word in enumerate(common.typed()) if word == "--device" or common.typed()[place - 1] == "--device"]
    return f"{begin}resume with: {shlex.join(['foretell', 'run', str(out), '--resume', *device])}"
