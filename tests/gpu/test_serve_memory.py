"""Another process takes the device's memory while a server runs: requests of that step are told, and the server goes on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.sampling import Sampling
from foretell.serve.thread import FAILED, EngineThread
from tests.pure.test_serve_http import model

pytestmark = pytest.mark.gpu
HOLDS = """
import sys, torch
held = []
size = 2**30
while size >= 2**20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("full", flush=True)
sys.stdin.read()
"""


def test_memory_that_others_take_is_told_and_given_back() -> None:
    """Launched steps without graphs: what a step needs is asked of the device while somebody else has all of it."""
    engine = ServingEngine(model().cuda(), pages=60, size=8, limits=StepLimits(running=4, tokens=512), graphs=False, compiled=False)
    keeper = EngineThread(engine)
    told: list[str] = []

    def ask(most: int) -> str:
        import threading

        ended = threading.Event()

        def listen(event: Any) -> None:
            if event.ended:
                told.append(event.ended)
                ended.set()

        keeper.submit(tuple(range(1, 60)), Sampling(most=most), listen).result(60)
        assert ended.wait(60)
        return told[-1]

    assert ask(8) == "length"
    torch.cuda.empty_cache()
    other = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline().strip() == "full"
        first = ask(8)
        assert first == "length" or first.startswith(FAILED), first
        assert keeper.alive
    finally:
        other.kill()
        other.communicate()
    assert ask(8) == "length" and engine.scheduler.pages.held == 0
    keeper.drain()
    assert keeper.join(60)
