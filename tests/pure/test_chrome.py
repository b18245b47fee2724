"""The trace file: what the format asks of every event, and that the schedule can be read back from it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.quantities import COLLECTIVES, COMPUTE, HOST, Task
from foretell.report import chrome
from foretell.simulate.time.streams import simulate

TASKS = [
    Task("all_gather", COLLECTIVES, 2e-3, kind="all_gather", module="blocks.0", phase="forward"),
    Task("block", COMPUTE, 5e-3, (0,), 1e-5, "gemm", "blocks.0", "forward"),
    Task("adam", HOST, 1e-3, (1,)),
    Task("spill", "disk", 4e-3, (1,)),
]


def test_every_event_has_what_the_format_asks_for() -> None:
    found = chrome.events(simulate(TASKS))
    for event in found:
        assert isinstance(event["name"], str) and event["name"]
        assert event["ph"] in ("X", "M")
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["cat"], str) and event["cat"]


def test_the_schedule_reads_back_in_microseconds() -> None:
    line = simulate(TASKS)
    found = [event for event in chrome.events(line) if event["ph"] == "X"]
    assert [event["name"] for event in found] == [task.name for task in TASKS]
    assert [event["ts"] for event in found] == pytest.approx([start * 1e6 for start in line.start])
    assert [event["ts"] + event["dur"] for event in found] == pytest.approx([end * 1e6 for end in line.finish])
    assert found[1]["args"] == {"module": "blocks.0", "phase": "forward"}
    assert found[2]["args"] == {}


def test_a_resource_is_a_thread_and_its_events_do_not_overlap() -> None:
    line = simulate([Task(str(i), (COMPUTE, COLLECTIVES)[i % 2], 1e-4, host_seconds=1e-5) for i in range(40)])
    found = chrome.events(line)
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    assert sorted(names.values()) == [COLLECTIVES, COMPUTE]
    for thread, name in names.items():
        mine = [event for event in found if event["ph"] == "X" and event["tid"] == thread]
        assert len(mine) == sum(task.resource == name for task in line.tasks)
        for before, after in pairwise(mine):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_the_file_is_json_that_a_viewer_takes(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    chrome.write(simulate(TASKS), path, process="rank 0")
    read = json.loads(path.read_text())
    assert set(read) == {"traceEvents", "displayTimeUnit"}
    assert read["traceEvents"][0]["args"]["name"] == "rank 0"
    assert len([event for event in read["traceEvents"] if event["ph"] == "X"]) == len(TASKS)


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write the trace to .*nowhere"):
        chrome.write(simulate(TASKS), tmp_path / "nowhere" / "trace.json")
