"""The training kernels by name."""

from __future__ import annotations

from foretell.errors import UnknownName
from foretell.kernels.kernel import TrainingKernel
from foretell.kernels.layer_norm import ADD_LAYER_NORM, LAYER_NORM
from foretell.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM

KERNELS: dict[str, TrainingKernel] = {one.name: one for one in (RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ADD_LAYER_NORM)}


def find(name: str) -> TrainingKernel:
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS)
    return KERNELS[name]
