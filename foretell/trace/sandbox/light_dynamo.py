"""torch._dynamo as far as a step needs it that nothing compiles: importing all of it takes as long as importing torch.

torch asks for five things of it in such a step: its settings, when a fake tensor mode is made; `disable` and `graph_break` around
optimizers and checkpoints, which do nothing where nothing is compiled; that rules which were not read be forgotten, when processes
join; and names for where fake numbers come from, which only symbolic shapes read. Whoever asks for anything else, or imports a file of
it, gets all of it, or is `AllOfDynamoRefused` where that would come at a bad time.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

NAME, CONFIG, SOURCE = "torch._dynamo", "torch._dynamo.config", "torch._dynamo.source"


class AllOfDynamoRefused(BaseException):
    """All of it is needed while a step is recorded, when torch's own functions are replaced: import it and begin again."""


_refuses: list[bool] = []


@contextmanager
def refusing() -> Iterator[None]:
    """While this lasts, nobody gets all of it."""
    _refuses.append(True)
    try:
        yield
    finally:
        _refuses.pop()


def install() -> None:
    """In place of torch._dynamo, for the rest of this process, which must be one that compiles nothing; where it is imported, that stays."""
    import torch

    if NAME in sys.modules:
        return
    folder = Path(torch.__file__).parent / "_dynamo"
    spec = importlib.util.spec_from_file_location(CONFIG, folder / "config.py")
    if spec is None or spec.loader is None or not (folder / "config.py").exists():
        return
    light = _Light(NAME)
    light.__path__ = [str(folder)]
    light.config = sys.modules[CONFIG] = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = light
    try:
        spec.loader.exec_module(light.config)
    except Exception:  # another release, whose settings need more of it
        for name in (NAME, CONFIG):
            sys.modules.pop(name, None)
        return
    torch._dynamo, light.source = light, sys.modules.setdefault(SOURCE, _Sources(SOURCE))
    sys.meta_path.insert(0, _FILES)


def disable(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """As a function and as a decorator with arguments: nothing is compiled, so nothing is kept from it."""
    return disable if function is None else function


def graph_break(*_: Any, **__: Any) -> None:
    """There is no graph."""


class _NoRules:
    """Of what may be compiled: none was read, so none is kept."""

    @staticmethod
    def clear_lru_cache() -> None:
        """When processes join: rules know of them then."""

    def __getattr__(self, name: str) -> Any:
        return getattr(whole().trace_rules, name)


class _Light(ModuleType):
    __path__: list[str]
    config: ModuleType
    source: ModuleType
    disable = staticmethod(disable)
    graph_break = staticmethod(graph_break)
    trace_rules = _NoRules()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(whole(), name)


@dataclass(frozen=True)
class ConstantSource:
    """A number that is in the code."""

    name: str


@dataclass(frozen=True)
class AttrSource:
    """What another one has."""

    base: Any
    member: str


class RandomValueSource:
    """None is made here; torch looks whether a source is one."""


class _Sources(ModuleType):
    ConstantSource, AttrSource, RandomValueSource = ConstantSource, AttrSource, RandomValueSource

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole()
        return getattr(sys.modules[SOURCE], name)


class _Files:
    """Finds files of torch._dynamo while the light one stands for it: all of it is imported first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        whole()
        known = sys.modules.get(name)
        if known is None:
            return None
        loader: Any = _Imported(known)
        found = importlib.machinery.ModuleSpec(name, loader)
        known.__spec__ = found  # else importlib takes the module's own, and runs its file once more
        return found


class _Imported:
    """The loader of a module that came with the whole."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


_FILES: Any = _Files()


def whole() -> ModuleType:
    """All of it, in the light one's place."""
    import torch

    if isinstance(sys.modules.get(NAME), _Light):
        if _refuses:
            raise AllOfDynamoRefused
        sys.meta_path.remove(_FILES)
        del sys.modules[NAME], sys.modules[SOURCE], torch._dynamo
        importlib.import_module(NAME)
    return sys.modules[NAME]
