"""Every generator a step may draw from, so that a resumed run draws what the other would have drawn."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def state(device: torch.device) -> dict[str, Any]:
    """Tensors and plain values, as a checkpoint keeps them."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_state(kept: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, gauss = kept["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = kept["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(kept["torch"])
    if kept["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(kept["device"], device)
