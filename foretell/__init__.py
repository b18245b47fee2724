"""foretell: know before you run. Give it any PyTorch model and hardware; it predicts, plans, runs, and compares.

    foretell.fit("llama3-8b", hardware="8xH100").fits
    found = foretell.plan("llama3-8b", hardware="8xH100", global_batch=64)
    foretell.compare(foretell.run(found.plan, steps=200).folder)

A function for each command, with the command's options as keyword arguments. Importing this imports no torch; a function is fetched
when it is first asked for.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.api import advise as advise
    from foretell.api import compare as compare
    from foretell.api import fit as fit
    from foretell.api import hardware as hardware
    from foretell.api import lightning_callback as lightning_callback
    from foretell.api import load_plan as load_plan
    from foretell.api import plan as plan
    from foretell.api import probe as probe
    from foretell.api import prove as prove
    from foretell.api import report as report
    from foretell.api import run as run
    from foretell.api import trainer_callback as trainer_callback
    from foretell.api import verify as verify
    from foretell.api import watch as watch
    from foretell.api import zoo as zoo

__version__ = "0.1.0"

__all__ = [
    "__version__", "advise", "compare", "fit", "hardware", "lightning_callback", "load_plan", "plan", "probe", "prove", "report", "run",
    "trainer_callback", "verify", "watch", "zoo",
]  # fmt: skip

_ROOMS = ("hardware", "plan", "prove", "report", "zoo")
"""Packages of this one that are functions as well: the room's module is callable (docs/decisions/0011-rooms-that-are-verbs.md)."""


class _Verb(ModuleType):
    """A room that is called like its command."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _function(self.__name__.rpartition(".")[2])(*args, **named)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function(self.__name__.rpartition(".")[2]))


class _Package(ModuleType):
    """This one: a room among `_ROOMS` can be called from its import on."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and isinstance(value, ModuleType):
            value.__class__ = _Verb
        super().__setattr__(name, value)


def _function(name: str) -> Any:
    from foretell import api

    return getattr(api, name)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        return _function(name)
    raise AttributeError(f"module 'foretell' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
