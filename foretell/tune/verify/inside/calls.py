"""Calls of a module in the process that runs it: tensors out of bytes, a call, and everything the parent compares, as bytes again.

What is used here is taken from torch when this file is imported, before any code of the candidate's runs; so a candidate that
replaces `torch.allclose` or `torch.cuda.synchronize` replaces nothing here. What it could still reach the parent does not rely on.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foretell.tune.verify.wire import RawTensor

_Exact = Tensor
_type, _sleep, _digest = type, time.sleep, hashlib.blake2b
_synchronize = torch.cuda.synchronize
_grad, _is_floating, _seed = torch.autograd.grad, torch.is_floating_point, torch.manual_seed
_full = torch.full
_STREWN = 0x41
"""A byte; four of them are 12.08 in fp32."""
_DELAY_SECONDS = 0.004
"""Between a call's return and the second look at what it returned."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_of(raw: RawTensor, device: str, into: Tensor | None = None) -> Tensor:
    """A tensor with a storage of its own, or the same one with other values: there the pointer stays and no version counts up."""
    dtype = getattr(torch, raw.dtype)
    flat = torch.frombuffer(bytearray(raw.data), dtype=torch.uint8) if raw.data else torch.empty(0, dtype=torch.uint8)
    if into is None:
        storage = flat.to(device, copy=True)
        return torch.empty(0, dtype=dtype, device=device).set_(storage.untyped_storage(), raw.offset, raw.shape, raw.stride)  # type: ignore[call-overload]
    into.untyped_storage().copy_(flat.untyped_storage())
    return into


def bytes_of(tensor: Tensor) -> bytes:
    """The whole storage."""
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return bytes(storage.cpu().numpy().tobytes())


def raw_of(tensor: Tensor) -> RawTensor:
    """Its values, row by row."""
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    flat = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
    strides = [1]
    for size in reversed(plain.shape[1:]):
        strides.append(strides[-1] * max(1, size))
    stride = tuple(reversed(strides)) if plain.dim() else ()
    return RawTensor(name_of(tensor.dtype), tuple(tensor.shape), stride, 0, flat.numpy().tobytes())


def synchronize(device: str) -> None:
    if device != "cpu":
        _synchronize()


def outputs_of(found: Any) -> list[Any]:
    """Tensors of whatever a module returns, in order."""
    if isinstance(found, Mapping):
        return [one for value in found.values() for one in outputs_of(value)]
    if isinstance(found, list | tuple):
        return [one for value in found for one in outputs_of(value)]
    return [found]


@contextlib.contextmanager
def poisoned(wanted: bool) -> Iterator[None]:
    """torch.empty gives NaN, and the largest integer: what is not written shows."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Caller:
    """One module, and the tensors of its calls that are still held."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.module: nn.Module | None = None
        self.buffers: list[Tensor | None] = []
        self.held: list[list[Any]] = []

    # --- one call -----------------------------------------------------------------------------------------------------

    def arguments(self, asked: Mapping[str, Any], blobs: Sequence[bytes]) -> list[Any]:
        """Tensors and plain values in order; `same` writes into the tensors of the call before."""
        left, found = iter(blobs), []
        before: list[Tensor | None] = self.buffers if asked.get("same") else []
        for place, spec in enumerate(asked["inputs"]):
            if "value" in spec:
                found.append(spec["value"])
                continue
            raw = RawTensor.of(spec, next(left))
            into = before[place] if place < len(before) else None
            fits = into is not None and into.untyped_storage().nbytes() == len(raw.data) and tuple(into.shape) == raw.shape
            found.append(tensor_of(raw, self.device, into.detach() if into is not None and fits else None))
        self.buffers = [one if isinstance(one, Tensor) else None for one in found]
        return found

    def call(self, asked: Mapping[str, Any], blobs: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Forward, and backward where gradients are asked for."""
        count = sum("value" not in spec for spec in asked["inputs"])
        arguments = self.arguments(asked, blobs[:count])
        module = self.module
        assert module is not None
        wanted = self._wanted(arguments, asked)
        for tensor in self.buffers:
            if tensor is not None and _is_floating(tensor):
                tensor.requires_grad_(any(tensor is one for one in wanted))
        self._seed(asked)
        self._strew(asked.get("freed") or ())
        grads = asked.get("grad") is not None
        if not asked.get("hold"):
            self.held.clear()
        with poisoned(bool(asked.get("poison"))), torch.set_grad_enabled(grads or bool(asked.get("grad_mode"))):
            outputs = outputs_of(module(*arguments))
            early = [raw_of(one) if isinstance(one, Tensor) else None for one in outputs]
            facts = self._facts(outputs)
            gradients: list[Tensor | None] = []
            if grads and asked["backward"]:
                gradients = self._backward(outputs, wanted, [RawTensor.of(*pair) for pair in zip(asked["cotangents"], blobs[count:], strict=True)])
        late = self._late(outputs, asked.get("delayed", True))
        self.held.append(outputs)
        reply, more = self._told(early, gradients, [bytes_of(one) for one in self.buffers if one is not None])
        return {**reply, "facts": facts, "late": late}, more

    def _strew(self, sizes: Sequence[int]) -> None:
        """Numbers into free memory, where a call's outputs are likely to be made."""
        blocks = [_full((size,), _STREWN, dtype=torch.uint8, device=self.device) for size in sizes for _ in range(4)]
        del blocks

    def _seed(self, asked: Mapping[str, Any]) -> None:
        """Of what the module itself draws; no input comes from it."""
        if asked.get("seed") is not None:
            _seed(asked["seed"])
            random.seed(asked["seed"])
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(asked["seed"] % (1 << 32))

    def _wanted(self, arguments: Sequence[Any], asked: Mapping[str, Any]) -> list[Tensor]:
        """Inputs by place, then parameters by name."""
        grad = asked.get("grad")
        if grad is None:
            return []
        assert self.module is not None
        own = dict(self.module.named_parameters())
        for name, parameter in own.items():
            parameter.requires_grad_(name in grad["parameters"] and _is_floating(parameter))
        return [*(arguments[place] for place in grad["inputs"]), *(own[name] for name in grad["parameters"])]

    def _backward(self, outputs: Sequence[Any], wanted: Sequence[Tensor], cotangents: Sequence[RawTensor]) -> list[Tensor | None]:
        tensors = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
        if len(tensors) != len(cotangents) or any(tuple(t.shape) != c.shape for t, c in zip(tensors, cotangents, strict=True)):
            raise RuntimeError(f"{len(tensors)} outputs have gradients, and the reference has {len(cotangents)} of its own shapes")
        given = [tensor_of(raw, self.device) for raw in cotangents]
        return list(_grad(tensors, list(wanted), given, allow_unused=True)) if wanted else []

    def _late(self, outputs: Sequence[Any], delayed: bool) -> list[str | None]:
        """Digests of the outputs a moment later, when every stream has ended: what was still to come has come."""
        synchronize(self.device)
        if delayed:
            _sleep(_DELAY_SECONDS)
        return [_digest(raw_of(one).data, digest_size=16).hexdigest() if isinstance(one, Tensor) else None for one in outputs]

    def _facts(self, outputs: Sequence[Any]) -> dict[str, Any]:
        mine = {one.untyped_storage().data_ptr(): place for place, one in enumerate(self.buffers) if one is not None and one.numel()}
        facts = []
        for one in outputs:
            if not isinstance(one, Tensor):
                facts.append({"type": _type(one).__name__, "tensor": False})
                continue
            exact = _type(one) is _Exact or _type(one) is nn.Parameter
            pointer = one.untyped_storage().data_ptr() if exact else 0
            facts.append({
                "type": f"{_type(one).__module__}.{_type(one).__name__}", "tensor": True, "exact": exact, "grad": bool(one.requires_grad),
                "real": not exact or one.numel() == 0 or pointer != 0, "input": mine.get(pointer), "device": one.device.type,
            })  # fmt: skip
        return {"outputs": facts}

    def _told(
        self, outputs: Sequence[RawTensor | None], gradients: Sequence[Tensor | None], after: Sequence[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        given = [raw_of(one) if one is not None else None for one in gradients]
        return (
            {"outputs": [one and one.header() for one in outputs], "gradients": [one and one.header() for one in given], "inputs_after": len(after)},
            [one.data for one in (*outputs, *given) if one is not None] + list(after),
        )

    def again(self) -> tuple[dict[str, Any], list[bytes]]:
        """Outputs of all calls that are held, as they are now."""
        found = [[raw_of(one) if isinstance(one, Tensor) else None for one in outputs] for outputs in self.held]
        return {"calls": [[one and one.header() for one in row] for row in found]}, [one.data for row in found for one in row if one is not None]

    # --- state ----------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], list[bytes]]:
        assert self.module is not None
        parameters = dict(self.module.named_parameters())
        raw = {name: raw_of(tensor) for name, tensor in self.module.state_dict().items()}
        told = [{**one.header(), "name": name, "parameter": name in parameters} for name, one in raw.items()]
        return {"state": told}, [one.data for one in raw.values()]

    def set_state(self, specs: Sequence[Mapping[str, Any]], blobs: Sequence[bytes]) -> None:
        """In place, by name; a module with other names takes tensors of the same shapes in their order. Raises LookupError."""
        assert self.module is not None
        given = {str(spec["name"]): RawTensor.of(spec, blob) for spec, blob in zip(specs, blobs, strict=True)}
        own = dict(self.module.state_dict(keep_vars=True))
        pairs = [(own.get(name), raw) for name, raw in given.items()]
        if set(own) != set(given):
            pairs = list(zip(own.values(), given.values(), strict=False)) if len(own) == len(given) else []
        if len(pairs) != len(given) or any(mine is None or tuple(mine.shape) != raw.shape for mine, raw in pairs):
            mine = ", ".join(f"{name} {tuple(one.shape)}" for name, one in own.items()) or "nothing"
            theirs = ", ".join(f"{name} {one.shape}" for name, one in given.items()) or "nothing"
            raise LookupError(f"the module's state has {mine}; the reference's {theirs}")
        with torch.no_grad():
            for tensor, raw in pairs:
                assert tensor is not None
                tensor.data.copy_(tensor_of(raw, "cpu").to(tensor.dtype))
