"""The device that is asked about, as the user's code sees it, on a machine that may have none.

    x.cuda(), .to("cuda"), zeros(device="cuda")    the same tensor, or one like all others: where it lives is decided outside
    torch.cuda.is_available()                      yes, where the user's own code asks; libraries get this machine's answer
    torch.cuda.synchronize(), Stream, Event, ...   do nothing
    torch.autocast("cuda"), torch.cuda.amp         autocast of the traced step, in fp16 unless it names a dtype

`Elsewhere` rewrites devices at the dispatcher; what PyTorch refuses before it gets there is patched here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from foretell.trace.sandbox.replaced import replaced

ACCELERATORS = ("cuda", "xpu", "mps", "hip")
MEMORY = 80 * 2**30
"""What the user's code is told that the device has; the answer does not rest on it."""
_CPU = torch.device("cpu")

IsUsers = Callable[[str], bool]


def is_elsewhere(device: Any) -> bool:
    """Whether it names an accelerator: `cuda`, `cuda:1`, 0, torch.device(...)."""
    if isinstance(device, torch.device):
        return device.type in ACCELERATORS
    if isinstance(device, str):
        return device.partition(":")[0] in ACCELERATORS
    return isinstance(device, int) and not isinstance(device, bool)


def here(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `.to(...)` with an accelerator replaced by the CPU."""
    if args and is_elsewhere(args[0]):
        args = (_CPU, *args[1:])
    if is_elsewhere(kwargs.get("device")):
        kwargs = {**kwargs, "device": _CPU}
    return args, kwargs


@contextmanager
def device_is_there(capability: tuple[int, int] | None, is_users: IsUsers) -> Iterator[None]:
    """Until the end of the block, code may move things to the device and talk to it."""
    with replaced((*_tensors(), *_of_torch_cuda(capability or (9, 0), is_users), *_of_accelerator(is_users), *_others())):
        yield


def _tensors() -> Iterator[tuple[Any, str, Any]]:
    to, module_to, as_type = Tensor.to, nn.Module.to, Tensor.type

    def move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if (args and is_elsewhere(args[0])) or (kwargs and is_elsewhere(kwargs.get("device"))):
            args, kwargs = here(args, kwargs)
        return to(tensor, *args, **kwargs)

    def move_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args, kwargs = here(args, kwargs)
        return module_to(module, *args, **kwargs)

    def cast(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        elif isinstance(dtype, type) and dtype.__module__ == "torch.cuda":
            dtype = f"torch.{dtype.__name__}"
        return as_type(tensor, dtype, *args, **kwargs) if dtype is not None else as_type(tensor)

    def same(value: Any, *args: Any, **kwargs: Any) -> Any:
        return value

    yield Tensor, "to", move
    yield nn.Module, "to", move_module
    yield Tensor, "type", cast
    yield Tensor, "cuda", same
    yield nn.Module, "cuda", same
    yield Tensor, "pin_memory", same
    yield Tensor, "record_stream", lambda *_: None


def _giving(value: Any) -> Callable[..., Any]:
    """A function of its own each time: Dynamo's rules refuse one function under two names."""
    return lambda *_, **__: value


class _Stream:
    """A stream or an event: everything is in order anyway."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _giving(None)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Stream()


_PlainGenerator = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _PlainGenerator)


class _Generator(metaclass=_AnyGenerator):
    """Makes PyTorch's own, for the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _PlainGenerator(_CPU if is_elsewhere(device) else device)


_QUIET = (
    "_lazy_init", "init", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "reset_max_memory_allocated",
    "reset_accumulated_memory_stats", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state",
    "set_per_process_memory_fraction", "set_stream", "_sleep",
)  # fmt: skip
_ZEROS = (
    "current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
    "initial_seed", "utilization",
)  # fmt: skip


def _of_torch_cuda(capability: tuple[int, int], is_users: IsUsers) -> Iterator[tuple[Any, str, Any]]:
    cuda = torch.cuda
    for name in _QUIET:
        yield cuda, name, _giving(None)
    for name in _ZEROS:
        yield cuda, name, _giving(0)
    about = SimpleNamespace(
        name="CUDA device", major=capability[0], minor=capability[1], total_memory=MEMORY, multi_processor_count=132,
        is_integrated=False, is_multi_gpu_board=False, warp_size=32,
    )  # fmt: skip
    counted, available = cuda.device_count, cuda.is_available

    def users_ask() -> bool:
        return is_users(sys._getframe(2).f_code.co_filename)

    yield cuda, "is_available", lambda: users_ask() or available()
    yield cuda, "device_count", lambda: 1 if users_ask() else counted()
    yield cuda, "get_device_name", lambda *_: about.name
    yield cuda, "get_device_properties", lambda *_: about
    yield cuda, "get_device_capability", lambda *_: capability
    yield cuda, "mem_get_info", lambda *_: (MEMORY, MEMORY)
    yield cuda, "memory_stats", lambda *_, **__: {}
    yield cuda, "memory_summary", lambda *_, **__: ""
    yield cuda, "is_bf16_supported", lambda *_, **__: capability >= (8, 0)
    yield cuda, "get_rng_state", lambda *_: torch.get_rng_state()
    for name in ("Stream", "Event", "ExternalStream", "stream", "device", "device_of"):
        yield cuda, name, _Stream
    yield cuda, "current_stream", _Stream
    yield cuda, "default_stream", _Stream
    for name in ("range_push", "range_pop", "mark"):
        yield cuda.nvtx, name, _giving(None)
    for name in ("_cuda_clearCublasWorkspaces", "_cuda_emptyCache", "_cuda_synchronize"):  # builds for CUDA have them, and libraries call them
        yield torch._C, name, _giving(None)
    yield cuda, "is_current_stream_capturing", lambda: False
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):  # asks a stream of the real device
        yield torch.optim.Optimizer, name, _giving(None)
    for name in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"):
        yield cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor")


def _of_accelerator(is_users: IsUsers) -> Iterator[tuple[Any, str, Any]]:
    """`torch.accelerator`, which newer scripts ask instead of `torch.cuda`."""
    plain = torch.accelerator
    current, available, counted = plain.current_accelerator, plain.is_available, plain.device_count

    def users_ask() -> bool:
        return is_users(sys._getframe(2).f_code.co_filename)

    yield plain, "current_accelerator", lambda check_available=False: torch.device("cuda") if users_ask() else current(check_available)
    yield plain, "is_available", lambda: users_ask() or available()
    yield plain, "device_count", lambda: 1 if users_ask() else counted()
    for name in ("synchronize", "empty_cache", "empty_host_cache", "set_device_index", "set_device_idx", "set_stream", "reset_peak_memory_stats",
                 "reset_accumulated_memory_stats"):  # fmt: skip
        yield plain, name, _giving(None)
    for name in ("current_device_index", "current_device_idx", *_ZEROS[1:-2]):
        yield plain, name, _giving(0)
    yield plain, "current_stream", _Stream
    yield plain, "device_index", _Stream
    yield plain, "get_memory_info", lambda *_: (MEMORY, MEMORY)
    yield plain, "memory_stats", lambda *_, **__: {}


def _others() -> Iterator[tuple[Any, str, Any]]:
    start = torch.autocast.__init__

    def autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type in ACCELERATORS:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        start(self, device_type, dtype, *args, **kwargs)

    yield torch.autocast, "__init__", autocast
    yield torch, "Generator", _Generator
    yield torch, "get_default_device", lambda: _CPU
    default, typed = torch.set_default_device, torch.set_default_tensor_type
    yield torch, "set_default_device", lambda device: None if is_elsewhere(device) else default(device)

    def default_type(kind: Any) -> None:
        if isinstance(kind, str):
            typed(kind.replace("torch.cuda.", "torch."))

    yield torch, "set_default_tensor_type", default_type
