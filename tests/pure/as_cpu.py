"""A user's file that asks for a GPU, really run on this CPU: every device it names is this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode

from foretell.trace.sandbox.blame import is_users
from foretell.trace.sandbox.devices import device_is_there, is_elsewhere
from foretell.trace.sandbox.wrappers import seen_through


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if is_elsewhere(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def here() -> Iterator[None]:
    with device_is_there(None, is_users), seen_through(str), _OnCpu():
        yield
