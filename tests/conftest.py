"""What every test may use: the `gpu` and `slow` markers, a cache of its own, one thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forks, kept_traces

TESTS = Path(__file__).parent
CACHE = "FORETELL_CACHE"
SELDOM = 150_000
"""Objects more before garbage is looked for: after each file all of it goes."""


def pytest_configure(config: pytest.Config) -> None:
    """Workers collect the same files, each from another one on: what one has compiled the others read.

    Where there are workers, tracing processes are forked from one server. Some tests hang up on what they start, or
    interrupt it: what nohup and `&` ignore is not handed on.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    worker = getattr(config, "workerinput", None)
    if worker is None and CACHE not in os.environ:  # what was probed or traced on this machine is no matter of the tests
        folder = tempfile.TemporaryDirectory(prefix="foretell-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ[CACHE] = folder.name
        os.environ[kept_traces.NAME] = folder.name
    if worker is not None:
        forks.collect_seldom(SELDOM)
        forks.install()
    elif getattr(config.option, "numprocesses", None):
        forks.serve_forks()
    if worker is None or [Path(one).resolve() for one in config.args] != [TESTS]:
        return
    files = sorted(str(path) for path in TESTS.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = [*files[first:], *files[:first]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In one order wherever collection began. Slow needs a reason; `gpu` needs a CUDA device, and only it needs torch here."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0])
    for item in items:
        if any(not mark.kwargs.get("reason") for mark in item.iter_markers("slow")):
            raise pytest.UsageError(f'{item.nodeid} is slow without a reason; try: @pytest.mark.slow(reason="...")')
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: collections of garbage need not look at them time and again."""
    forks.collect_seldom(SELDOM)
    _set_aside()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor at every trace that a module has kept for its tests. What a trace replaces in torch is torch's own again after each."""
    group = sys.modules.get("torch.distributed")
    start = getattr(group, "init_process_group", None)
    if start is not None and start.__module__ != "torch.distributed.distributed_c10d":
        pytest.fail(f"{item.nodeid} or one of its fixtures left torch.distributed as a trace has it: {start!r}")
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        _set_aside()


def _set_aside() -> None:
    """What is there now is not looked at again: neither for garbage, nor for caches that may hold tensors of a trace, which are
    noted before."""
    if memos := sys.modules.get("foretell.trace.record.memos"):
        memos._caches.look()
    gc.freeze()


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that belongs to this test alone, named by FORETELL_CACHE."""
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setenv(CACHE, str(path))
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors only lose time to a second thread, most of all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
