"""The ways of `benchmarks/kernels_head.py`: what torch and others have for each op, and ours under several launches and numbers of chunks."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foretell.kernels import adamw, linear_cross_entropy, moe

TUNED = "max-autotune-no-cudagraphs"
Made = list[Tensor]


@dataclass(frozen=True)
class Way:
    """One implementation, made when its turn comes."""

    label: str
    make: Callable[[], Callable[[], Any]]
    ours: bool = False
    launch: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Job:
    """A kernel at a shape."""

    kernel: str
    what: str
    shape: Mapping[str, int]
    dtype: torch.dtype
    ways: list[Way]
    check: Callable[[], tuple[Made, dict[str, Made | str]]]
    free: Callable[[], None]

    def ours(self, label: str) -> bool:
        return any(one.label == label and one.ours for one in self.ways)


def compiled(function: Callable[..., Any], device: torch.device, mode: str | None = None) -> Callable[..., Any]:
    if device.type == "cpu":
        return torch.compile(function, backend="aot_eager", dynamic=False)
    return torch.compile(function, mode=mode, dynamic=False)


def jobs_of(device: torch.device, more: Sequence[Mapping[str, Any]], tuned: bool = False) -> Iterator[Job]:
    small = device.type == "cpu"
    for shape in linear_cross_entropy.DECLARED:
        yield head(device, {"rows": 256, "width": 32, "words": 300} if small else shape, [one for one in more if one["kernel"] == "linear_cross_entropy"], tuned)
    for shape in adamw.DECLARED:
        for folded in (False, True):
            yield update(device, {"elements": 5000} if small else shape, folded, [one for one in more if one["kernel"] == "adamw"])
    for shape in moe.DECLARED:
        sizes = {"tokens": 32, "choices": 2, "width": 16, "inner": 8, "experts": 4} if small else shape
        yield mixture(device, sizes, [one for one in more if one["kernel"] == "moe"], tuned)


# ---------------------------------------------------------------- output layer and cross entropy


def in_pieces(pieces: int, device: torch.device) -> Callable[..., Tensor]:
    """Compiled, piece by piece, each computed again in backward."""

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum")

    one = compiled(loss, device)

    def whole(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        parts = [
            checkpoint(one, some, weight, wanted, use_reentrant=False) for some, wanted in zip(x.chunk(pieces), target.chunk(pieces), strict=True)
        ]
        return torch.stack(parts).sum() / len(x)

    return whole


def liger() -> Callable[..., Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        found = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)
        return found[0] if isinstance(found, tuple) else found

    return loss


CALLS: tuple[dict[str, Any], ...] = (
    {"chunks": 8}, {"chunks": 4}, {"chunks": 16, "sums": "weight"}, {"chunks": 22, "sums": "weight"}, {"chunks": 16, "sums": "float32"},
    {"chunks": 8, "recompute": True},
)  # fmt: skip
LAUNCHES: tuple[dict[str, int], ...] = (
    {}, {"streams": 2}, {"warps": 32, "block": 32768}, {"warps": 16, "block": 16384}, {"warps": 16, "block": 8192}, {"warps": 8, "block": 8192},
)  # fmt: skip


def head(device: torch.device, shape: Mapping[str, int], more: Sequence[Mapping[str, Any]], tuned: bool) -> Job:
    dtype, kept = torch.bfloat16, {}

    def inputs(shape: Mapping[str, int] = shape) -> tuple[Tensor, ...]:
        key = tuple(shape.items())
        if key not in kept:
            torch.manual_seed(0)
            x, weight, target = linear_cross_entropy.draw(shape, dtype, device)
            kept[key] = (x.requires_grad_(), weight.requires_grad_(), target)
        return kept[key]

    def step(loss: Callable[..., Tensor]) -> Callable[[], Any]:
        x, weight, target = inputs()

        return lambda: torch.autograd.grad(loss(x, weight, target), (x, weight))

    def mine(call: Mapping[str, Any]) -> Callable[..., Tensor]:
        return functools.partial(linear_cross_entropy.linear_cross_entropy, **call)

    losses: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "eager": lambda: linear_cross_entropy.reference, "torch.compile": lambda: compiled(linear_cross_entropy.reference, device),
        "torch.compile, 8 pieces": lambda: in_pieces(8, device),
    }  # fmt: skip
    if tuned:
        losses[TUNED] = lambda: compiled(linear_cross_entropy.reference, device, TUNED)
    if importlib.util.find_spec("liger_kernel") is not None:
        losses["Liger"] = liger
    ways = [Way(label, lambda make=make: step(make())) for label, make in losses.items()]
    for label, call, launch in asked(more, [(words(call), call, {}) for call in CALLS] + [(words(CALLS[0]), CALLS[0], one) for one in LAUNCHES[1:]]):
        ways.append(Way(named(label, launch), lambda call=call: step(mine(call)), True, launch))

    def check() -> tuple[Made, dict[str, Made | str]]:
        few = {**shape, "rows": min(shape["rows"], 2048), "words": min(shape["words"], 8192)}
        x, weight, target = inputs(few)
        wide = [one.detach().double().requires_grad_() for one in (x, weight)]
        truth = torch.autograd.grad(linear_cross_entropy.reference(*wide, target), wide)
        found: dict[str, Made | str] = {
            "eager": list(torch.autograd.grad(linear_cross_entropy.reference(x, weight, target), (x, weight)))
        }
        for call in CALLS:
            found[words(call)] = list(torch.autograd.grad(mine(call)(x, weight, target), (x, weight)))
        del kept[tuple(few.items())]
        return list(truth), found

    return Job("linear_cross_entropy", "forward and backward", shape, dtype, ways, check, kept.clear)


# ---------------------------------------------------------------- AdamW


ADAMW_LAUNCHES: tuple[dict[str, int], ...] = (
    {}, {"warps": 8, "block": 1024}, {"warps": 4, "block": 1024}, {"warps": 8, "block": 4096}, {"norm_warps": 4, "norm_block": 4096},
    {"norm_warps": 16, "norm_block": 16384},
)  # fmt: skip


class Updated:
    """Parameters with gradients and an optimizer over them; `folded` clips, copies to bfloat16 and leaves zeros as well."""

    def __init__(self, shape: Mapping[str, int], device: torch.device, folded: bool, **settings: Any) -> None:
        torch.manual_seed(0)
        params, grads, *_ = adamw.draw(shape, torch.float32, device)
        self.params, self.grads, self.folded = [nn.Parameter(one) for one in params], grads, folded
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.optimizer = torch.optim.AdamW(self.params, **settings)
        self.copies = {param: torch.empty_like(param, dtype=torch.bfloat16) for param in self.params} if folded else {}

    def torchs(self) -> None:
        if self.folded:
            torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        self.optimizer.step()
        if self.folded:
            torch._foreach_copy_(list(self.copies.values()), [one.detach() for one in self.copies])
            torch._foreach_zero_([one.grad for one in self.params])

    def ours(self) -> None:
        if self.folded:
            adamw.adamw_step(self.optimizer, max_norm=1.0, copies=self.copies, zero=True)
        else:
            adamw.adamw_step(self.optimizer)


def update(device: torch.device, shape: Mapping[str, int], folded: bool, more: Sequence[Mapping[str, Any]]) -> Job:
    kept: dict[str, Updated] = {}

    def only(**settings: Any) -> Updated:
        """One at a time, for memory; all ways of a kind share it."""
        key = str(settings)
        if key not in kept:
            kept[key] = Updated(shape, device, folded, **settings)
        return kept[key]

    ways = [Way("fused", lambda: only(fused=True).torchs), Way("foreach", lambda: only(foreach=True).torchs)]
    ways.append(Way("torch.compile", lambda: compiled(only(foreach=True, capturable=device.type == "cuda").torchs, device)))
    for label, _, launch in asked(more, [("ours", {}, one) for one in ADAMW_LAUNCHES]):
        ways.append(Way(named(label, launch), lambda: only(fused=True).ours, True, launch))

    def check() -> tuple[Made, dict[str, Made | str]]:
        few = {"elements": min(shape["elements"], 1_000_003)}
        sides = [Updated(few, device, folded, fused=True) for _ in range(2)]
        truth = Updated(few, device, False, foreach=False)
        with torch.no_grad():
            wide = [nn.Parameter(one.detach().double()) for one in truth.params]
        for one, grad in zip(wide, truth.grads, strict=True):
            one.grad = grad.double()
        if folded:
            torch.nn.utils.clip_grad_norm_(wide, 1.0)
        torch.optim.AdamW(wide).step()
        sides[0].torchs()
        sides[1].ours()
        made = [[one.detach() for one in side.params] for side in sides]
        return [one.detach() for one in wide], {"fused": made[0], "ours": made[1]}

    return Job("adamw", "clip, step, copy, zero" if folded else "step", shape, torch.float32, ways, check, kept.clear)


# ---------------------------------------------------------------- mixtures of experts


def grouped(x: Tensor, index: Tensor, share: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """As models of a hub do it: sorted rows, products of groups, rows added up."""
    ranked, order = index.flatten().sort()
    ends = torch.searchsorted(ranked, torch.arange(len(w_in), device=x.device), right=True, out_int32=True)
    token = order // index.shape[1]
    gate, up = torch._grouped_mm(x[token], w_in.transpose(1, 2), offs=ends).chunk(2, -1)
    made = torch._grouped_mm(F.silu(gate) * up, w_out.transpose(1, 2), offs=ends) * share.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, made.to(x.dtype))


MOE_LAUNCHES: tuple[dict[str, int], ...] = ({}, {"warps": 4, "block": 2048}, {"warps": 8, "block": 4096}, {"row_warps": 4, "row_block": 1024})


def mixture(device: torch.device, shape: Mapping[str, int], more: Sequence[Mapping[str, Any]], tuned: bool) -> Job:
    dtype, kept = torch.bfloat16, {}

    def inputs(shape: Mapping[str, int] = shape) -> tuple[Tensor, ...]:
        key = tuple(shape.items())
        if key not in kept:
            torch.manual_seed(0)
            kept[key] = tuple(one.requires_grad_() if one.is_floating_point() else one for one in moe.draw(shape, dtype, device))
        return kept[key]

    def step(function: Callable[..., Tensor]) -> Callable[[], Any]:
        given = inputs()
        learned = [one for one in given if one.requires_grad]
        up = torch.ones_like(given[0])
        return lambda: torch.autograd.grad(function(*given), learned, up)

    ways = [Way("loop", lambda: step(moe.reference)), Way("grouped", lambda: step(grouped)), Way("torch.compile", lambda: step(compiled(grouped, device)))]
    ways += [Way(TUNED, lambda: step(compiled(grouped, device, TUNED)))] if tuned else []
    for label, _, launch in asked(more, [("ours", {}, one) for one in MOE_LAUNCHES]):
        ways.append(Way(named(label, launch), lambda: step(moe.moe), True, launch))

    def check() -> tuple[Made, dict[str, Made | str]]:
        few = {**shape, "tokens": min(shape["tokens"], 256)}
        given = inputs(few)
        learned = [place for place, one in enumerate(given) if one.requires_grad]

        def results(function: Callable[..., Tensor], some: Sequence[Tensor]) -> Made:
            return list(torch.autograd.grad(function(*some).sum(), [some[place] for place in learned]))

        wide = [one.detach().double().requires_grad_() if one.requires_grad else one for one in given]
        found: dict[str, Made | str] = {"loop": results(moe.reference, given), "ours": results(moe.moe, given)}
        truth = results(moe.reference, wide)
        del kept[tuple(few.items())]
        return truth, found

    return Job("moe", "forward and backward", shape, dtype, ways, check, kept.clear)


# ---------------------------------------------------------------- names


Asked = tuple[str, Mapping[str, Any], Mapping[str, int]]


def asked(more: Sequence[Mapping[str, Any]], usual: list[Asked]) -> list[Asked]:
    return [(one.get("label", words(one.get("call", {}))), one.get("call", {}), one.get("launch", {})) for one in more] or usual


def words(call: Mapping[str, Any]) -> str:
    return "ours" + "".join(f", {name} {value}" for name, value in call.items())


def named(label: str, launch: Mapping[str, int]) -> str:
    return label + (" · " + " ".join(f"{name} {value}" for name, value in launch.items()) if launch else "")
