"""Triton kernels of a candidate: counted, left out, or compiled for a device that is not there. Triton is imported where it is used.

A kernel that is launched and whose result nobody uses is a decoy: with its launches left out the answer stays the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

Reply = tuple[dict[str, Any], list[bytes]]
COUNT, LEAVE_OUT, COMPILE = "count", "leave out", "compile"
_POINTERS = {
    "float64": "*fp64", "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int64": "*i64", "int32": "*i32", "int16": "*i16",
    "int8": "*i8", "uint8": "*u8", "bool": "*i1", "float8_e4m3fn": "*fp8e4nv", "float8_e5m2": "*fp8e5",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_ALIGNED = 16
TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}


def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def answer(asked: Mapping[str, Any], call: Callable[[], Reply]) -> Reply:
    """The reply of one call with what its kernels were."""
    launches: list[dict[str, Any]] = []
    with _launches(asked["how"], launches, asked.get("target", "sm_90")):
        try:
            reply, blobs = call()
        except Exception as error:
            if asked["how"] == COUNT:
                raise
            return {"launches": launches, "raised": type(error).__name__}, []
    return {**reply, "launches": launches}, blobs


@contextlib.contextmanager
def _launches(how: str, told: list[dict[str, Any]], target: str) -> Iterator[None]:
    """Every launch is told; with `LEAVE_OUT` and `COMPILE` none takes place."""
    kinds = _kinds()
    before = [kind.run for kind in kinds]

    def made(run: Any) -> Any:
        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            row: dict[str, Any] = {"kernel": getattr(getattr(self, "fn", self), "__name__", "?")}
            told.append(row)
            if how == COMPILE:
                row |= _compiled(self, args, kwargs, target)
            return run(self, *args, **kwargs) if how == COUNT else None

        return launch

    for kind, run in zip(kinds, before, strict=True):
        kind.run = made(run)
    try:
        yield
    finally:
        for kind, run in zip(kinds, before, strict=True):
            kind.run = run


def _kinds() -> list[Any]:
    if not installed():
        return []
    from triton.runtime.jit import JITFunction

    found: list[Any] = [JITFunction]
    if os.environ.get("TRITON_INTERPRET") == "1":
        found.append(importlib.import_module("triton.runtime.interpreter").InterpretedFunction)
    return found


# ---------------------------------------------------------------- compiling for a device that is not there


def _compiled(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Registers, bytes spilled to local memory and shared memory of one launch on `target`, or why it does not compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    named = dict(zip(function.arg_names, args, strict=False)) | {key: value for key, value in kwargs.items() if key in function.arg_names}
    fixed = {function.arg_names[place] for place in function.constexprs}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        name, value = parameter.name, named.get(parameter.name, parameter.default)
        if name in fixed or value is None:
            signature[name], constants[(place,)] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        if _divisible(value):
            attributes[(place,)] = [["tt.divisibility", _ALIGNED]]
    options = {key: kwargs[key] for key in _OPTIONS if key in kwargs}
    try:
        made = compile(ASTSource(function, signature, constants, attributes), target=GPUTarget("cuda", TARGETS[target], 32), options=options)
    except Exception as error:
        return {"problem": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
    return {"shared_bytes": int(made.metadata.shared), **_resources(made.asm["cubin"])}


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return "fp32"


def _divisible(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % _ALIGNED == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % _ALIGNED == 0


def _resources(cubin: bytes) -> dict[str, int]:
    """What Triton's own cuobjdump says of a compiled kernel."""
    triton = importlib.import_module("triton")
    tool = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
    path = Path("kernel.cubin")
    path.write_bytes(cubin)
    try:
        said = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, timeout=60, check=False).stdout
    except OSError:
        return {}
    return resources_in(said)


def resources_in(text: str) -> dict[str, int]:
    """`REG:32 STACK:8 SHARED:0 LOCAL:0` as numbers."""
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return {name: found[key] for key, name in (("REG", "registers"), ("STACK", "spilled_bytes")) if key in found}
