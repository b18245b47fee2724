"""Where a module of the zoo is: its name is short and its own, the folder says what kind of model it is."""

from __future__ import annotations

import pkgutil
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent


@cache
def folders() -> dict[str, str]:
    """Module of the zoo → its folder; ValueError where two folders have one of the same name."""
    found: dict[str, str] = {}
    for folder in sorted(path.name for path in FOLDER.iterdir() if (path / "__init__.py").is_file() and path.name != "listing"):
        for module in pkgutil.iter_modules([str(FOLDER / folder)]):
            if module.name in found:
                raise ValueError(f"zoo: {module.name}.py is in {found[module.name]}/ and in {folder}/")
            found[module.name] = folder
    return found


def path_of(module: str) -> Path:
    """Its file."""
    return FOLDER / folders()[module] / f"{module}.py"


def import_path(module: str) -> str:
    """What Python imports it as."""
    return f"foretell.zoo.{folders()[module]}.{module}"
