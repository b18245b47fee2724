"""Found by Python before the script runs: puts everything back as it was, and watches from the moment torch is imported."""

import contextlib
import importlib
import importlib.util
import os
import sys
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
        path = os.path.join(os.path.dirname(_HERE), "hooks.py")
        spec = importlib.util.spec_from_file_location("_foretell_watch", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["_foretell_watch"] = module
        spec.loader.exec_module(module)
        module.begin(given)


def _as_it_was() -> None:
    """Paths and variables as the user had them, and the sitecustomize that would have been found."""
    sys.path[:] = [one for one in sys.path if os.path.abspath(one) != _HERE]
    before = os.environ.pop("FORETELL_WATCH_PATH", None)
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before
    mine = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")  # the user's own, if there is one
    except ImportError:
        if mine is not None:
            sys.modules["sitecustomize"] = mine


_given = os.environ.pop("FORETELL_WATCH", "")
if _given:
    _as_it_was()
    if "torch" in sys.modules:
        _begin(_given)
    else:
        sys.meta_path.insert(0, _AfterTorch(_given))  # type: ignore[arg-type]
