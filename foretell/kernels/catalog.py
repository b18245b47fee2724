"""The training kernels by name."""

from __future__ import annotations

from foretell.errors import UnknownName
from foretell.kernels.gated import GEGLU, GEGLU_TANH, SWIGLU
from foretell.kernels.kernel import TrainingKernel
from foretell.kernels.layer_norm import ADD_LAYER_NORM, LAYER_NORM
from foretell.kernels.rms_norm import ADD_RMS_NORM, RMS_NORM
from foretell.kernels.rotary import ROTARY

_ALL = (RMS_NORM, ADD_RMS_NORM, LAYER_NORM, ADD_LAYER_NORM, SWIGLU, GEGLU, GEGLU_TANH, ROTARY)
KERNELS: dict[str, TrainingKernel] = {one.name: one for one in _ALL}


def find(name: str) -> TrainingKernel:
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS)
    return KERNELS[name]
