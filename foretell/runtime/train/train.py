"""A plan, data and settings in; a run folder out.

    prepare ─► resume ─► Run (loop.py) ─► outcome        whatever fails is told by one rank, with what is left of the run

Rank 0 writes and speaks; everybody computes, saves and stops together.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from foretell.checkpoint.peft_files import read_adapter
from foretell.checkpoint.pretrained import load_into
from foretell.errors import UserError
from foretell.plan.text import shell_word
from foretell.plan.types import Plan
from foretell.runtime.data.samples import Feed, RankSamples
from foretell.runtime.data.workers import SetAside
from foretell.runtime.detect.observer import RunObserver
from foretell.runtime.observe import measure
from foretell.runtime.parallel.apply import apply
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.process import whose_error
from foretell.runtime.process.control import Control
from foretell.runtime.process.launch import TRAINS, tell_launcher
from foretell.runtime.process.signals import LATE, Signals, Stopped
from foretell.runtime.process.watch import RankWatch
from foretell.runtime.rejoin.hub_run import HubRun
from foretell.runtime.rejoin.replica_run import ReplicaRun
from foretell.runtime.train import folder as folders
from foretell.runtime.train import save
from foretell.runtime.train.faults import halve, salvage
from foretell.runtime.train.faults.salvage import LEAVE_SECONDS, SALVAGE_SECONDS
from foretell.runtime.train.folder import Folder, RunSettings
from foretell.runtime.train.log import LOG
from foretell.runtime.train.loop import TrainingRun
from foretell.runtime.train.memory import MemoryCheckpoints
from foretell.runtime.train.numbers.guard import RunFailed
from foretell.runtime.train.outcome import RunOutcome, RunScreen
from foretell.runtime.train.prepare import applies, build, count_of, samples_of
from foretell.units import human_bytes


def train(
    plan: Plan, settings: RunSettings, ranks: Ranks, folder: Folder, *, screen: RunScreen, control: Control | None = None,
    resume: bool = False, command: str = "", watch_seconds: Mapping[str, float] | None = None, signals: Signals | None = None,
) -> RunOutcome:  # fmt: skip
    """Run a plan. The folder is there (`folder.begin` or `folder.go_on`); every rank calls this."""
    control, signals = control or Control(ranks), signals or Signals()
    watch = RankWatch(control, tell=screen.say, left=lambda: _left(folder), **dict(watch_seconds or {}))
    run: TrainingRun | None = None
    observer: RunObserver | None = None
    try:
        observer = RunObserver(
            plan, ranks, folder.path, control, watch.progress, watch.monitor, log=folder.path / LOG, tell=screen.say,
            comparable=applies(plan, ranks),
        )  # fmt: skip
        run = _prepared(plan, settings, ranks, folder, control, screen, command, resume=resume)
        if resume:
            run.resume()
            control.first(lambda: folders.settle(folder.path, plan))
        run.progress, watch.progress.step = watch.progress, run.step
        watch.progress.trains = lambda step: tell_launcher({TRAINS: step, "at": time.monotonic()})
        watch.salvage = functools.partial(salvage.together, run)
        signals.check()
        observer.follow(run.job)
        outcome = run.all_steps(signals)
        control.gather(None)
        if run.memory is not None:
            run.memory.close()
        signals.phase = LATE
        return outcome
    except Stopped as left:
        watch.publish("", signal=left.signal)
        raise
    except RunFailed:
        raise  # every rank raises it
    except UserError as error:
        if run is None or not run.began:
            raise  # every rank raises it
        _give_way(run, watch, f"{_at(run)}: {error.problem}")
        raise RunFailed(f"{_at(run)}: {error.problem}", "; ".join(filter(None, [error.remedy, _left(folder)])), detail=error.detail) from error
    except torch.OutOfMemoryError as error:
        why = f"rank {ranks.rank} ran out of device memory: {str(error).splitlines()[0]}{measure.others_words(ranks.device)}"
        watch.publish(why)
        said = plan.predicted.get("memory_bytes")
        known = f"; the plan predicted {human_bytes(said)}" if said else ""
        smaller = halve.halved(plan, run.job) if run is not None and run.began else None
        if run is None or smaller is None or smaller.plan is None:
            more = f" ({smaller.why})" if smaller is not None else ""
            raise RunFailed(why, f"use a smaller micro-batch{more} or recompute{known}; {_left(folder)}") from error
        halve.change_plan(run, smaller, str(error).splitlines()[0])
        remedy, told = f"its plan has {smaller.words} from now on{known}; {_left(folder)}", f"{why}: {smaller.words}"
        raise RunFailed(why, remedy, transient=True, told=told) from error
    except (Exception, SystemExit) as error:
        verdict = ""
        if isinstance(error, RuntimeError):  # a collective that failed: because someone is gone?
            signals.check()
            verdict = watch.explain(error)
        if verdict:
            words = f"{verdict}; all ranks stop"
            raise RunFailed(words, watch.hint(), speaks=watch.speaks, died=watch.died, transient=True) from error
        where = _at(run) if run is not None and run.began else f"rank {ranks.rank}"
        if run is not None and (lost := run.feed.lost_a_worker(error)):  # a signal tells of it, wherever the run is
            _give_way(run, watch, f"{where}: {lost.problem}")
            raise RunFailed(f"{where}: {lost.problem}", f"{lost.remedy}; {_left(folder)}") from error
        samples = _samples_words(run) if run is not None else ""
        _give_way(run, watch, f"{where}: {whose_error.words(error)}{samples}")
        if whose_error.is_ours(error):
            raise
        raise RunFailed(f"{where}: {whose_error.words(error)}{samples}", _left(folder), detail=whose_error.trail(error)) from error
    finally:
        watch.settle(SALVAGE_SECONDS)
        if run is not None and run.saver is not None:
            run.saver.wait(LEAVE_SECONDS)
        if run is not None and run.memory is not None:
            run.memory.saver.wait(LEAVE_SECONDS)
        if run is not None:
            run.job.close()
        if observer is not None:
            observer.close()
        watch.stop()


def _give_way(run: TrainingRun | None, watch: RankWatch, why: str) -> None:
    """Tell the others why this rank ends, and save with them what was trained."""
    step = run.step if run is not None and run.can_salvage else None
    watch.publish(why, salvage=step)
    if run is not None and step is not None:
        salvage.together(run, step)


def _samples_words(run: TrainingRun) -> str:
    """Which samples this rank has in the step under way, for a person."""
    if run.origin is None or run.feed.samples.digest() == "example":
        return ""
    indices = run.feed.places(run.first_sample(run.step))[0].reshape(-1).tolist()
    shown = ", ".join(map(str, indices[:8])) + (", …" if indices[8:] else "")
    return f", with samples {shown}"


def _at(run: TrainingRun) -> str:
    return f"rank {run.ranks.rank} failed in step {run.step + 1}"


def _left(folder: Folder) -> str:
    kept = save.complete(folder.checkpoints)
    if not kept:
        return "there is no checkpoint yet"
    return f"the last checkpoint is of step {kept[0].step}; resume with --resume --out {shell_word(folder.path)}"


# --- preparing -------------------------------------------------------------------------------------------------------


def _prepared(
    plan: Plan, settings: RunSettings, ranks: Ranks, folder: Folder, control: Control, screen: RunScreen, command: str,
    resume: bool = False,
) -> TrainingRun:  # fmt: skip
    if settings.exact:
        torch.set_num_threads(settings.threads)  # how a product is cut among threads changes its bits
    workload = control.together(lambda: build(plan, settings.seed))
    known = save.whole_of(workload.model, plan)
    resumed = resume and control.first(lambda: bool(save.candidates(folder.checkpoints)))
    if settings.init_from is not None and not (resumed and plan.adapters is None):  # checkpoints of adapters have no base
        path, may_miss = Path(settings.init_from), settings.init_missing
        report = control.together(lambda: load_into(workload.model, path, may_miss=may_miss))
        if ranks.is_first:
            for line in report.lines():
                screen.say(line)
    unit, per_sample = count_of(workload.batch, plan.micro_batch)
    train_samples, eval_samples = control.together(lambda: samples_of(plan, settings, workload))
    if ranks.is_first:
        screen.say(f"data: {train_samples.note}")
        if not applies(plan, ranks):
            screen.say(f"the plan is for {plan.hardware} and this is a {ranks.device.type}: what it predicts is not compared")
    schedule = settings.schedule_for(plan)
    start = None
    if settings.init_adapter is not None and not resumed:
        start = control.together(lambda: read_adapter(Path(str(settings.init_adapter))))
    job = apply(workload, plan, ranks, learning_rate=schedule.at(0), scratch=settings.scratch or folder.path, start=start,
                exact=settings.exact)  # fmt: skip
    known = save.trained_of(job) if plan.adapters is not None else known
    share = RankSamples(micro_batch=plan.micro_batch, accumulate=plan.accumulate, ranks=ranks.data_size, rank=ranks.data_rank,
                        together=settings.exact)  # fmt: skip
    bad: dict[str, Any] = {"bad_samples": settings.bad_samples, "tell": lambda what: _tell_data(what, folder, ranks, screen)}
    feed = Feed(train_samples, share, seed=settings.seed, device=ranks.device, workers=settings.workers, **bad)
    held = Feed(eval_samples, share, seed=settings.seed, device=ranks.device, shuffle=False, **bad) if eval_samples else None
    measure.forget_peaks(ranks.device)
    made = TrainingRun if ranks.replica is None else HubRun if ranks.replica.is_hub else ReplicaRun
    return made(
        plan=plan, settings=settings, ranks=ranks, folder=folder, control=control, screen=screen, command=command,
        job=job, feed=feed, held=held, unit=unit, per_step=per_sample * share.step, known=known,
        saver=None if settings.no_save else _saver(settings, ranks, folder, control),
        memory=MemoryCheckpoints(folder.path, settings.memory_every, ranks, control, fresh=not resume) if settings.memory_every else None,
    )  # fmt: skip


def _tell_data(what: str | SetAside, folder: Folder, ranks: Ranks, screen: RunScreen) -> None:
    """Of a rank's own data: a process that was replaced, a sample that was set aside."""
    if isinstance(what, SetAside):
        screen.say(f"rank {ranks.rank}: {what.why}; it is set aside, and sample {what.instead} takes its place")
        folders.note_fault(folder.path, "sample", rank=ranks.rank, **asdict(what))
    else:
        screen.say(f"rank {ranks.rank}: {what}")
        folders.note_fault(folder.path, "loader", rank=ranks.rank, words=what)


def _saver(settings: RunSettings, ranks: Ranks, folder: Folder, control: Control) -> save.Saver:
    """Its thread talks over a group of its own."""
    back = save.Members(Control(ranks))
    cuda = ranks.device.type == "cuda"
    return save.Saver(folder.checkpoints, save.Members(control), back, keep=settings.keep, pin=cuda, spare=save.room(ranks))
