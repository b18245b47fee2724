"""Processes of this machine that stand in for a cluster: started once from a warm parent, used for many small worlds.

Importing torch takes seconds, forking a process that has it takes milliseconds. Worker i is always rank i, every
call gets a process group of its own, and nothing of it is left when the call returns.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.utils.checkpoint",
    "foretell.trace.load.model",
    "foretell.trace.record.step",
)
"""What the warm parent imports; a name that is not there is left out."""
GRACE_SECONDS = 5.0
"""How long the other ranks may take once one has failed."""


@dataclass
class RankFailure(Exception):
    """One or more ranks raised, died or did not answer in time."""

    errors: dict[int, str]
    """Rank → its traceback, or what became of it; the first to fail is first."""
    causes: dict[int, BaseException] = field(default_factory=dict)
    """Rank → the exception itself, where it can travel between processes."""

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {text.rstrip()}" for rank, text in self.errors.items())

    @property
    def first(self) -> BaseException | None:
        """The exception that was raised first, if it could travel."""
        return next((self.causes[rank] for rank in self.errors if rank in self.causes), None)


@dataclass(frozen=True)
class PoolWorld:
    """So many ranks of a pool."""

    pool: Pool
    size: int

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """`function(rank, world, *args, **kwargs)` on every rank, gloo initialised; results in order of rank."""
        return self.pool.run(self.size, function, args, kwargs, timeout_s)


class Pool:
    """Long-lived workers; they start when first needed and end with this process, however it ends."""

    def __init__(self, *, largest: int = 16, preload: Sequence[str] = ()) -> None:
        self.largest = largest
        self._workers: list[_Worker] = []
        self._preload = [*PRELOAD, *preload]
        self._store: Any = None
        self._calls = 0
        atexit.register(self.close)

    def ranks(self, count: int) -> PoolWorld:
        if not 1 <= count <= self.largest:
            raise ValueError(f"{count} ranks asked of a pool of {self.largest}")
        return PoolWorld(self, count)

    def run(
        self, world: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> list[Any]:
        self._grow(world)
        self._calls += 1
        where = (function.__module__, inspect.getfile(function), function.__qualname__)
        load = pickle.dumps((args, kwargs))
        call = {"world": world, "port": self._store.port, "name": str(self._calls), "timeout_s": timeout_s}
        for rank, worker in enumerate(self._workers[:world]):
            worker.pipe.send_bytes(pickle.dumps((where, rank, call, load, list(sys.path))))
        return self._collect(world, time.monotonic() + timeout_s)

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        until = time.monotonic() + 1.0
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))  # an idle worker leaves by itself
            worker.end()
        self._workers.clear()
        self._store = None

    def _grow(self, count: int) -> None:
        if self._store is None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for position, worker in enumerate(self._workers):
            if not worker.process.is_alive():
                self._workers[position] = _Worker(self._preload)
        while len(self._workers) < count:
            self._workers.append(_Worker(self._preload))

    def _collect(self, world: int, deadline: float) -> list[Any]:
        waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers[:world])}
        results: list[Any] = [None] * world
        failure = RankFailure({})
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    good, value, cause = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    good, value, cause = False, f"died, {self._workers[rank].fate()}", None
                if good:
                    results[rank] = value
                    continue
                failure.errors[rank] = value
                if cause is not None:
                    failure.causes[rank] = cause
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():  # no answer: this worker is of no more use
            failure.errors[rank] = "did not answer in time and was ended"
            self._workers[rank].end()
        if failure.errors:
            raise failure
        return results


class _Worker:
    def __init__(self, preload: list[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        self.pipe, theirs = context.Pipe()
        quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with _environment(quiet):
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
        theirs.close()

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(10)

    def fate(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        return f"ended by signal {-code}" if code is not None and code < 0 else f"exit status {code}"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


# ---------------------------------------------------------------- in the worker


def _serve(pipe: connection.Connection) -> None:
    """Answer calls until whoever asked is gone."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # every call ends with a collection: what was imported before need not be walked over each time
    while True:
        try:
            where, rank, call, load, path = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        sys.path[:] = path
        try:
            pipe.send_bytes(_answer(where, rank, call, load))
        except OSError:  # whoever asked is gone
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _answer(where: tuple[str, str, str], rank: int, call: dict[str, Any], load: bytes) -> bytes:
    try:
        value = _call(where, rank, call, load)
        return pickle.dumps((True, value, None))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(sent := pickle.dumps((False, text, error)))
            return sent
        except Exception:
            return pickle.dumps((False, text, None))


def _call(where: tuple[str, str, str], rank: int, call: dict[str, Any], load: bytes) -> Any:
    import torch.distributed as dist

    world = call["world"]
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(call["port"]),
    )  # fmt: skip
    limit = timedelta(seconds=call["timeout_s"])
    store = dist.TCPStore("127.0.0.1", call["port"], is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(call["name"], store), rank=rank, world_size=world, timeout=limit
    )
    _wait_for_all(dist.PrefixStore(f"{call['name']} formed", store), world, limit)
    try:
        function = _find(*where)
        args, kwargs = pickle.loads(load)
        return function(rank, world, *args, **kwargs)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget()


def _wait_for_all(store: Any, world: int, limit: timedelta) -> None:
    """Until every rank has connected to every other: one that is done at once would hang up on one that still connects."""
    if store.add("ranks", 1) == world:
        store.set("all", "1")
    store.wait(["all"], limit)


def _find(module: str, file: str, name: str) -> Any:
    """The function itself; its module is imported by name, or from its file where the name leads nowhere."""
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _forget() -> None:
    """Drop what torch remembers by mesh: an equal mesh of the next call has other process groups."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()
        for module in [sys.modules[name] for name in sys.modules if name.startswith("torch.distributed.tensor.")]:
            _empty(module)
    gc.collect()


_CACHED = type(functools.cache(lambda: None))


def _empty(module: Any) -> None:
    """Empty the caches of a module's functions and methods, and its dictionaries of plans: they hold meshes, and a mesh its
    process groups, whose threads wake up a hundred times a second."""
    values = list(vars(module).values())
    methods = [method for kind in values if isinstance(kind, type) for method in vars(kind).values()]
    for value in (*values, *(getattr(method, "__func__", method) for method in methods)):
        if isinstance(value, _CACHED):
            value.cache_clear()
    for name, value in vars(module).items():
        if name.endswith("_cache") and isinstance(value, dict):
            value.clear()
