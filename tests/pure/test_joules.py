"""Joules of steps from a counter that jumps, with saves in between."""

from __future__ import annotations

import pytest
import torch

from foretell.runtime.observe.joules import Joules


class Machine:
    """A GPU of 300 W whose steps take 50 ms; its counter moves every 100 ms."""

    def __init__(self) -> None:
        self.time = 0.0
        self.readings = 0

    def read(self) -> float:
        self.readings += 1
        return 300.0 * int(self.time * 10 + 1e-9) / 10

    def now(self) -> float:
        return self.time


def test_joules_of_a_step_are_watts_times_seconds() -> None:
    machine = Machine()
    meter = Joules(torch.device("cpu"), machine.read, machine.now)
    for step in range(400):
        machine.time += 0.05
        meter.mark(step)
    assert meter.per_step() == pytest.approx(300 * 0.05, rel=0.02)
    assert machine.readings < 60, "the host has other things to do"


def test_what_lies_between_steps_does_not_count() -> None:
    machine = Machine()
    meter = Joules(torch.device("cpu"), machine.read, machine.now)
    for step in range(400):
        machine.time += 0.05
        meter.mark(step)
        if step % 100 == 99:
            meter.pause()
            machine.time += 30.0  # a long evaluation
    assert meter.per_step() == pytest.approx(300 * 0.05, rel=0.05)


def test_a_short_run_and_a_cpu_have_none() -> None:
    machine = Machine()
    meter = Joules(torch.device("cpu"), machine.read, machine.now)
    for step in range(10):
        machine.time += 0.05
        meter.mark(step)
    assert meter.per_step() is None
    none = Joules(torch.device("cpu"))
    none.mark(1)
    assert none.per_step() is None
    none.close()


def test_a_counter_that_fails_ends_it() -> None:
    meter = Joules(torch.device("cpu"), lambda: None)
    meter.mark(1)
    assert meter.per_step() is None
