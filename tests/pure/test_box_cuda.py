"""Stand-ins of a GPU without one: what they launch, on which stream, for how long; kernels are written in torch here."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from foretell.runtime.box.script import BoxScript
from foretell.simulate.arrivals import Arrivals

LAUNCHED: list[tuple[str, int, str, Any]] = []
"""Kernel, thread blocks, stream, the time it was given."""


class _Stream:
    now = "compute"

    def __init__(self, name: object = "side") -> None:
        self.name = f"side {len(LAUNCHED)}"
        self.waits: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waits.append(other)

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class _Event:
    def record(self, stream: Any = None) -> None:
        self.stream = stream


COMPUTE = _Stream()
COMPUTE.name = "compute"
CURRENT = [COMPUTE]


@contextmanager
def _on(stream: _Stream) -> Iterator[None]:
    CURRENT.append(stream)
    try:
        yield
    finally:
        CURRENT.pop()


def _kernel(name: str, body: Any) -> Any:
    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                LAUNCHED.append((name, grid[0], CURRENT[-1].name, body(*args)))

            return launch

    return Kernel()


def _spread(source: Any, target: Any, count: int, copies: int, ns: int) -> int:
    assert source.numel() == count and target.numel() == count * copies and source.dtype == target.dtype
    if source.data_ptr() != target.data_ptr() or copies > 1:
        target.view(copies, count).copy_(source.clone().expand(copies, count))
    return ns


def _add_up(source: Any, target: Any, count: int, pieces: int, scale: float, ns: int) -> int:
    target.view(-1).copy_(source.reshape(pieces, count).sum(0) * scale)
    return ns


def _normal(target: Any, count: int, seed: int, scale: float) -> int:
    target.normal_(0, scale)
    return 0


def _leave(source: Any, stamp: Any, count: int, ns: int) -> int:
    stamp.fill_(1000 + len(LAUNCHED))
    return ns


def _arrive(stamps: Any, delays: Any, count: int) -> int:
    return int(torch.where(delays < 0, 0, stamps + delays).max())


@pytest.fixture
def ins(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = types.ModuleType("foretell.runtime.box.kernels")
    bodies = {"spread": _spread, "add_up": _add_up, "normal": _normal, "leave": _leave, "arrive": _arrive,
              "note": lambda stamps: int(stamps[0].fill_(100)), "hold": lambda ns: ns}  # fmt: skip
    vars(fake).update({"BLOCK": 4096, "WARPS": 16} | {name: _kernel(name, body) for name, body in bodies.items()})
    monkeypatch.setitem(sys.modules, "foretell.runtime.box.kernels", fake)
    import foretell.runtime.box as room

    monkeypatch.setattr(room, "kernels", fake, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", _on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: CURRENT[-1])
    from foretell.runtime.box.cuda import OnCuda

    LAUNCHED.clear()
    return lambda script: OnCuda(script, torch.device("cpu"))


def test_a_gather_fills_every_slot_and_takes_its_time_on_the_stream_of_who_waits(ins: Any) -> None:
    box = ins(BoxScript(channels=lambda nbytes: 7))
    target = torch.zeros(4 * 6, dtype=torch.bfloat16)
    source = target[6:12].normal_()
    work = box.gather("g", target, source, 3e-6, True)
    assert work.wait() and target.view(4, 6).eq(source.clone()).all()
    assert LAUNCHED == [("spread", 7, "compute", 3000)]


def test_what_is_not_waited_for_runs_on_the_groups_own_stream(ins: Any) -> None:
    box = ins(BoxScript())
    source, target = torch.randn(3, 8), torch.zeros(8)
    work = box.reduce("g", target, source, True, 5e-6, False)
    assert torch.allclose(target, source.mean(0)) and LAUNCHED[0][0] == "add_up" and LAUNCHED[0][2] != "compute"
    assert not work.is_completed()
    work.wait()
    assert work.is_completed() and isinstance(COMPUTE.waits[-1], _Event)
    box.keep("g", (target,), 2e-6, False)
    assert LAUNCHED[1][2] == LAUNCHED[0][2], "collectives of a group follow each other"


def test_free_messages_take_no_time_and_still_fill(ins: Any) -> None:
    box = ins(BoxScript(free=True))
    source, target = torch.randn(4, 8), torch.zeros(8)
    box.reduce("g", target, source, True, 5e-6, True)
    assert target.equal(source[0]) and LAUNCHED[0][3] == 0
    box.keep("g", (target,), 5e-6, True)
    assert len(LAUNCHED) == 1


def test_a_message_of_another_stage_comes_when_its_chains_have_ended(ins: Any) -> None:
    told = Arrivals(sends=("F0.0", "F0.1"), receives={"B1.0": (None, 4e-6, None), "B1.1": (9e-6, None, 2e-6)}, end=(None, 1e-6, 6e-6))
    box = ins(BoxScript(arrivals=told))
    box.begin_step()
    activation, gradient = torch.randn(4), torch.zeros(4)
    box.send("to 1", activation, 1e-6, "F0.0").wait()
    work = box.receive("from 1", gradient, 1e-6, "B1.0")
    assert gradient.abs().sum() > 0 and LAUNCHED[-1][0] == "normal", "filled when it is asked for"
    stamp = int(box._stamps[1])
    work.wait()
    assert LAUNCHED[-1] == ("arrive", 1, "compute", stamp + 4000)
    box.receive("from 1", gradient, 1e-6, "B1.1").wait()
    assert LAUNCHED[-1][3] == 100 + 9000, "from the start of the step; what was not sent yet is long ago"
    box.keep("world", (torch.zeros(2),), 1e-6, True, ends=True)
    assert [one[0] for one in LAUNCHED[-2:]] == ["arrive", "spread"]
