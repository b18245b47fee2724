"""Found by Python before the script runs: puts everything back as it was, and watches from the moment torch is imported."""

import contextlib
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch:
    """Finds torch where it is, and begins to watch once it is imported: not before, since scripts set variables first."""

    def __init__(self, given: str) -> None:
        self.given = given

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        found = importlib.util.find_spec("torch")
        if found is None or found.loader is None:
            return found
        plain = found.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            _begin(self.given)

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


def _begin(given: str) -> None:
    with contextlib.suppress(Exception):  # a script that is not watched is better than one that does not run
        package = sys.modules["_foretell_watch"] = ModuleType("_foretell_watch")
        package.__path__ = [os.path.dirname(_HERE)]  # its files import each other; nothing of foretell is needed
        importlib.import_module("_foretell_watch.hooks").begin(given)


def _launches() -> bool:
    """Whether this Python starts the script's processes: those are watched, and find what this one found."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    if words[:1] == ["-m"]:
        return words[1:2] in (["torch.distributed.run"], ["torch.distributed.launch"], ["accelerate.commands.launch"])
    return os.path.basename(words[0]) in ("torchrun", "accelerate", "accelerate-launch") if words else False


def _ends_with_launcher() -> None:
    """On Linux: a launcher that is killed leaves no process behind."""
    if sys.platform.startswith("linux"):
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _variables_as_they_were() -> None:
    os.environ.pop("FORETELL_WATCH", None)
    before = os.environ.pop("FORETELL_WATCH_PATH", None)
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before


def _as_it_was() -> None:
    """Paths as the user had them, and the sitecustomize that would have been found."""
    sys.path[:] = [one for one in sys.path if os.path.abspath(one) != _HERE]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")  # the user's own, if there is one
    except ImportError:
        if mine is not None:
            sys.modules["sitecustomize"] = mine


_given = os.environ.get("FORETELL_WATCH", "")
if _given and _launches():
    _as_it_was()
elif _given:
    _variables_as_they_were()
    _as_it_was()
    if '"launched": true' in _given:
        with contextlib.suppress(Exception):
            _ends_with_launcher()
    if "torch" in sys.modules:
        _begin(_given)
    else:
        sys.meta_path.insert(0, _AfterTorch(_given))  # type: ignore[arg-type]
