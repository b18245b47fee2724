"""Lines of a script where it makes its optimizer and its loader, and where it calls backward and steps: for those who write changes into it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from foretell.trace.load import is_users


@dataclass
class Places:
    """What was called → the file and line of the script that led there, the first time."""

    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    direct: dict[str, bool] = field(default_factory=dict)
    """Whether that line itself calls it, and not a library in between."""
    _frames: list[dict[str, Any]] = field(default_factory=list)
    """Variables that the script has where its optimizer is made."""

    def note(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        direct = True
        while frame is not None and not is_users(frame.f_code.co_filename):
            direct = direct and _is_torchs(frame.f_code.co_filename)
            frame = frame.f_back
        if frame is None or what in self.lines:
            return
        self.lines[what], self.direct[what] = (frame.f_code.co_filename, frame.f_lineno), direct
        if what == "optimizer":
            self._frames = [dict(frame.f_locals), *([dict(frame.f_globals)] if frame.f_locals is not frame.f_globals else [])]

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        def noted(plain: Any, what: str) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.note(what)
                return plain(*args, **kwargs)

            return call

        yield Optimizer, "__init__", noted(Optimizer.__init__, "optimizer")
        yield DataLoader, "__init__", noted(DataLoader.__init__, "loader")
        yield torch.autograd, "backward", noted(torch.autograd.backward, "backward")

    def expression(self, module: nn.Module) -> str:
        """How the script names a module where it makes its optimizer: `model`, `self.net`; empty where it does not."""
        for names in self._frames:
            found = [name for name, value in names.items() if value is module]
            if found:
                return min(found, key=len)
            for name, value in names.items():
                if isinstance(value, nn.Module) or name in ("self", "trainer", "runner"):
                    inside = next((key for key, one in {**vars(value), **vars(value).get("_modules", {})}.items() if one is module), None)
                    if inside is not None:
                        return f"{name}.{inside}"
        return ""

    def forget(self) -> None:
        self._frames = []


def _is_torchs(file: str) -> bool:
    return file.startswith(str(torch.__path__[0])) or file.startswith("<") or "/foretell/trace/" in file
