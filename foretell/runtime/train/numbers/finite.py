"""A step whose loss or gradient is not finite leaves no trace: weights and optimizer states are not updated, and buffers
that forward changed (running statistics, say) are put back.

The host is a step ahead of a GPU and learns of it late. Therefore the device itself applies no update from that step on, and
buffers are kept for the last two steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_HOST_BYTES = 64 * 2**20
"""A buffer larger than this is protected only after the first step that changes it."""
_LOOK_STEPS = 2
"""Steps after which values are compared: batch norm's kernels change statistics without counting it as a change."""

Key = tuple[nn.Module, str]


def may_step(optimizer: torch.optim.Optimizer, skip: Tensor) -> bool:
    """Whether to take the coming `optimizer.step()`, which must change nothing where `skip` is 1.

    A fused optimizer decides on the device: it is told, takes the step and changes nothing if it must not, and nobody
    waits. Others cannot; for them the value is read here, and False means that the step must not be taken.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.found_inf = skip  # type: ignore[attr-defined]
        return True
    return not bool(skip)


class Skips:
    """Whether updates may be applied, and what buffers were before the last two steps."""

    def __init__(self, parts: Iterable[nn.Module], device: torch.device) -> None:
        self.tripped = torch.zeros((), device=device)
        """1 after a step that was not finite: no update is applied from then on."""
        self.buffers = Buffers(parts)
        self.watches = False
        """Whether the norm of gradients is looked at although nothing is clipped."""
        self.limits: Tensor | None = None
        """Above these the loss and the gradient's norm of a step count as not finite."""
        self._unfinished = False

    def begin(self) -> None:
        """Before the forward of a step."""
        self.buffers.keep()
        self._unfinished = True

    def end(self) -> None:
        """After its backward."""
        self.buffers.note()
        self._unfinished = False

    def abandon(self) -> None:
        """A step that failed on its way leaves no trace in buffers."""
        if self._unfinished:
            self.end()
            self.undo(1)

    def skip(self, value: Tensor, *, this: Tensor | None = None) -> Tensor:
        """1 where the update must not be applied, given what must be finite: loss and squared norm, added up. Where `this` is
        not, the update of this step alone is skipped."""
        self.tripped = torch.maximum(self.tripped, (~value.detach().isfinite()).float())
        return self.tripped if this is None else torch.maximum(self.tripped, (~this.detach().isfinite()).float())

    def excess(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """Infinity where a number is above its limit, else 0; what is not finite is seen without it."""
        assert self.limits is not None and norm is not None
        both = torch.stack([loss.detach(), norm.detach()])
        above = ((both > self.limits) & both.isfinite()).any()
        return torch.where(above, float("inf"), 0.0)

    def undo(self, steps: int) -> None:
        """Put buffers back to where they were before the last so many steps, one or two; updates may be applied again."""
        self.buffers.restore(steps)
        self.tripped = torch.zeros_like(self.tripped)


class Buffers:
    """Copies of those buffers that steps change; which these are is seen as they change."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        held = {(module, name): None for part in parts for module in part.modules() for name in module._buffers}
        self._keys: list[Key] = list(held)
        self._first: dict[Key, Tensor] | None = None
        """Copies in host memory of buffers that have not changed yet."""
        self._versions: dict[Key, tuple[Tensor, int]] = {}
        self._changing: list[Key] = []
        self.changed = ""
        """A buffer whose values a step has changed, by its module's class; empty where none has."""
        self._slots: tuple[dict[Key, Tensor], dict[Key, Tensor]] = ({}, {})
        self._turn = 0

    def keep(self) -> None:
        """Before a step."""
        self._turn += 1
        if self._first is None:
            self._begin()
        slot, pairs = self._slots[self._turn % 2], []
        for key in self._changing:
            live, kept = key[0]._buffers.get(key[1]), slot.get(key)
            if live is None:
                slot.pop(key, None)
                continue
            if kept is None or kept.shape != live.shape or kept.dtype != live.dtype or kept.device != live.device:
                kept = slot[key] = torch.empty_like(live)
            pairs.append((kept, live.detach()))
        if pairs:
            torch._foreach_copy_([kept for kept, _ in pairs], [live for _, live in pairs])

    def note(self) -> None:
        """After forward and backward: what has changed for the first time is kept from now on."""
        for key in [key for key in self._versions if self._changed(key)]:
            del self._versions[key]
            self._changing.append(key)
            before = self._first.pop(key, None) if self._first is not None else None
            live = key[0]._buffers.get(key[1])
            if before is not None and live is not None:
                if not self.changed and before.shape == live.shape and not torch.equal(before, live.detach().to(before.device)):
                    self.changed = f"{key[1]} of {type(key[0]).__name__}"
                self._slots[self._turn % 2][key] = before.to(live.device)

    def _changed(self, key: Key) -> bool:
        tensor, version = self._versions[key]
        if _version(key) != (id(tensor), version):
            return True
        if self._turn > _LOOK_STEPS or self._first is None or key not in self._first:
            return False
        return not torch.equal(tensor.detach().cpu(), self._first[key])

    def restore(self, steps: int) -> None:
        """What was kept before the last so many steps. A buffer that changed for the first time since then has one value."""
        slots = [self._slots[(self._turn - back) % 2] for back in reversed(range(steps))]
        for key in self._changing:
            kept = next((slot[key] for slot in slots if key in slot), None)
            live = key[0]._buffers.get(key[1])
            if kept is None or live is None:
                continue
            if live.shape == kept.shape and live.dtype == kept.dtype and not live.is_inference():
                live.detach().copy_(kept)
            else:  # the model has put another tensor in its place
                key[0]._buffers[key[1]] = kept.clone()

    def _begin(self) -> None:
        self._first = {}
        for key in self._keys:
            live = key[0]._buffers.get(key[1])
            if live is None or live.is_meta:
                continue
            self._versions[key] = live, _version(key)[1]
            if live.numel() * live.element_size() <= _HOST_BYTES:
                self._first[key] = live.detach().to("cpu", copy=True)


def _version(key: Key) -> tuple[int, int]:
    """Which tensor it is and how often it was changed."""
    live = key[0]._buffers.get(key[1])
    if live is None or live.is_inference():
        return id(live), 0
    return id(live), live._version
