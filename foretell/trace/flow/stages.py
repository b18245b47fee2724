"""How a model's forward flows through the stages of a pipeline: one forward on fake tensors, watched.

A stage begins when the block that the plan names is called, and ends when the next one is. Nothing of the model is
changed and no graph is made: what is noted is which modules run within which stage and which parameters are read there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import ForetellError, UnknownName, UserError
from foretell.trace.record.step import Batch, Loss, Workload, compute_loss
from foretell.trace.sandbox.blame import step_error

_LEAVE_OUT = "leave out the pipeline, or cut elsewhere"


@dataclass(frozen=True, kw_only=True)
class StageFlow:
    """What runs and what is read in which stage."""

    cuts: tuple[str, ...]
    """Block that begins each stage after the first."""
    modules: Mapping[str, frozenset[int]]
    """Outermost modules with parameters that lie whole within stages → the stages that call them."""
    parameters: Mapping[str, frozenset[int]]
    """Parameter, under its first name → the stages that read it. One that is never read is in the first stage."""

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several stages read, and which: each holds a copy, their gradients are summed."""
        return {name: tuple(sorted(stages)) for name, stages in self.parameters.items() if len(stages) > 1}

    def held(self, stage: int) -> frozenset[str]:
        """Parameters that a stage holds."""
        return frozenset(name for name, stages in self.parameters.items() if stage in stages)


def look(model: nn.Module, batch: Batch, loss: Loss | None, cuts: Sequence[str]) -> StageFlow:
    """Run one forward and the loss on fake tensors and note what each stage runs and reads."""
    cuts = tuple(cuts)
    modules = _cut_modules(model, cuts)
    watch = _StageWatch(model, cuts, modules)
    with fake_of(model, batch) as fake_batch, watch.hooks(), watch:
        try:
            compute_loss(Workload(model, fake_batch, loss))
        except ForetellError:
            raise
        except Exception as error:
            raise step_error(type(model).__name__, error) from error
    for cut, module in zip(cuts, modules, strict=True):
        calls = watch.calls[id(module)]
        if calls != 1:
            raise UserError(
                f"{cut} cannot begin a stage: forward calls it {'never' if not calls else f'{calls} times'}", _LEAVE_OUT
            )
    return StageFlow(cuts=cuts, modules=_outermost(model, watch), parameters=_readers(model, watch))


@contextmanager
def fake_of(model: nn.Module, batch: Batch) -> Iterator[Batch]:
    """A batch without values, under a mode in which the model computes shapes alone. The model may be real or fake."""
    modes = {tensor.fake_mode for tensor in model.parameters() if isinstance(tensor, FakeTensor)}
    mode = modes.pop() if modes else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or (isinstance(leaf, FakeTensor) and leaf.fake_mode is mode):
                return leaf
            return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=leaf.device)

        yield pytree.tree_map(fake, batch)


def _cut_modules(model: nn.Module, cuts: tuple[str, ...]) -> list[nn.Module]:
    known = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    counts = Counter(id(module) for module in known.values())
    for cut in cuts:
        if cut not in known:
            raise UnknownName("block", cut, known, "a stage begins with a module of the model")
        if counts[id(known[cut])] > 1:
            raise UserError(f"{cut} cannot begin a stage: it is in the model under several names", _LEAVE_OUT)
    if len(set(cuts)) != len(cuts):
        raise UserError(f"the cuts {', '.join(cuts)} name a block twice", "name each block once")
    return [known[cut] for cut in cuts]


class _StageWatch(TorchDispatchMode):
    """Counts stages as their first blocks are called; notes calls of modules and reads of parameters."""

    def __init__(self, model: nn.Module, cuts: tuple[str, ...], modules: list[nn.Module]) -> None:
        super().__init__()
        self.model, self.cuts = model, cuts
        self.order = {id(module): number for number, module in enumerate(modules, start=1)}
        self.parameters = {id(parameter) for parameter in model.parameters()}
        self.stage = 0
        self.calls: Counter[int] = Counter()
        self.within: dict[int, set[int]] = defaultdict(set)
        self.across: set[int] = set()
        """Modules that run in more than one stage in one call."""
        self.readers: dict[int, set[int]] = defaultdict(set)
        self._open: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)) if func.namespace != "prim" else ():  # asks for a device
            if id(leaf) in self.parameters:
                self.readers[id(leaf)].add(self.stage)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        number = self.order.get(id(module))
        self.calls[id(module)] += 1
        if number is not None and self.calls[id(module)] == 1:
            if number != self.stage + 1:
                expected = self.cuts[min(self.stage, len(self.cuts) - 1)]
                raise UserError(
                    f"forward calls {self.cuts[number - 1]} where {expected} should begin a stage",
                    "give the cuts in the order in which forward calls the blocks",
                )
            self.stage = number
        self._open.append((id(module), self.stage))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        begun = None
        while self._open:
            opened, begun = self._open.pop()
            if opened == id(module):
                break
        if begun == self.stage:
            self.within[id(module)].add(self.stage)
        else:
            self.across.add(id(module))


def _outermost(model: nn.Module, watch: _StageWatch) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        whole = watch.within.get(id(module))
        if path and whole and id(module) not in watch.across:
            if any(True for _ in module.parameters()):
                found[path] = frozenset(whole)
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return found


def _readers(model: nn.Module, watch: _StageWatch) -> dict[str, frozenset[int]]:
    called: dict[str, frozenset[int]] = {}
    for path, stages in _outermost(model, watch).items():
        for name, _ in model.get_submodule(path).named_parameters():
            called[f"{path}.{name}"] = frozenset({min(stages)})
    return {
        name: frozenset(watch.readers[id(parameter)]) or called.get(name, frozenset({0}))
        for name, parameter in model.named_parameters()
    }
