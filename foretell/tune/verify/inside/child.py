"""A process that runs one file's module: `python -m foretell.tune.verify.inside.child`, forked where a server is (`process.py`).

    parent ── a command and raw bytes on a socket ──►  this
           ◄── a reply and raw bytes ───────────────
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretell.tune.verify import wire
from foretell.tune.verify.inside import confine, graph, loops, profiled, training, triton_kernels, watching
from foretell.tune.verify.inside.calls import Caller, outputs_of, raw_of

PRELOAD = ("foretell.tune.verify.inside.child", "numpy", watching.LAZY)
Reply = tuple[dict[str, Any], list[bytes]]
_write, _read = wire.write, wire.read


class KernelWorker:
    """Commands by name."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.device: str = settings["device"]
        self.caller = Caller(self.device)
        self.loop = loops.Loop(self.caller)
        self.watch: watching.Watch | None = None
        self.code = types.ModuleType("candidate")
        self.made: Callable[[], nn.Module] | None = None

    def answer(self, asked: Mapping[str, Any], blobs: Sequence[bytes]) -> Reply:
        what = asked["do"]
        if what == "call":
            return self.caller.call(asked, blobs)
        if what == "again":
            return self.caller.again()
        if what == "state":
            return self.caller.state()
        if what == "set_state":
            self.caller.set_state(asked["state"], blobs)
            return {}, []
        if what == "noted":
            return {"noted": self.watch.told() if self.watch else {}, "memory": self._memory()}, []
        if what in ("load", "make"):
            return self._load(asked) if what == "load" else self._make(asked)
        return self._seldom(what, asked, blobs)

    def _seldom(self, what: str, asked: Mapping[str, Any], blobs: Sequence[bytes]) -> Reply:
        if what == "describe":
            return self._describe(asked)
        if what == "ops":
            return {"ops": self._ops(asked, blobs)}, []
        if what == "graph":
            assert self.caller.module is not None
            return {"graph": graph.graph_of(self.caller.module, self.caller.arguments(asked, blobs))}, []
        if what == "profile":
            assert self.caller.module is not None
            return {"profile": profiled.profile_of(self.caller.module, self.caller.arguments(asked, blobs), self.device)}, []
        if what == "train":
            assert self.caller.module is not None
            return {"losses": [one.hex() for one in training.losses(self.caller.module, asked, blobs, self.device)]}, []
        if what == "loop":
            return self.loop.prepare(asked, blobs)
        if what == "go":
            return self.loop.run()
        if what == "look":
            return self.loop.look(asked["places"])
        if what == "kernels":
            return triton_kernels.answer(asked, lambda: self.caller.call(asked, blobs))
        raise ValueError(f"unknown command {what}")

    def _load(self, asked: Mapping[str, Any]) -> Reply:
        """Run the file; what it leaves behind is noted from here on."""
        watching.preload()
        folder = tempfile.mkdtemp(prefix="kernel-")
        path = os.path.join(folder, f"{asked['name']}.py")
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(asked["text"])
        os.environ.update(TRITON_CACHE_DIR=os.path.join(folder, "triton"), TORCHINDUCTOR_CACHE_DIR=os.path.join(folder, "inductor"))
        os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        os.chdir(folder)
        if asked.get("watched"):
            self.watch = watching.Watch()
        self.code.__file__ = path
        sys.modules["candidate"] = self.code
        exec(compile(asked["text"], path, "exec"), self.code.__dict__)
        return {}, []

    def _make(self, asked: Mapping[str, Any]) -> Reply:
        """A module of the class, on the device."""
        torch.manual_seed(asked["seed"])
        random.seed(asked["seed"])
        kind = getattr(self.code, asked["class"], None)
        if kind is None:
            raise LookupError(f"the file has no class {asked['class']}")
        module = kind(*asked["arguments"])
        if not isinstance(module, nn.Module):
            raise LookupError(f"{asked['class']} is no torch.nn.Module")
        self.caller.module = module.to(self.device, getattr(torch, asked["dtype"])) if asked.get("dtype") else module.to(self.device)
        self.caller.buffers, self.caller.held = [], []
        return self.caller.state()

    def _describe(self, asked: Mapping[str, Any]) -> Reply:
        """What a task gives its module: arguments of the constructor, and inputs."""
        torch.manual_seed(asked["seed"])
        random.seed(asked["seed"])
        given = self.code.__dict__.get("get_init_inputs", list)()
        arguments = list(given) if isinstance(given, list | tuple) else [given]
        json.dumps(arguments)
        inputs = list(self.code.__dict__["get_inputs"]())
        raw = [raw_of(one) if isinstance(one, Tensor) else None for one in inputs]
        specs = [one.header() if one is not None else {"value": value} for one, value in zip(raw, inputs, strict=True)]
        json.dumps(specs)
        return {"arguments": arguments, "inputs": specs}, [one.data for one in raw if one is not None]

    def _ops(self, asked: Mapping[str, Any], blobs: Sequence[bytes]) -> list[str]:
        """Names of the aten ops of a forward."""
        from torch.utils._python_dispatch import TorchDispatchMode

        found: list[str] = []

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                found.append(function.overloadpacket._qualified_op_name.replace("::", "."))
                return function(*args, **(kwargs or {}))

        arguments = self.caller.arguments(asked, blobs)
        assert self.caller.module is not None
        with torch.no_grad(), Names():
            outputs_of(self.caller.module(*arguments))
        return found

    def _memory(self) -> int:
        """Bytes that the device's allocator has given out; of a CPU the parent looks itself."""
        if self.device == "cpu":
            return 0
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())


def serve(handle: int, settings: Mapping[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    worker = KernelWorker(settings)
    if settings.get("memory_share") and settings["device"] != "cpu":
        torch.cuda.set_per_process_memory_fraction(settings["memory_share"])
    while True:
        try:
            message = _read(handle)
        except wire.PeerGone:
            return
        header = message.header
        try:
            reply, blobs = worker.answer(header, message.blobs)
        except Exception as error:
            reply, blobs = {"error": type(error).__name__, "text": _said(error), "cuda": _is_lost(error)}, []
        _write(handle, {**reply, "number": header["number"]}, blobs)


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]


def _is_lost(error: BaseException) -> bool:
    """Whether the device's context is gone."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def main() -> None:
    handle, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    connection = socket.socket(fileno=os.dup(handle))
    _, (status,), _, _ = socket.recv_fds(connection, 1, 1)
    connection.close()

    def told(message: dict[str, Any]) -> None:
        if "started" in message:
            os.close(handle)
        os.write(status, json.dumps(message).encode() + b"\n")

    def work() -> None:
        os.close(status)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        sys.dont_write_bytecode = True
        serve(handle, settings)

    confine.caged(work, told, settings["limits"])


if __name__ == "__main__":
    main()
