"""Blocks that are computed again in backward, by `torch.utils.checkpoint` around their forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from foretell.errors import ModelError
from foretell.trace.fold.blocks import find_blocks

KEPT_BY_SELECTIVE = frozenset({
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
})  # fmt: skip
"""What selective recompute keeps: results of matrix products and attention, dear to compute again."""


class Observer(Protocol):
    """Told where in the step we are."""

    def phase(self, name: str) -> None: ...

    def scope(self, module: nn.Module) -> AbstractContextManager[None]: ...


class SilentObserver:
    """Where nobody wants to know."""

    def phase(self, name: str) -> None:
        pass

    def scope(self, module: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()


def apply_recompute(model: nn.Module, how: str, observer: Observer) -> None:
    """Wrap the forward of every block in `torch.utils.checkpoint`."""
    paths = find_blocks(model)
    if not paths:
        raise ModelError(
            f"--recompute {how} finds no repeated blocks in {type(model).__name__}",
            "put the repeated layers into an nn.ModuleList, or use --recompute none",
        )
    for path in paths:
        recompute_block(model.get_submodule(path), how, observer)


def recompute_block(block: nn.Module, how: str, observer: Observer | None = None) -> None:
    """Wrap the forward of one block: `full` computes all of it again in backward, `selective` keeps the dear results."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _selective)
    plain = block.forward

    def observed(*args: Any, **kwargs: Any) -> Any:
        assert observer is not None
        with observer.scope(block):
            return plain(*args, **kwargs)

    inner = plain if observer is None else observed
    changed: set[tuple[nn.Module, str]] | None = None if _buffers(block) else set()

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal changed
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        if changed == set() or observer is not None or torch.compiler.is_compiling():
            return checkpoint(inner, *args, **options, **kwargs)
        call = _Remembering(inner, _buffers(block) if changed is None else changed)
        output = checkpoint(call, *args, **options, **kwargs)
        changed = call.keep_changed() if changed is None else changed
        return output

    block.forward = forward  # type: ignore[method-assign]


def _buffers(block: nn.Module) -> set[tuple[nn.Module, str]]:
    """Buffers of a block, as the module that has them and their name there."""
    return {(module, name) for module in block.modules() for name, buffer in module._buffers.items() if buffer is not None}


class _Remembering:
    """A block's forward, whose later calls, in backward, see buffers as the first call did and leave them as they are now.

    Running statistics would otherwise be updated twice, and a block that reads what it updates would be computed again from
    other numbers. `before` holds what the first call changed, as it was; the second call changes that.
    """

    def __init__(self, forward: Callable[..., Any], buffers: Iterable[tuple[nn.Module, str]]) -> None:
        self.forward, self.called = forward, False
        with torch.no_grad():
            self.before = {(module, name): module._buffers[name].clone() for module, name in buffers}  # type: ignore[union-attr]

    def keep_changed(self) -> set[tuple[nn.Module, str]]:
        """After the first call: what it changed; the rest is forgotten. Norms change theirs without telling autograd."""
        self.before = {at: old for at, old in self.before.items() if not _same(at[0]._buffers[at[1]], old)}
        return set(self.before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.called:
            return self._again(*args, **kwargs)
        self.called = True
        return self.forward(*args, **kwargs)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        now = {(module, name): module._buffers[name] for module, name in self.before}
        try:
            for (module, name), buffer in self.before.items():
                module._buffers[name] = buffer
            return self.forward(*args, **kwargs)
        finally:
            for (module, name), current in now.items():
                module._buffers[name] = current


def _same(now: Tensor | None, before: Tensor) -> bool:
    return now is not None and now.shape == before.shape and now.device == before.device and torch.equal(now, before)


_LIMITS = {
    "selective activation checkpoint has been mutated": (
        "the result of a product that the block then changes in place", "make that op (inplace=True, add_) give a new tensor"
    ),
    "backward an extra time": ("a block that differentiates inside its own forward", "leave that to what surrounds the blocks"),
}  # fmt: skip
"""What PyTorch says of selective recompute, and what is meant."""


@contextmanager
def plainly() -> Iterator[None]:
    """Around a step: what PyTorch cannot compute again selectively is told in our words."""
    try:
        yield
    except RuntimeError as error:
        for said, (problem, remedy) in _LIMITS.items():
            if said in str(error):
                raise ModelError(f"selective recompute cannot take {problem}", f"recompute those blocks in full, or {remedy}") from error
        raise


def _selective(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE
