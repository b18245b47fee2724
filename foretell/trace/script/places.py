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

from foretell.trace.load.model import is_users


@dataclass
class Places:
    """What was called → the file and line of the script that led there, the first time."""

    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    direct: dict[str, bool] = field(default_factory=dict)
    """Whether that line itself calls it, and not a library in between."""
    loaders: list[tuple[int, int, tuple[str, int], bool]] = field(default_factory=list)
    """Loader, its data, where it was made, and whether that line does it itself."""
    _frames: list[dict[str, Any]] = field(default_factory=list)
    """Variables that the script has where its optimizer is made."""

    def note(self, what: str) -> None:
        frame, direct = _users(sys._getframe(2))
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
        start = DataLoader.__init__

        def made(loader: Any, *args: Any, **kwargs: Any) -> None:
            frame, direct = _users(sys._getframe(1))
            start(loader, *args, **kwargs)
            if frame is not None:
                self.loaders.append((id(loader), id(loader.dataset), (frame.f_code.co_filename, frame.f_lineno), direct))

        yield DataLoader, "__init__", made
        yield torch.autograd, "backward", noted(torch.autograd.backward, "backward")

    def note_loader(self, loader: int, data: int) -> None:
        """The loader that gave the first batch: a library may have made it anew from the script's."""
        same = [one for one in self.loaders if one[0] == loader] + [one for one in self.loaders if one[1] == data]
        best = next((one for one in same if one[3]), same[0] if same else None)
        if best is not None:
            self.lines["loader"], self.direct["loader"] = best[2], best[3]

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


def _users(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The innermost frame of the user's own, and whether nothing but PyTorch is between."""
    direct = True
    while frame is not None and not is_users(frame.f_code.co_filename):
        direct = direct and _is_torchs(frame.f_code.co_filename)
        frame = frame.f_back
    return frame, direct


def _is_torchs(file: str) -> bool:
    return file.startswith(str(torch.__path__[0])) or file.startswith("<") or "/foretell/trace/" in file
