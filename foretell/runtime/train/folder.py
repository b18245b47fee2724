"""The run folder: where everything of a run is. No torch.

    plan.json          the plan as it was run
    settings.json      what else was asked for
    log.jsonl          one row a step, an evaluation, a save
    faults.jsonl       one row a fault, a restart, a sample set aside, where there were any
    measurement.json   what the run was measured to do
    traces.json.gz     traces of the model as the plan runs it, for reports
    checkpoints/       step-00000100/ and so on
    collectives/       what each rank sent and waited for, last
    run.lock           who runs it, while it runs
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from foretell.decode import decode
from foretell.errors import FileFormatError, UnknownName, UserError
from foretell.files import read_json, write_atomically
from foretell.plan import file as plans
from foretell.plan.text import shell_word
from foretell.plan.types import Plan
from foretell.runtime.detect import ring
from foretell.runtime.observe import measurement
from foretell.runtime.parallel import exact_plans
from foretell.runtime.process.lock import Lock, take
from foretell.runtime.train.log import LOG
from foretell.runtime.train.log import read as log_rows
from foretell.runtime.train.schedule import KINDS, Schedule, usual_warmup

PLAN, SETTINGS, MEASUREMENT, CHECKPOINTS = "plan.json", "settings.json", "measurement.json", "checkpoints"
FAULTS = "faults.jsonl"
THREADS = "OMP_NUM_THREADS"
RATES = {"adam": 3e-4, "adamw": 3e-4, "sgd": 0.1, "momentum": 0.02}
"""Peak learning rate where none is given."""
CHANGEABLE = (
    "steps", "schedule_steps", "eval_every", "eval_batches", "save_every", "memory_every", "mtbf", "keep", "no_save", "log", "workers", "bad_samples",
    "bad_steps", "spike", "scratch",
)  # fmt: skip
"""What a resumed run may be asked otherwise."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What a run is besides its plan."""

    steps: int = 100
    lr: float | None = None
    """Peak; None = the optimizer's usual."""
    schedule: str = "cosine"
    warmup: int | None = None
    """Steps; None = a twentieth of the schedule."""
    schedule_steps: int | None = None
    """Length of the learning-rate schedule; None = `steps`. It belongs to the run: a resumed run keeps it, whatever `steps` are."""
    seed: int = 0
    data: str | None = None
    """A folder of text, a FILE.py with data(split), or None: the model file's own data(), else its example batch."""
    eval_every: int = 0
    """Steps between evaluations; 0 = at the end only."""
    eval_batches: int = 16
    """Steps' worth of held-out samples in an evaluation, at most."""
    save_every: int = 0
    """Steps between checkpoints; 0 = at the end only, or as `mtbf` says."""
    memory_every: int = 0
    """Steps between checkpoints in the memory of hosts; 0 = none there."""
    mtbf: float | None = None
    """Seconds between failures, on average: saves as often as loses the least time. None = by `save_every`."""
    keep: int = 2
    """Good checkpoints that stay."""
    no_save: bool = False
    exact: bool = False
    """The same bits on any number of ranks that divides the micro-batches of a step."""
    threads: int = 1
    """Of each rank, where `exact`: bits may depend on it. The run's, whatever later processes are told."""
    init_from: str | None = None
    """Weights to begin with: a safetensors file, a Hugging Face folder, a run or a checkpoint."""
    init_missing: tuple[str, ...] = ()
    """Names, or their beginnings, that need not be there."""
    init_adapter: str | None = None
    """Adapters to begin with: a folder in peft's format."""
    log: tuple[str, ...] = ()
    workers: int = 0
    """Processes that prepare the user's own samples."""
    bad_samples: int = 0
    """Of the user's own samples, so many on each rank may raise again and again: they are set aside."""
    bad_steps: int = 0
    """Of any 100 steps so many may have numbers that are bad: they are undone and passed over."""
    spike: float | None = None
    """A loss, or a norm of the gradient, so many times the running median is bad too."""
    scratch: str | None = None
    """Folder for what the plan keeps on disk while it runs; None = the run's own."""

    def __post_init__(self) -> None:
        if self.schedule not in KINDS:
            raise UnknownName("schedule", self.schedule, KINDS, f"known: {', '.join(KINDS)}")
        if self.steps < 1:
            raise UserError(f"a run has at least one step, got {self.steps}", "give --steps of 1 or more")
        for name in ("eval_every", "save_every", "memory_every", "workers", "bad_samples", "bad_steps"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}", f"give --{name.replace('_', '-')} 0 or more")
        if self.threads < 1:
            raise UserError(f"a rank has at least one thread, got {self.threads}", "set OMP_NUM_THREADS to 1 or more")
        if self.keep < 1:
            raise UserError(f"at least one checkpoint is kept, got {self.keep}", "give --keep 1 or more")
        if self.mtbf is not None and not 0 < self.mtbf < float("inf"):
            raise UserError(f"the time between failures must be above zero, got {self.mtbf}", "give --mtbf such as 4h")
        if self.memory_every and self.no_save:
            raise UserError("--memory-every keeps checkpoints in memory, and --no-save has none", "leave out one of the two")
        if self.mtbf is not None and self.save_every:
            raise UserError("--mtbf says when to save, and --save-every does too", "give one of the two")
        if self.spike is not None and not 1 < self.spike < float("inf"):
            raise UserError(f"a spike is more than the median, got {self.spike} times", "give --spike above 1, such as 10")
        if self.eval_batches < 1:
            raise UserError(f"an evaluation has at least one batch, got {self.eval_batches}", "give --eval-batches 1 or more")

    def schedule_for(self, plan: Plan) -> Schedule:
        rate = self.lr if self.lr is not None else RATES[plan.optimizer.partition("-")[0]]
        length = self.schedule_steps if self.schedule_steps is not None else self.steps
        warmup = self.warmup if self.warmup is not None else usual_warmup(length)
        return Schedule(kind=self.schedule, peak=rate, steps=length, warmup=warmup)

    def settled(self, plan: Plan) -> RunSettings:
        """With the schedule spelled out, so that a resumed run of another length has the same one."""
        schedule = self.schedule_for(plan)
        return replace(self, schedule_steps=schedule.steps, warmup=schedule.warmup)

    def asked(self) -> dict[str, Any]:
        """What is not as usual: that makes the same run again. A schedule that follows from the steps follows from them again."""
        free = {"schedule_steps": self.schedule_steps == self.steps, "warmup": self.warmup == usual_warmup(self.schedule_steps or self.steps)}
        usual = RunSettings()
        return {
            item.name: getattr(self, item.name) for item in fields(self)
            if getattr(self, item.name) != getattr(usual, item.name) and not free.get(item.name)
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"log": list(self.log), "init_missing": list(self.init_missing)}

    @classmethod
    def from_json(cls, data: Any, where: str = SETTINGS) -> RunSettings:
        """From its JSON; a field of another type is a `FileFormatError` that names it and `where` it stands."""
        return decode(cls, data, where, "start a new run")


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Paths of a run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def write(self, name: str, content: Any) -> None:
        """All of it or nothing."""
        write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")


def note_fault(run: Path, event: str, **values: Any) -> None:
    """A row of `faults.jsonl`, in one write: several processes have some to say. One that cannot be written is no reason to end."""
    row = json.dumps({"event": event, **values}).encode() + b"\n"
    with contextlib.suppress(OSError):
        handle = os.open(run / FAULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            os.write(handle, row)
        finally:
            os.close(handle)


def read_settings(run: Path) -> RunSettings | None:
    """What a run was asked for, from its folder; None where there is no such file."""
    path = run / SETTINGS
    try:
        data = read_json(path, "start a new run")
    except FileNotFoundError:
        return None
    try:
        return RunSettings.from_json(data, str(path))
    except FileFormatError:
        raise
    except UserError as error:
        raise FileFormatError(f"{path}: {error.problem}", "correct it there, or start a new run") from None


def check(plan: Plan, asked: Mapping[str, Any], *, resume: bool = False) -> None:
    """Raise what is wrong as far as it can be seen before anything starts. `asked` are fields of `RunSettings`."""
    from foretell.plan import legal
    from foretell.plan.facts import facts_of

    legal.check(plan, facts_of(plan))
    settings = RunSettings(**asked)
    if settings.exact:
        exact_plans.refuse(plan)
    if not resume:  # a resumed run has its own
        settings.schedule_for(plan)
    _refuse_bad_steps(plan, asked)
    if settings.init_from is not None and not resume and not Path(settings.init_from).exists():
        raise UserError(f"there is nothing at {settings.init_from}", "give --init-from a safetensors file, a folder of them or a run")
    if settings.init_adapter is not None and plan.adapters is None:
        raise UserError("--init-adapter is given and the plan trains no adapters", "a plan with them: foretell plan MODEL --lora RANK")
    if settings.scratch is not None and not Path(settings.scratch).is_dir():
        raise UserError(f"there is no folder {settings.scratch}", "make it, or give --scratch another one on a fast disk")
    if settings.data is not None and not Path(settings.data).exists():
        raise UserError(
            f"there is no data folder {settings.data}", "give --data a folder of text files, or a FILE.py with data(split)"
        )


def _refuse_bad_steps(plan: Plan, asked: Mapping[str, Any]) -> None:
    """Raise where a step cannot be undone."""
    name = next((name for name in ("bad_steps", "spike") if asked.get(name)), None)
    flag = f"--{name.replace('_', '-')}" if name else ""
    if flag and plan.sync is not None:
        raise UserError(f"{flag} needs replicas that sum gradients in every step, and the plan's step alone", f"leave out {flag}")
    if flag and plan.offloads and plan.clip is None:
        raise UserError(f"{flag} needs updates that wait for backward, and the plan's begin within it: it moves states and clips nothing",
                        "give the plan a clip, such as 1.0")  # fmt: skip


def usual_path(plan: Plan, now: float | None = None) -> Path:
    """`runs/gpt-tiny-20260131-142501`."""
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(str(plan.model.get("model", "run"))).name).strip("-.") or "run"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def claim(path: Path, *, resume: bool, say: Callable[[str], None], lost: Callable[[str], None]) -> Lock:
    """Make a run folder this process's own, a new one too; one that another process has is refused."""
    if resume and not (path / PLAN).is_file():
        raise UserError(f"{path} holds no run to resume", "leave --resume out to start one there, or give its folder as --out")
    if not resume:
        _refuse_a_run(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the run folder {path} cannot be written: {error.strerror or error}", "give another --out") from error
    return take(path, say=say, lost=lost)


@dataclass(frozen=True, kw_only=True)
class Past:
    """What is left of a run in a folder."""

    step: int
    """Updates that were done, as far as the log says."""
    settings: RunSettings | None
    """None of a script that was watched."""
    ended: str
    """When it was measured last, by UTC; empty where it never was."""
    command: str

    @property
    def finished(self) -> bool:
        return bool(self.ended) and (self.settings is None or self.step >= self.settings.steps)


def past(path: Path) -> Past | None:
    """The run in a folder; None where there is none, or a plan alone."""
    found = measurement.read(path)
    if found is None and not (path / LOG).is_file():
        return None
    rows = [row for row in log_rows(path / LOG) if row.get("event") == "step"]
    ended = ""
    if found is not None:
        with contextlib.suppress(ValueError):
            began = datetime.strptime(found["started"], "%Y-%m-%dT%H:%M:%SZ")
            ended = (began + timedelta(seconds=found["wall_seconds"])).strftime("%Y-%m-%d %H:%M")
        ended = ended or "before"
    return Past(
        step=max((int(row["step"]) for row in rows), default=0), settings=read_settings(path), ended=ended,
        command=str(found["command"]) if found is not None else "",
    )  # fmt: skip


def refuse_past(path: Path) -> None:
    """Raise where a folder that is to be run holds a run already: what it is, and what to do."""
    found, name = past(path), shell_word(path)
    if found is None:
        return
    if found.settings is None:
        raise UserError(f"{path} holds the run of a script that was watched", f"watch it again: {found.command or 'foretell watch -- python SCRIPT'}")
    done = f"{found.step:,} of {found.settings.steps:,} steps"
    if not found.finished:
        raise UserError(f"{path} holds a run that has not ended ({done})",
                        f"foretell run {name} --resume to go on, or --again for a new run of its plan in another folder")  # fmt: skip
    more = 2 * found.settings.steps
    raise UserError(f"{path} is a finished run ({done}, ended {found.ended} UTC)",
                    f"foretell run {name} --again for a new run in another folder, or --resume --steps {more} to train longer")  # fmt: skip


def undo(path: Path) -> None:
    """Take away what is there of a run that ended before its first step."""
    with contextlib.suppress(OSError):
        if (path / CHECKPOINTS).exists():
            (path / CHECKPOINTS).rmdir()  # fails where there is anything in it
        for name in (PLAN, SETTINGS, "log.jsonl"):
            (path / name).unlink(missing_ok=True)
    ring.forget(path)


def _refuse_a_run(path: Path) -> None:
    if any((path / name).exists() for name in (PLAN, CHECKPOINTS, MEASUREMENT)):
        raise UserError(f"{path} holds a run already", "resume it with --resume, or give another --out")


def begin(path: Path, plan: Plan, settings: RunSettings) -> None:
    """Make a new run folder and see that it can be written to; one that holds a run is left alone."""
    _refuse_a_run(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / SETTINGS, json.dumps(settings.to_json(), indent=2) + "\n")
        write_atomically(path / PLAN, plans.text_of(plan))
        (path / CHECKPOINTS).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {path} cannot be written: {error.strerror or error}", "give another --out") from error


def go_on(path: Path, plan: Plan, asked: dict[str, Any]) -> RunSettings:
    """Settings of the run in a folder, with what may change changed; anything else asked otherwise is refused."""
    if not (path / PLAN).is_file():
        raise UserError(f"{path} holds no run to resume", "leave --resume out to start one there, or give its folder as --out")
    if not os.access(path, os.W_OK):
        raise UserError(f"the run folder {path} cannot be written", "make it writable, or copy it")
    stored = plans.read(path / PLAN)
    refuse_other_course(path, stored, plan)
    before = read_settings(path)
    if before is None:
        raise FileFormatError(f"there is no {path / SETTINGS}", "start a new run")
    for name, value in asked.items():
        if name not in CHANGEABLE and value != getattr(before, name):
            raise UserError(
                f"--{name.replace('_', '-')} {value} was {getattr(before, name)} when the run began",
                "leave it out to go on, or start a new run with another --out",
            )
    changed = {name: asked[name] for name in CHANGEABLE if name in asked}
    if changed.get("mtbf") is not None or changed.get("save_every"):  # one takes the other's place
        changed = {"mtbf": None, "save_every": 0, **changed}
    if before.exact:
        exact_plans.refuse_other(stored, plan)
    settings = RunSettings.from_json({**before.settled(stored).to_json(), **changed})
    settings.schedule_for(plan)
    write_atomically(path / SETTINGS, json.dumps(settings.to_json(), indent=2) + "\n")
    return settings


def settle(path: Path, plan: Plan) -> None:
    """The run goes on under this plan: from now on it is the run's."""
    if plans.read(path / PLAN) != plan:
        write_atomically(path / PLAN, plans.text_of(plan))


def refuse_other_course(path: Path, stored: Plan, plan: Plan) -> None:
    """A run may go on under a plan that lays it out otherwise, not under one that computes something else."""
    free = {*_TOLD, *_LAYOUT, *(_SHARES if stored.global_batch == plan.global_batch else ())}
    unlike = [item.name for item in fields(Plan) if item.name not in free and _said(stored, item.name) != _said(plan, item.name)]
    if unlike:
        raise UserError(
            f"the plan differs from that of {path} in {', '.join(unlike)}",
            f"resume with {path / PLAN}, or with a plan of the same model, optimizer, precision and samples of a step",
        )


def _said(plan: Plan, name: str) -> Any:
    found = getattr(plan, name)
    return {key: value for key, value in found.items() if key not in _ABOUT} if name == "model" else found


_TOLD = ("predicted", "notes", "version")
"""Fields of a plan that change nothing in how it runs."""
_LAYOUT = (
    "hardware", "mesh", "placement", "pipeline", "split", "blocks", "states", "weights", "cpu_share", "loss_chunks", "reshard", "compile",
    "kernels",
)  # fmt: skip
"""Fields that change where and in what order things are computed, not what."""
_SHARES = ("micro_batch", "accumulate")
"""Together with the mesh they make the samples of a step."""
_ABOUT = ("parameters", "digest", "shapes", "blocks")
"""What a plan says of its model besides which it is."""
