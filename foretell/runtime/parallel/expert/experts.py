"""Expert parallelism from outside the model: the experts of a layer lie on several data ranks, rows travel to them.

    find stacks of experts ─► prove that each works alone ─► weights become DTensors ─► rows go there and back

A module holds experts where the first dimension of all its weights counts them. Two forms of forward are known: rows of
all experts at once, (experts, rows, size), and rows with the experts each of them chose and their shares, as the experts
of transformers models are written. That experts and rows do not depend on each other is not believed but tried, with
random weights, before anything is split. The ranks of the axis see different samples: it is a part of dp_shard.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from foretell.errors import UserError
from foretell.runtime.parallel.expert.exchange import Crew, Routed, SharedWeight, Stacked

STACKED, ROUTED = "stacked", "routed"
ROWS = 6
"""Of the trial."""
TRIAL = 1e-4
"""By how much its results may differ, of their norm: in fp32, by the order of sums alone."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A module that holds experts."""

    path: str
    kind: str
    count: int
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Attributes that count its experts, and what they count on one rank."""


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """Experts of a model, split."""

    experts: tuple[Experts, ...]
    crew: Crew
    ways: Mapping[str, Stacked | Routed]

    def report(self) -> tuple[str, ...]:
        return tuple(
            f"{one.path}: {one.count} experts over {self.crew.size} ranks, {one.count // self.crew.size} each ({one.kind})"
            for one in self.experts
        )


# --- finding ---------------------------------------------------------------------------------------------------------


def find(model: nn.Module, ranks: int, *, trial: bool = True) -> tuple[Experts, ...]:
    """Every stack of experts in a model; a `UserError` says why there is none, or one cannot be split so.

    Without a trial what looks like experts is taken for them: for models without values."""
    found, reasons = [], []
    known: dict[Any, Experts | str] = {}
    for path, module in model.named_modules():
        count = _count(module)
        if count is None:
            continue
        key = (type(module), tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)))
        if key not in known:
            known[key] = _tried(path, module, count, ranks, trial)
        answer = known[key]
        if isinstance(answer, str):
            reasons.append(f"{path} {answer}")
        else:
            found.append(Experts(path=path, kind=answer.kind, count=count, numbers=answer.numbers))
    if not found:
        raise UserError(f"ep shares experts among ranks, and {_none(model, reasons)}", "use ep 1 and other axes of the mesh")
    return tuple(found)


def _none(model: nn.Module, reasons: list[str]) -> str:
    if reasons:
        return reasons[0]
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and "expert" in path.rpartition(".")[2].lower() and len(module) > 1:
            return f"{path} calls its {len(module)} experts one by one: only weights that are stacked can be shared"
    return "no module of the model holds stacked weights of experts"


def _count(module: nn.Module) -> int | None:
    """How many experts a module holds: the first dimension of all its own weights, of which one is a stack of matrices."""
    own = list(module.parameters(recurse=False))
    if not own or len(list(module.parameters())) != len(own) or max(p.dim() for p in own) != 3:
        return None
    sizes = {p.shape[0] if p.dim() > 1 else 0 for p in own}
    count = sizes.pop()
    return count if not sizes and count > 1 else None


def _kind(module: nn.Module) -> str | None:
    """The form of forward, by how many tensors it takes."""
    given = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.KEYWORD_ONLY) for p in given):
        return None
    return {1: STACKED, 3: ROUTED}.get(len(given))


def _tried(path: str, module: nn.Module, count: int, ranks: int, trial: bool) -> Experts | str:
    """The module as experts, or why it is none."""
    kind = _kind(module)
    if kind is None:
        return "holds stacked weights, and its forward takes neither rows of all experts nor rows with their choices"
    if count % ranks:
        return f"holds {count} experts, which do not divide by ep {ranks}"
    numbers = {n: count // ranks for n, v in vars(module).items() if type(v) is int and v == count and "expert" in n}
    if not trial:
        return Experts(path=path, kind=kind, count=count, numbers=numbers)
    reason = ""
    for changed in ({}, numbers) if numbers else ({},):
        reason = _trial(module, kind, count, ranks, changed)
        if not reason:
            return Experts(path=path, kind=kind, count=count, numbers=changed)
    return f"holds stacked weights, and {reason}"


# --- the trial -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _trial(module: nn.Module, kind: str, count: int, ranks: int, numbers: Mapping[str, int]) -> str:
    """Why a rank that holds some of the experts would compute something else for their rows; empty where it does not."""
    first = next(module.parameters())
    chance = torch.Generator().manual_seed(1)
    weights = {
        name: (torch.randn(p.shape, generator=chance) / p.shape[-1] ** 0.5).to(first.device)
        for name, p in module.named_parameters()
    }
    sizes = list(dict.fromkeys(size for p in module.parameters() if p.dim() == 3 for size in p.shape[1:]))
    training = module.training
    module.eval()
    try:
        for size in sizes:
            try:
                x = torch.randn(count, ROWS, size, generator=chance) if kind == STACKED else torch.randn(ROWS * count, size, generator=chance)
                x = x.to(first.device)
                how = _stacked if kind == STACKED else _routed
                return how(module, weights, x, count, ranks, numbers, chance)
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                reason = f"a forward of random rows fails: {str(error).splitlines()[0][:120]}"
    finally:
        module.train(training)
    return reason


def _stacked(
    module: nn.Module, weights: Mapping[str, Tensor], x: Tensor, count: int, ranks: int, numbers: Mapping[str, int],
    chance: torch.Generator,
) -> str:  # fmt: skip
    whole = functional_call(module, dict(weights), (x,))
    if whole.dim() != 3 or whole.shape[:2] != x.shape[:2]:
        return f"gives {tuple(whole.shape)} for rows of {tuple(x.shape)}"
    few = functional_call(module, dict(weights), (x[:, : ROWS // 2].contiguous(),))
    if _apart(few, whole[:, : ROWS // 2]):
        return "a row depends on others"
    with _counting(module, numbers):
        parts = [functional_call(module, {n: w.chunk(ranks)[i] for n, w in weights.items()}, (p,)) for i, p in enumerate(x.chunk(ranks))]
    return "an expert depends on others" if _apart(torch.cat(parts), whole) else ""


def _routed(
    module: nn.Module, weights: Mapping[str, Tensor], x: Tensor, count: int, ranks: int, numbers: Mapping[str, int],
    chance: torch.Generator,
) -> str:  # fmt: skip
    index = torch.stack([torch.randperm(count, generator=chance)[:2] for _ in range(len(x))]).to(x.device)
    share = torch.rand(index.shape, generator=chance).to(x.device)
    whole = functional_call(module, dict(weights), (x, index, share))
    if whole.dim() != 2 or whole.shape[0] != x.shape[0]:
        return f"gives {tuple(whole.shape)} for rows of {tuple(x.shape)}"
    held, summed = count // ranks, torch.zeros_like(whole)
    with _counting(module, numbers):
        for part in range(ranks):
            row, choice = torch.where(index // held == part)
            own = {name: weight.chunk(ranks)[part] for name, weight in weights.items()}
            one = torch.ones(len(row), 1, device=x.device)
            made = functional_call(module, own, (x[row], index[row, choice, None] - part * held, one))
            summed.index_add_(0, row, made * share[row, choice, None])
            functional_call(module, own, (x[:0], index[:0, :1], share[:0, :1]))  # a rank may get no row
    return "an expert depends on others" if _apart(summed, whole) else ""


def _apart(found: Tensor, known: Tensor) -> bool:
    return not float((found - known).norm()) <= TRIAL * float(known.norm()) or not float(known.norm()) > 0


@contextmanager
def _counting(module: nn.Module, numbers: Mapping[str, int]) -> Iterator[None]:
    before = {name: vars(module)[name] for name in numbers}
    vars(module).update(numbers)
    try:
        yield
    finally:
        vars(module).update(before)


# --- splitting -------------------------------------------------------------------------------------------------------


def apply(model: nn.Module, experts: tuple[Experts, ...], mesh: DeviceMesh, *, plain: bool = False) -> ExpertParallel:
    """Keep this rank's experts of every stack that the model, or one stage of it, has; rows go to where theirs are.

    With `plain` they are tensors like any other, which know nothing of the other ranks' experts."""
    crew = Crew(mesh)
    here = [one for one in experts if _has(model, one.path)]
    ways: dict[str, Stacked | Routed] = {}
    running: list[bool] = []
    for one in here:
        module = model.get_submodule(one.path)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = _held(parameter, crew, plain)
        way = ways[one.path] = (Stacked if one.kind == STACKED else Routed)(one.path, crew, one.count)
        vars(module).update(one.numbers)
        _send_rows(module, way, running)
    if here:
        _watch(model, running)
    return ExpertParallel(experts=tuple(here), crew=crew, ways=ways)


def _has(model: nn.Module, path: str) -> bool:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return any(True for _ in module.parameters(recurse=False))


def _held(parameter: nn.Parameter, crew: Crew, plain: bool) -> nn.Parameter:
    """A parameter as a DTensor of which this rank has its experts."""
    data = parameter.detach()
    mine = data.chunk(crew.size)[crew.rank].clone(memory_format=torch.contiguous_format)
    if plain:
        return nn.Parameter(mine, requires_grad=parameter.requires_grad)
    spread = DTensor.from_local(
        mine, crew.mesh, [Shard(0)], run_check=False, shape=data.shape, stride=data.contiguous().stride()
    )
    return nn.Parameter(spread, requires_grad=parameter.requires_grad)


def _watch(model: nn.Module, running: list[bool]) -> None:
    """Know when the model's own code runs: then weights of experts may be read by the forward of their module alone."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        running.append(True)
        try:
            return plain(*args, **kwargs)
        finally:
            running.clear()

    model.forward = forward  # type: ignore[method-assign]


def _send_rows(module: nn.Module, way: Stacked | Routed, running: list[bool]) -> None:
    """Let forward run where the experts are, on weights that are there alone."""
    plain, kind = module.forward, type(module)
    signature = inspect.signature(plain)
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    given: dict[str, Tensor] = {}

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        local = {name: SharedWeight.apply(_local(module._parameters[name]), way.crew.size) for name in names}
        rows = signature.bind(*args, **kwargs).args

        def call(*values: Tensor) -> Tensor:
            given.update(local)
            try:
                found: Tensor = plain(*values)
            finally:
                given.clear()
            return found

        return way.run(call, list(local.values()), *rows)

    body = {name: property(_getter(name, given, way.path, running)) for name in names}
    module.__class__ = type(kind.__name__, (kind,), {**body, "__module__": kind.__module__, "__doc__": kind.__doc__})
    module.forward = forward  # type: ignore[method-assign]


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _getter(name: str, given: Mapping[str, Tensor], path: str, running: list[bool]) -> Callable[[nn.Module], Any]:
    def get(module: nn.Module) -> Any:
        if name in given:
            return given[name]
        if running:
            raise UserError(
                f"{path}.{name} is read outside the forward of its module, and ep has spread it over ranks",
                "let the module's forward take the rows of all experts, or use ep 1",
            )
        return module._parameters[name]

    return get

