"""foretell: know before you run. Give it any PyTorch model and hardware; it predicts whether a training step fits.

    foretell.fit("llama3-8b", hardware="8xH100").fits

Importing this imports no torch; `fit` is fetched when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretell.api import fit as fit

__version__ = "0.1.0"

__all__ = ["__version__", "fit", "lightning_callback", "trainer_callback", "watch"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from foretell import api

        return getattr(api, name)
    raise AttributeError(f"module 'foretell' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
