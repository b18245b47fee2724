"""What the package offers for watching from inside. Importing it does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from foretell.observe.inside import Watching


def watch(
    model: nn.Module, optimizer: Any = None, *, loss: Any = None, on: str = "auto", out: str | Path | None = None, predict: bool = True
) -> Watching:
    """A context around a training loop of yours: predicted beside measured on stderr, and a run folder.

        with foretell.watch(model, optimizer, loss=lambda output, batch: ...):
            for x, y in loader: ...

    `loss` is that of (output, batch) where the model returns none; without it everything is measured only.
    """
    from foretell.observe.inside import Watching

    return Watching(model, optimizer, loss=loss, on=on, out=out, predict=predict)


def lightning_callback(**options: Any) -> Any:
    """For `Trainer(callbacks=[foretell.lightning_callback()])`; options are those of `watch`."""
    from foretell.observe import inside

    return inside.lightning_callback(**options)


def trainer_callback(**options: Any) -> Any:
    """For `transformers.Trainer(callbacks=[foretell.trainer_callback()])`; options are those of `watch`."""
    from foretell.observe import inside

    return inside.trainer_callback(**options)
