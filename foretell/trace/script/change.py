"""A script followed with a change that a plan asks for: other micro-batches, recomputation, precision. Its file stays as it is.

    micro_batch   loaders give so many samples
    recompute     blocks are computed again in backward, as `trace.record.step` does it
    batch         loaders of one size give another
    autocast      from forward to backward, whatever the script does
    fused         PyTorch's optimizers are made with fused=True
    tf32          products of fp32 matrices in TF32
    channels_last the model's weights and images with their channels innermost
    precision     what the script has, with parameters in 16 bits where ranks share them; or bf16 autocast around an fp32 model

`eject` writes the same changes into the script.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from foretell.errors import ModelError
from foretell.trace.fold.recompute import apply_recompute
from foretell.trace.record.recorder import Recorder
from foretell.trace.record.step import innermost, lay_channels_last, prepare_precision

_LOADER = inspect.signature(DataLoader.__init__)
_SHARDED = {"fsdp-bf16": "bf16-autocast", "fsdp-fp16": "fp16-autocast"}
"""Precision where ranks share parameters → the one that it is on one device."""


FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Optimizers of PyTorch's that can be fused, and that training scripts use."""


def _fused(plain: Any) -> Any:
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        plain(optimizer, *args, **{**kwargs, "foreach": None, "fused": True})

    return init


def _images_last(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return torch.utils._pytree.tree_map(innermost, (args, kwargs))


@dataclass
class StepChange:
    """What to do otherwise; nothing where it is all empty."""

    micro_batch: int = 0
    recompute: str = "none"
    precision: str = ""
    autocast: str = ""
    """dtype of autocast from forward to backward."""
    batch: tuple[int, int] | None = None
    """Of loaders with the first batch size, the second instead."""
    fused: bool = False
    tf32: bool = False
    channels_last: bool = False
    replaced: dict[int, nn.Parameter] = field(default_factory=dict)
    """Parameter of the script → the one in its place."""
    _done: bool = False

    @classmethod
    def of(cls, asked: Mapping[str, Any] | None) -> StepChange:
        return cls(**(asked or {}))

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """For as long as the script runs."""
        if self.micro_batch:
            yield DataLoader, "__init__", self._sized(DataLoader.__init__)
        if self.fused:
            for kind in FUSED:
                yield kind, "__init__", _fused(kind.__init__)

    def _sized(self, plain: Any) -> Any:
        def init(loader: Any, *args: Any, **kwargs: Any) -> None:
            _, *given = _LOADER.bind(loader, *args, **kwargs).arguments.items()
            named = dict(given)
            sampler = named.get("batch_sampler")
            if isinstance(sampler, BatchSampler):
                sampler.batch_size = self.micro_batch
            elif sampler is None and isinstance(named.get("batch_size", 1), int):
                named["batch_size"] = self.micro_batch
            plain(loader, **named)

        return init

    def apply(self, model: nn.Module, called: nn.Module, own: str, recorder: Recorder) -> None:
        """To the model, once, before it is called for the first time; `own` is the precision of the script."""
        if self._done:
            return
        self._done = True
        if self.precision and self.precision != own:
            self._cast(called, own)
        if self.tf32:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        if self.channels_last:
            self._replace(called, lay_channels_last)
            called.register_forward_pre_hook(_images_last, with_kwargs=True)
        if self.recompute != "none":
            apply_recompute(model, self.recompute, recorder)

    def _cast(self, called: nn.Module, own: str) -> None:
        if self.precision in _SHARDED and own in ("fp32", _SHARDED[self.precision]):
            self._replace(called, lambda model: prepare_precision(model, self.precision))
        elif (self.precision, own) == ("bf16-autocast", "fp32"):
            called.forward = torch.autocast("cuda", dtype=torch.bfloat16)(called.forward)  # type: ignore[method-assign]
        else:
            raise ModelError(f"the script computes in {own}: {self.precision} is not a change that is made to it", "leave --precision out")

    def _replace(self, called: nn.Module, change: Callable[[nn.Module], None]) -> None:
        """Do what puts other parameters in the place of the model's; optimizers that are there get them too."""
        before = dict(called.named_parameters(remove_duplicate=False))
        change(called)
        after = dict(called.named_parameters(remove_duplicate=False))
        self.replaced = {id(one): after[name] for name, one in before.items()}
        self._held = list(before.values())  # ids stay theirs
        for optimizer in [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]:
            for group in optimizer.param_groups:
                group["params"] = self.now(group["params"])

    def now(self, parameters: Any) -> Any:
        """Parameters that the script names, as they are now."""
        if not self.replaced or isinstance(parameters, Tensor):
            return parameters
        return [self.replaced.get(id(one), one) for one in parameters]
