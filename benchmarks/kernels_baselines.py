"""What a training kernel has to beat: its reference in every way torch runs it, torch's own fused op, and Liger's where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.kernels import gated
from foretell.kernels.kernel import TrainingKernel

LIGER_NAME = "Liger"
Made = Callable[[], Callable[..., Any]]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, rms(total, weight, eps)


def half_rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As models of a hub do it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half_rotated(q) * sin, k * cos + half_rotated(k) * sin


FUSED: dict[str, tuple[str, Callable[..., Any]]] = {
    "rms_norm": ("F.rms_norm", rms), "add_rms_norm": ("add, F.rms_norm", add_rms), "rotary": ("as on hubs", turned),
}  # fmt: skip
"""Other ways of the same in torch, beside the reference."""


def baselines_of(kernel: TrainingKernel, *, compile: bool = True, on_cpu: bool = False) -> Iterator[tuple[str, Made]]:
    """Each by its name, to be made when its turn comes."""
    ways = [("eager", kernel.reference), *([FUSED[kernel.name]] if kernel.name in FUSED else [])]
    for label, function in ways:
        yield label, lambda function=function: function
    if compile:
        for label, function in ways:
            name = "" if label == "eager" else f" of {label}"
            yield f"torch.compile{name}", lambda function=function: compiled(function, None, on_cpu)
            yield f"max-autotune-no-cudagraphs{name}", lambda function=function: compiled(function, "max-autotune-no-cudagraphs", on_cpu)
    if kernel.name in LIGER and importlib.util.find_spec("liger_kernel") is not None:
        yield LIGER_NAME, LIGER[kernel.name]


def compiled(function: Callable[..., Any], mode: str | None, on_cpu: bool) -> Callable[..., Any]:
    if on_cpu:
        return torch.compile(function, backend="aot_eager", dynamic=False)
    return torch.compile(function, mode=mode, dynamic=False)


# ---------------------------------------------------------------- Liger's


def _liger(file: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{file}"), name)


def _liger_rms() -> Callable[..., Any]:
    function = _liger("rms_norm", "LigerRMSNormFunction")
    return lambda x, weight, eps: function.apply(x, weight, eps, 0.0, "llama", False)


def _liger_add_rms() -> Callable[..., Any]:
    function = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")

    def call(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, total = function.apply(x, residual, weight, eps, 0.0, "llama", False)
        return total, y

    return call


def _liger_layer() -> Callable[..., Any]:
    function = _liger("layer_norm", "LigerLayerNormFunction")
    return lambda x, weight, bias, eps: function.apply(x, weight, bias, eps)


def _liger_gate(file: str, name: str) -> Made:
    """It writes its gradients over gate and up, so that it needs inputs of its own."""

    def make() -> Callable[..., Any]:
        function = _liger(file, name)
        return lambda gate, up, activation: function.apply(gate, up)

    return make


def _liger_rotary() -> Callable[..., Any]:
    function = _liger("rope", "LigerRopeFunction")
    return lambda q, k, cos, sin: function.apply(q, k, cos, sin)


LIGER: dict[str, Made] = {
    "rms_norm": _liger_rms, "add_rms_norm": _liger_add_rms, "layer_norm": _liger_layer,
    gated.SWIGLU.name: _liger_gate("swiglu", "LigerSiLUMulFunction"), gated.GEGLU_TANH.name: _liger_gate("geglu", "LigerGELUMulFunction"),
    "rotary": _liger_rotary,
}  # fmt: skip
"""By its functions of version 0.8; one that changed since raises, and is then no baseline."""
