"""Who holds a run up: what ranks say of themselves, what is seen of them, and what follows from both."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.runtime.detect.hangs import Entry, GroupPosition, RankPosition
from foretell.runtime.process import blame as judges
from foretell.runtime.process import proc, progress
from foretell.runtime.process.blame import HANG_VARIABLE, Judge, Limits, blamed
from foretell.runtime.process.progress import (
    ASLEEP,
    BUSY,
    DATA,
    DEVICE,
    MOVING,
    SAVE,
    STEP,
    WAITING,
    Monitor,
    Progress,
    RankReport,
)

ROOT = Path(__file__).resolve().parents[2]

CALM = RankReport(
    beat=1, kind=WAITING, seconds=100.0, same_seconds=100.0, phase=STEP, step=6, steps=6, step_seconds=0.5,
    recovered_seconds=0.0, collectives=40, where="a.py:3 in forward",
)  # fmt: skip


def judged(*reports: RankReport, **limits: float) -> Judge:
    found = Judge(len(reports), Limits(**limits))
    for rank, report in enumerate(reports):
        found.hear(rank, report)
    return found


def standing(entered: int, *, op: str = "all_reduce", waits: bool = True, seconds: float = 9.0) -> RankPosition:
    recent = tuple(Entry(number, op if number == entered else "all_reduce", "float32", 4096) for number in range(1, entered + 1))
    group = GroupPosition("0", "dp_shard", (0, 1), entered, recent)
    return RankPosition((group,), "0" if waits else "", entered if waits else 0, seconds if waits else 0.0, place="node7, cuda:1")


# ---------------------------------------------------------------- verdicts


def test_ranks_that_called_different_collectives_end_at_once_and_a_network_is_given_time() -> None:
    waits = replace(CALM, seconds=6.0)
    odd = judged(replace(waits, position=standing(8)), replace(waits, position=standing(8, op="broadcast")))
    verdict = odd.verdict()
    assert verdict is not None and verdict.culprits == () and "same collectives in the same order" in verdict.remedy
    assert verdict.problem == (
        "the ranks are desynchronised: at collective 8 of dp_shard rank 0 called all_reduce (float32, 4.0 KiB) "
        "and rank 1 called broadcast (float32, 4.0 KiB)"
    )
    assert judged(replace(waits, position=standing(8)), replace(waits, kind=BUSY, position=standing(8, op="broadcast"))).verdict() is None
    same = replace(waits, position=standing(8))
    assert judged(same, same).verdict() is None  # a large message may take longer
    long = replace(same, seconds=40.0, position=standing(8, seconds=40.0))
    verdict = judged(long, long).verdict()
    assert verdict is not None and verdict.problem.startswith("hang inside of communication: all ranks of it have entered all_reduce 8 of dp_shard")
    assert judged(long, long, hang_s=math.inf).verdict() is None
    usual = replace(long, position=replace(standing(8, seconds=40.0), deadline=60.0))  # such collectives take long here
    assert judged(usual, usual).verdict() is None


def test_a_hang_is_named_before_anything_is_ended_and_the_verdict_tells_the_collective() -> None:
    waits = replace(CALM, seconds=6.0, position=standing(8))
    asleep = replace(CALM, kind=ASLEEP, seconds=6.0, position=standing(7, waits=False))
    found = judged(waits, asleep)
    assert found.verdict() is None
    assert found.line() == (
        "hang outside of communication: rank 1 never entered all_reduce 8 of dp_shard (float32, 4.0 KiB), in which rank 0 waits; "
        "rank 1 is asleep at a.py:3 in forward (node7, cuda:1)"
    )
    assert found.line() == ""
    for change in ({"kind": BUSY}, {"kind": MOVING}, {"phase": DATA}, {"seconds": 1.0}):
        assert judged(waits, replace(asleep, **change)).line() == ""  # type: ignore[arg-type]
    assert judged(replace(waits, position=standing(8, seconds=4.0)), asleep).line() == ""  # not yet later than it may be
    verdict = judged(replace(waits, seconds=40.0), replace(asleep, seconds=40.0)).verdict()
    assert verdict is not None and verdict.culprits == (1,)
    assert verdict.problem.endswith("at a.py:3 in forward; rank 1 never entered all_reduce 8 of dp_shard (float32, 4.0 KiB), in which rank 0 waits")


def test_a_report_with_its_position_travels_as_json() -> None:
    report = replace(CALM, position=standing(8))
    assert RankReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    broken = RankReport.from_json({**report.to_json(), "position": [1, 2]})
    assert broken is not None and broken.position is None and RankReport.from_json({**report.to_json(), "beat": "x"}) is None


def test_a_sleeper_that_all_others_wait_for_is_named_with_its_line() -> None:
    asleep = replace(CALM, kind=ASLEEP, seconds=40.0)
    for place in range(3):
        others = [replace(CALM, kind=kind) for kind in (WAITING, DEVICE)]
        verdict = judged(*others[:place], asleep, *others[place:]).verdict()
        assert verdict is not None and verdict.culprits == (place,)
        assert f"rank {place} made no progress for 40 s in step 7 while the other ranks wait" in verdict.problem
        assert "a.py:3 in forward" in verdict.problem and HANG_VARIABLE in verdict.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"kind": BUSY}, {"kind": MOVING, "seconds": 0.5}, {"kind": DEVICE}, {"kind": WAITING},
        {"phase": DATA}, {"phase": SAVE}, {"phase": progress.EVALUATION}, {"phase": progress.LOG}, {"phase": progress.PREPARE},
        {"seconds": 29.0}, {"seconds": 34.0}, {"steps": 0, "seconds": 44.0}, {"recovered_seconds": 5.0, "seconds": 49.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_rank_that_works_or_may_take_its_time_is_left_alone(change: dict[str, float]) -> None:
    """With steps of half a second a sleeper is given 35 s; 45 before the first step; more where it woke before."""
    late = replace(CALM, **{"kind": ASLEEP, "seconds": 400.0, **change})  # type: ignore[arg-type]
    assert judged(CALM, late).verdict() is None
    assert judged(CALM, replace(late, kind=ASLEEP, phase=STEP, seconds=400.0)).verdict() is not None


def test_while_anyone_works_nobody_is_accused() -> None:
    asleep = replace(CALM, kind=ASLEEP)
    assert judged(CALM, asleep, replace(CALM, kind=BUSY)).verdict() is None
    assert judged(CALM, asleep, replace(CALM, kind=MOVING, seconds=1.0)).verdict() is None
    assert judged(CALM, asleep, replace(CALM, kind=ASLEEP, phase=DATA)).verdict() is None  # they may all wait for that one's data
    assert judged(CALM, asleep, replace(CALM, seconds=10.0)).verdict() is None  # not for long enough
    assert judged(asleep, asleep).verdict() is None  # nobody waits
    several = judged(CALM, asleep, asleep).verdict()
    assert several is not None and several.culprits == (1, 2) and several.problem.startswith("ranks 1, 2 made")


def test_before_collectives_fail_whoever_is_missing_is_named() -> None:
    long = replace(CALM, seconds=541.0, same_seconds=541.0)
    for change, words in (({"kind": BUSY}, "which computes in step"), ({"kind": ASLEEP, "phase": DATA}, "which is in data")):
        late = replace(long, **change)  # type: ignore[arg-type]
        assert judged(long, late, most_s=600.0).verdict() is None
        verdict = judged(long, late, most_s=540.0).verdict()
        assert verdict is not None and verdict.culprits == (1,) and f"waited for 540 s for rank 1, {words}" in verdict.problem
    everyone = judged(long, replace(long, where="b.py:9 in backward"), most_s=540.0).verdict()
    assert everyone is not None and everyone.culprits == () and "rank 1 at b.py:9 in backward" in everyone.problem
    assert judged(long, replace(long, kind=MOVING), most_s=540.0).verdict() is None
    assert judged(replace(long, kind=BUSY), replace(long, kind=BUSY), most_s=540.0).verdict() is None  # both compute


def test_a_rank_that_others_wait_for_is_told_once() -> None:
    late = replace(CALM, kind=ASLEEP, phase=DATA, where="mine.py:8 in __getitem__")
    found = judged(CALM, late)
    assert found.line() == "the other ranks wait for rank 1: 100 s in data, now at mine.py:8 in __getitem__" and found.line() == ""
    found.hear(1, replace(late, beat=2, same_seconds=0.1))
    assert found.line() == ""
    found.hear(1, replace(late, beat=3, kind=MOVING))  # code that runs, for a long time
    assert "wait for rank 1" in found.line()
    assert judged(CALM, replace(late, steps=0)).line() == ""  # compiling takes long


def test_after_a_collective_failed_the_one_that_did_not_take_part_is_named() -> None:
    moving = replace(CALM, kind=MOVING)
    assert (found := blamed({0: CALM, 1: moving})) is not None and found.culprits == (1,)
    behind = replace(CALM, collectives=39)
    assert (found := blamed({0: CALM, 1: behind})) is not None and found.culprits == (1,)
    failed = replace(moving, phase=progress.FAILED)  # it had waited
    assert (found := blamed({0: failed, 1: moving, 2: failed})) is not None and found.culprits == (1,)
    assert blamed({0: CALM, 1: CALM}) is None and blamed({0: failed, 1: failed}) is None


def test_the_limit_is_the_users_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Limits.usual(600.0) == Limits(hang_s=30.0, most_s=540.0)
    for said, wanted in (("120", 120.0), ("0", math.inf), (" ", 30.0)):
        monkeypatch.setenv(HANG_VARIABLE, said)
        assert Limits.usual(600.0).hang_s == wanted
    asleep = replace(CALM, kind=ASLEEP, seconds=1e6, same_seconds=1e6)
    assert judged(replace(CALM, seconds=1e6), asleep, hang_s=math.inf).verdict() is None
    for said in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv(HANG_VARIABLE, said)
        with pytest.raises(UserError, match=f"{HANG_VARIABLE}={said} is not a number of seconds"):
            Limits.usual(600.0)


def test_reports_that_are_none_are_not_believed() -> None:
    good = CALM.to_json()
    assert RankReport.from_json(good) == CALM
    for bad in (None, [], {}, {**good, "more": 1}, {**good, "kind": 1}, {**good, "seconds": "1"}, {**good, "steps": True}):
        assert RankReport.from_json(bad) is None


# ---------------------------------------------------------------- seen from outside


def test_a_process_that_is_stopped_is_seen_and_one_in_a_debugger_is_not_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "100"])
    try:
        found = judged(CALM, CALM, hang_s=0.5)
        found.see({1: child.pid})
        assert found.verdict() is None
        child.send_signal(signal.SIGSTOP)
        _until(lambda: proc.state(child.pid) == "T")
        found.see({1: child.pid})
        assert found.verdict() is None  # not for long enough
        time.sleep(0.6)
        found.see({1: child.pid})
        verdict = found.verdict()
        assert verdict is not None and verdict.problem == f"rank 1 is stopped (SIGSTOP to process {child.pid}) and the other ranks wait"
        found._looked -= judges.GAP_SECONDS + 1  # whoever looks was stopped itself: all of that does not count
        assert found.verdict() is None
        found.see({1: child.pid})
        assert found.verdict() is None
        child.send_signal(signal.SIGCONT)
        _until(lambda: proc.state(child.pid) != "T")
        time.sleep(0.6)
        found.see({1: child.pid})
        assert found.verdict() is None
    finally:
        child.kill()
        child.wait()
    assert not proc.lives(child.pid) and proc.started(child.pid) == ""


@pytest.mark.parametrize(("waited", "stopped", "ends"), [(3.1, 5.1, True), (2.9, 9.0, False), (9.0, 4.9, False)])
def test_a_stopped_rank_is_seen_to_be_so_and_others_need_not_have_waited_as_long(waited: float, stopped: float, ends: bool) -> None:
    found = judged(replace(CALM, seconds=waited), replace(CALM, kind=MOVING), hang_s=5.0)
    found.ranks[1].stopped = time.monotonic() - stopped
    assert (found.verdict() is not None) is ends
    asleep = judged(replace(CALM, seconds=waited), replace(CALM, kind=ASLEEP, seconds=8.0), hang_s=5.0)
    assert (asleep.verdict() is not None) is (waited >= 5.0 + 2.5), "of a sleeper it is concluded"


def _until(wanted: object) -> None:
    deadline = time.monotonic() + 20
    while not wanted():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


BESIDE = """
import subprocess, sys, time
COMPUTES = "print('on', flush=True)\\nwhile True: sum(range(10000))"
if sys.argv[1] == "computes":
    exec(COMPUTES)
if sys.argv[1] == "child":
    subprocess.run([sys.executable, "-c", COMPUTES])
print("on", flush=True)
while True: time.sleep(0.2)
"""


def test_idle_means_that_neither_it_nor_its_children_compute() -> None:
    ways = ("computes", "child", "polls")
    started = {how: subprocess.Popen([sys.executable, "-c", BESIDE, how], stdout=subprocess.PIPE, process_group=0) for how in ways}
    try:
        for child in started.values():
            assert child.stdout is not None
            with child.stdout:
                assert child.stdout.readline() == b"on\n"
        idle = {how: proc.Idle(child.pid) for how, child in started.items()}
        began = time.monotonic()
        while time.monotonic() < began + 3:
            for one in idle.values():
                one.look(time.monotonic())
            time.sleep(0.25)
        assert idle["polls"].seconds() > 1 and idle["computes"].seconds() < 0.6 and idle["child"].seconds() < 0.6
    finally:
        for child in started.values():
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


# ---------------------------------------------------------------- what a rank says of itself


def test_a_monitor_tells_a_sleeper_from_one_that_waits_and_one_that_computes(tmp_path: Path) -> None:
    """In a process of its own: a worker of pytest has children that compute."""
    code = "import sys; from pathlib import Path; from tests.pure.test_blame import monitored; monitored(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def monitored(folder: Path) -> None:
    """The thread that is looked at is this one; files make what it does look like torch's, or the user's."""
    progress.STILL_SECONDS = 0.6
    (folder / "torch" / "distributed").mkdir(parents=True)
    code = "import time\ndef forward(wait):\n    wait()\n"
    spaces: dict[str, dict[str, object]] = {}
    for name in ("own.py", "torch/distributed/c10d.py"):
        exec(compile(code, str(folder / name), "exec"), spaces.setdefault(name, {"__name__": name}))
    done = threading.Event()
    reports: list[RankReport] = []

    def look(monitor: Monitor, kinds: tuple[str, ...]) -> None:
        """Until it looks as it should, on a machine that may be busy with other things."""
        for number in range(50):
            time.sleep(0.2)
            reports.append(monitor.report())
            if number >= 4 and reports[-1].kind in kinds:
                break
        done.set()

    def during(file: str, wait: object, *kinds: str) -> RankReport:
        done.clear()
        told.at(STEP)
        thread = threading.Thread(target=look, args=(monitor, kinds))
        thread.start()
        spaces[file]["forward"](wait)  # type: ignore[operator]
        thread.join()
        return reports[-1]

    told = Progress()
    monitor = Monitor(told)
    asleep = during("own.py", done.wait, ASLEEP)
    assert asleep.kind == ASLEEP and asleep.seconds >= 0.6 and asleep.where == f"{folder}/own.py:3 in forward"
    waiting = during("torch/distributed/c10d.py", done.wait, WAITING)
    assert waiting.kind == WAITING and waiting.recovered_seconds >= 0.6  # it woke
    busy = during("own.py", lambda: _spin(done), BUSY, MOVING)
    assert busy.kind in (BUSY, MOVING)


def _spin(done: threading.Event) -> None:
    while not done.is_set():
        sum(range(1000))


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    monitor = Monitor(Progress())
    monitor.report()
    for name in ("_looked", "_still", "_same"):
        setattr(monitor, name, getattr(monitor, name) - 1000.0)
    monitor._seen = (monitor.progress.count, 0, progress._signature(sys._getframe()))
    assert (found := monitor.report()).same_seconds < 5 and found.seconds < 5


def test_a_step_counts_and_its_median_is_known() -> None:
    told = Progress()
    assert told.step_seconds() == 0.0
    for step in (11, 12, 13):
        told.stepped(step)
        time.sleep(0.01)
    assert (told.step, told.steps) == (13, 3) and 0.01 <= told.step_seconds() < 0.2
