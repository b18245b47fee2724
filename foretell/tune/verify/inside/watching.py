"""What a process that runs a kernel notes beside its results: what is opened and started, settings, functions that were replaced."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from typing import Any

import torch

EVENTS = {
    "open": "file", "os.listdir": "file", "os.scandir": "file", "subprocess.Popen": "process", "os.fork": "process", "os.forkpty": "process",
    "os.posix_spawn": "process", "os.exec": "process", "os.system": "process", "socket.connect": "network", "socket.bind": "network",
    "socket.getaddrinfo": "network", "socket.sendto": "network", "ctypes.dlopen": "library", "os.kill": "process",
}  # fmt: skip
_MODULES = (
    "torch", "torch.cuda", "torch.nn.functional", "torch.testing", "torch.autograd", "time", "builtins", "statistics", "os", "json",
    "hashlib", "triton.testing",
)  # fmt: skip
LAZY = "torch._dynamo"
"""Imported when a first optimizer or autograd function asks for it, and then it replaces functions of torch itself."""
_CLASSES = (torch.Tensor, torch.cuda.Event, torch.cuda.Stream, torch.nn.Module)
_MOST = 64
_PERSISTING_L2 = 6
"""CUDA's number of that limit."""


class Watch:
    """From its making on."""

    def __init__(self) -> None:
        self._events: list[tuple[str, str]] = []
        self._functions = _functions()
        self._settings = settings()
        events, kinds, most = self._events, dict(EVENTS), _MOST

        def hook(event: str, arguments: Any) -> None:
            kind = kinds.get(event)
            if kind is not None and len(events) < most:
                events.append((kind, str(arguments[0])[:200] if arguments else ""))

        sys.addaudithook(hook)  # it cannot be taken off again

    def told(self) -> dict[str, Any]:
        """What happened since the last time, which then begins anew."""
        events = list(self._events)
        self._events.clear()
        found = _functions()
        replaced = [name for name, function in self._functions.items() if found.get(name) is not function]
        now = settings()
        changed = {name: [before, now[name]] for name, before in self._settings.items() if now[name] != before}
        return {"events": events, "replaced": replaced[:8], "settings": changed, "threads": threading.active_count()}


def _functions() -> dict[str, Any]:
    """Where the functions are that measure, wait and compare."""
    found: dict[str, Any] = {}
    for name in _MODULES:
        module = sys.modules.get(name)
        if module is not None:
            found |= {f"{name}.{key}": value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    for kind in _CLASSES:
        found |= {f"{kind.__module__}.{kind.__qualname__}.{key}": value for key, value in vars(kind).items() if callable(value)}
    return found


def settings() -> dict[str, str]:
    """Global settings of torch that change what is computed, or how fast."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "default dtype": str(torch.get_default_dtype()), "float32 matmul precision": torch.get_float32_matmul_precision(),
        "TF32 of matmul": str(matmul.allow_tf32), "TF32 of cuDNN": str(cudnn.allow_tf32), "cudnn.benchmark": str(cudnn.benchmark),
        "cudnn.deterministic": str(cudnn.deterministic), "bf16 reduced-precision reduction": str(matmul.allow_bf16_reduced_precision_reduction),
        "fp16 reduced-precision reduction": str(matmul.allow_fp16_reduced_precision_reduction), "threads": str(torch.get_num_threads()),
        "grad mode": str(torch.is_grad_enabled()), "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")), "default device": str(torch.get_default_device()),
        "persisting L2 bytes": _persisting_l2(),
        "flush denormal": str(bool(torch.tensor(1e-40) * 1.0 == 0)),
    }  # fmt: skip


def _persisting_l2() -> str:
    """What of a GPU's second-level cache is set aside for data that stays; empty for none."""
    if not torch.cuda.is_initialized() or torch.version.cuda is None:
        return ""
    found = ctypes.c_size_t()
    try:
        library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return ""
    library.cudaDeviceGetLimit(ctypes.byref(found), _PERSISTING_L2)
    return str(found.value) if found.value else ""


def preload() -> None:
    """Whatever would be imported later, and would look like the candidate's doing."""
    for name in (*_MODULES, LAZY):
        if not name.startswith("triton"):
            importlib.import_module(name)
