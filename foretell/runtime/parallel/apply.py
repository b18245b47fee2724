"""Apply a plan to a model from outside, and run steps of it.

    build ─► tensor split ─► cut into stages ─► recompute ─► compile ─► shard over data ─► optimizer

The model's own code stays as it is and knows of no rank. One step takes this data rank's micro-batches, differentiates
the mean loss over all micro-batches of all data ranks, clips by the norm of the whole gradient and updates.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from foretell.errors import ModelError, UserError
from foretell.plan.blocks import expand, stages_of
from foretell.plan.facts import Facts
from foretell.plan.legal import check
from foretell.plan.precision import MIXED, computes_in
from foretell.plan.recipe import own_kernels, refuse_other_model
from foretell.plan.types import AWAY, MASTER, Mesh, Plan, Residency
from foretell.runtime.parallel import shard
from foretell.runtime.parallel.adapted import put_on
from foretell.runtime.parallel.exact import ExactSum
from foretell.runtime.parallel.float8 import lowered
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.parallel.recompute import recompute
from foretell.runtime.parallel.runners import Piped, Runner, WholeModel
from foretell.runtime.train.numbers import clip
from foretell.runtime.train.numbers.finite import Skips, may_step
from foretell.runtime.train.numbers.scaler import scaler_for
from foretell.trace.chunked.deferred import aside
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.fold.recompute import plainly
from foretell.trace.moments.optimizer import names_of_tables
from foretell.trace.record.step import Batch, Workload, build_optimizer, cast_floats, in_chunks, prepare_precision

if TYPE_CHECKING:
    from foretell.checkpoint.peft_files import AdapterFile
    from foretell.runtime.offload.adamw import Offloaded
    from foretell.runtime.offload.saved import OffloadedActivations
    from foretell.runtime.parallel.expert.experts import Experts
    from foretell.runtime.parallel.sync.outer import Outer
    from foretell.runtime.parallel.tensor.split import Prepared, TensorParallel


@dataclass(frozen=True)
class StepResult:
    """What a step gave; tensors on the device, read when asked."""

    loss: Tensor
    """Mean over all micro-batches of all data ranks, the same on every rank."""
    grad_norm: Tensor | None
    """Norm of the whole gradient before clipping; None where the plan neither clips nor scales."""
    loss_scale: Tensor | None = None
    """By which the loss was multiplied, where it was."""


class Job:
    """A plan at work on this rank."""

    def __init__(
        self, plan: Plan, ranks: Ranks, runner: Runner, place: Callable[[Batch], Batch], *,
        learning_rate: float | None = None, split: TensorParallel | None = None, away: OffloadedActivations | None = None,
        scratch: str | Path | None = None, base: str = "", tables: Collection[str] = (), shapes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.away = away
        """Activations that are moved, where any are."""
        self.base = base
        """Which weights the plan's adapters are trained on, by a digest; empty without adapters."""
        self.shapes = shapes or {}
        """With adapters: shape and dtype of all that is trained, on whichever rank."""
        self.plan, self.ranks, self.runner, self.place = plan, ranks, runner, place
        self.split = split
        """How tensors are split, where they are."""
        self.parts = runner.parts
        self.skips = Skips(runner.parts, ranks.device)
        """Keeps steps that are not finite from leaving a trace."""
        self.changing = False
        """Weights or optimizer states may be half updated."""
        self.scaler = runner.scaler = scaler_for(plan, ranks.device)
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in trained]
        self.moved: Offloaded | None = None
        """The optimizer, where its states are elsewhere or in another format than the weights."""
        if plan.offloads:
            self.moved = self._moved(dict(trained), learning_rate, scratch)
        whole = [p for name, p in trained if name in tables]
        self.optimizer = self.moved or _optimizer(plan, self._parameters, whole)
        self.outer = _outer(plan, self._parameters, ranks) if plan.sync is not None and not ranks.alone else None
        """What joins replicas that step alone; nothing where the others are stand-ins."""
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        holding = plan.together.world // ranks.size("pp") if runner.exact is None else 1
        self._weights = {p: 1.0 / (clip.holders(p, holding) * runner.copies(name)) for name, p in trained}

    def _moved(self, trained: dict[str, nn.Parameter], learning_rate: float | None, scratch: str | Path | None) -> Offloaded:
        from foretell.runtime.offload import attach

        (model,) = self.parts
        found = attach.optimizer(model, self.plan, find_blocks(model), trained, self.ranks, learning_rate, scratch)
        assert isinstance(self.runner, WholeModel)
        self.runner.watch(found, self.skips)
        return found

    # ------------------------------------------------------------ steps

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step on this data rank's micro-batches."""
        return self.update(self.backward(micro_batches))

    def backward(self, micro_batches: Sequence[Batch]) -> Tensor | None:
        """The first half of a step: gradients of the mean loss. Returns it where this rank computes it."""
        if not micro_batches:
            raise UserError("a step needs at least one micro-batch", "give as many as the plan accumulates")
        self.skips.begin()
        self.changing = self.updates_early
        with plainly():
            loss = self.runner.backward([self.place(batch) for batch in micro_batches])
        self.skips.end()
        if self.runner.exact is not None:
            self.runner.exact.check(self.skips.buffers.changed)
        clip.settle(self._parameters)
        return loss

    def update(self, loss: Tensor | None) -> StepResult:
        """The second half: clip, update, forget the gradients. What all ranks must know goes round in one sum."""
        mean, total, norm = self._numbers(loss)
        seen = mean if self.skips.limits is None else mean + self.skips.excess(mean, self._true(norm))
        skip = self.skips.skip(seen + total) if self.scaler is None else self.scaler.skip(self.skips, seen, total)
        self.changing = True
        if self.moved is not None:
            factor = clip.factor(norm, self.plan.clip) if norm is not None and self.plan.clip is not None else None
            self.moved.begin(factor, skip)
            self.changing = False
            return StepResult(mean, norm)
        if self.scaler is not None and norm is not None:
            norm = self._unscale(norm)
        elif norm is not None and self.plan.clip is not None:
            clip.scale(self._parameters, norm, self.plan.clip)
        if may_step(self.optimizer, skip):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.changing = False
        if self.scaler is None:
            return StepResult(mean, norm)
        scale = self.scaler.scale.clone()
        self.scaler.settle(skip, self.skips.tripped)
        return StepResult(mean, norm, scale)

    def look(self, loss: Tensor | None) -> StepResult:
        """What a step gave, after its backward; nothing is updated, and the step leaves no trace."""
        mean, _, norm = self._numbers(loss)
        self.optimizer.zero_grad(set_to_none=True)
        self.skips.undo(1)
        return StepResult(mean, self._true(norm))

    def _true(self, norm: Tensor | None) -> Tensor | None:
        """A norm as it is without the scale of the loss."""
        return norm if norm is None or self.scaler is None else self.scaler.down(norm)

    def _numbers(self, loss: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The mean loss, the squared norm of the gradient where it is asked for (else 0), and the norm."""
        normed = self.plan.clip is not None or self.scaler is not None or self.skips.watches
        squares = clip.squares(self._parameters, self._weights, self._known()) if normed else None
        mean, total = self._sum(loss if self.runner.exact is None else self.runner.exact.loss, squares, self.plan.together)
        return mean, total, total.sqrt() if normed else None

    def _unscale(self, norm: Tensor) -> Tensor:
        """Clip gradients and take the scale out of them at once; returns their true norm."""
        assert self.scaler is not None
        norm = self.scaler.down(norm)
        share = clip.factor(norm, self.plan.clip) if self.plan.clip is not None else torch.ones_like(norm)
        clip.multiply(self._parameters, self.scaler.down(share))
        return norm

    def _known(self) -> dict[nn.Parameter, Tensor]:
        """Norms of gradients that have left the device."""
        norms = self.moved.norms() if self.moved is not None else {}
        return {self.moved.parameters[name]: norm for name, norm in norms.items()} if self.moved is not None else {}

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Mean loss over batches and data ranks, without gradients."""
        for part in self.parts:
            part.eval()
        try:
            loss = self.runner.evaluate([self.place(batch) for batch in batches])
        finally:
            shard.reshard(self.parts)
            for part in self.parts:
                part.train()
        return self._sum(loss, None, self.plan.mesh if self.ranks.replica is None else self.plan.together)[0]

    def _sum(self, loss: Tensor | None, squares: Tensor | None, over: Mesh) -> tuple[Tensor, Tensor]:
        """Mean loss over data ranks and the squared norm of the gradient, known to all; where replicas step alone, of one of them."""
        zero = torch.zeros((), device=self.ranks.device)
        both = torch.stack([zero if loss is None else loss.float(), zero if squares is None else squares])
        if over.world > 1 and self.runner.exact is None:
            dist.all_reduce(both, group=self.ranks.group("dp_shard") if over.world < self.ranks.world else None)
            both[0] /= over.data * over.tp * over.cp
        return both[0], both[1]

    # ------------------------------------------------------------ what it holds

    def name_of(self, position: int, name: str) -> str:
        """What the whole model calls something of the part at that position: a stage keeps the model's own names."""
        return name

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under the names the whole model gives them."""
        for position, part in enumerate(self.parts):
            for name, parameter in part.named_parameters():
                yield self.name_of(position, name), parameter

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank that a checkpoint has: with adapters what is trained, since the base never changes."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad or self.plan.adapters is None)

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients of this rank's stages by name, gathered from the ranks that hold their pieces."""
        found = {}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                grad = self.whole(name, parameter.grad.detach())
                found[name] = grad.clone() if self.scaler is None else self.scaler.down(grad)
        return found

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, its gradient or its optimizer state, gathered and as the model itself would have it."""
        if self.split is not None:
            return self.split.whole(name, tensor)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @property
    def updates_early(self) -> bool:
        """Whether weights and states change already during backward."""
        return self.moved is not None and self.moved.early

    def settle(self) -> None:
        """Finish whatever of the last update is still under way."""
        if self.moved is not None:
            self.moved.settle()

    def close(self) -> None:
        """Give back what is held outside the process's own heap."""
        if self.outer is not None:
            self.outer.close()
        if self.away is not None:
            self.away.close()
        if self.moved is not None:
            self.moved.close()

    def state_dict(self) -> dict[str, Any]:
        """Model and optimizer of this rank by the names of the whole model; tensors are the live ones, not copies."""
        self.settle()
        model = {}
        for position, part in enumerate(self.parts):
            for name, value in part.state_dict().items():
                model[self.name_of(position, name)] = value
        names = {p: name for name, p in self.named_parameters()}
        states = self.moved.revealed() if self.moved is not None else self.optimizer.state
        state = {names[p]: dict(values) for p, values in states.items()}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "names": held}
            for group, held in zip(self.optimizer.param_groups, self._grouped(), strict=True)
        ]
        more = {"scaler": self.scaler.state()} if self.scaler is not None else {}
        return {"model": model, "optimizer": {"state": state, "groups": groups}, **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` of a job with the same plan gave."""
        self.settle()
        saved = state["optimizer"]
        if self._grouped() != [group["names"] for group in saved["groups"]]:
            raise _other("the saved optimizer has its parameters in another order")
        for position, part in enumerate(self.parts):
            wanted = {name: self.name_of(position, name) for name in part.state_dict()}
            missing = sorted(set(wanted.values()) - state["model"].keys())
            if missing:
                more = f" and lacks {len(missing) - 1} more" if missing[1:] else ""
                raise _other(f"the saved state has no {missing[0]}{more}")
            part.load_state_dict({name: state["model"][original] for name, original in wanted.items()})
        own = torch.optim.Optimizer.state_dict(self.optimizer)["param_groups"]
        groups, states = [], {}
        for group, mine in zip(saved["groups"], own, strict=True):
            groups.append({**{key: group[key] for key in group if key != "names"}, "params": mine["params"]})
            for name, index in zip(group["names"], mine["params"], strict=True):
                if name in saved["state"]:  # a copy each: two stages of a rank may hold one parameter
                    states[index] = {
                        k: v.clone() if isinstance(v, Tensor) else v for k, v in saved["state"][name].items()
                    }
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})
        if self.scaler is not None:
            self.scaler.load(state.get("scaler"))

    def _grouped(self) -> list[list[str]]:
        """Names of the optimizer's parameters, group by group."""
        names = {p: name for name, p in self.named_parameters()}
        return [[names[p] for p in group["params"]] for group in self.optimizer.param_groups]


def _other(problem: str) -> UserError:
    return UserError(problem, "it belongs to another model or another plan")


def apply(
    workload: Workload, plan: Plan, ranks: Ranks, *, learning_rate: float | None = None, backend: str = "inductor",
    scratch: str | Path | None = None, start: AdapterFile | None = None, adapted: bool = False, exact: bool = False,
) -> Job:  # fmt: skip
    """Turn a model into a job; the model is changed in place. `backend` is torch.compile's; `scratch` is a folder for what
    the plan keeps on disk; `start` are adapters to begin with; `adapted`: they are on the model already; `exact`: see `ExactSum`."""
    model = workload.model
    paths = find_blocks(model)
    check(plan, Facts(blocks=tuple(paths), world=ranks.world if ranks.replica is None else ranks.replica.count))
    if not adapted:
        refuse_other_model(plan, shapes_of(model))
    model.train()
    plan = lowered(model, plan, paths, ranks.device)
    base = put_on(model, plan, start) if plan.adapters is not None and not adapted else ""
    shapes = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters() if p.requires_grad} if plan.adapters is not None else {}
    tables = names_of_tables(model) if plan.coded else ()
    _prepare(model, plan, ranks.device)
    if plan.offloads:
        from foretell.runtime.offload.attach import place_rest

        place_rest(model, ranks.device, torch.bfloat16 if plan.precision == MASTER else None)
    elif exact or ranks.data_mesh is None or plan.mesh.pp > 1 or plan.mesh.tp > 1 or plan.mesh.ep > 1:
        model.to(ranks.device)  # otherwise every unit is moved as it is sharded
    place = functools.partial(placed, device=ranks.device, precision=plan.precision)
    example = place(workload.batch)
    found = context = away = None
    stacks: tuple[Experts, ...] = ()
    if plan.mesh.ep > 1:
        from foretell.runtime.parallel.expert.experts import find

        stacks = find(model, plan.mesh.ep)
    if plan.mesh.cp > 1:
        from foretell.runtime.parallel.context.positions import prepare

        context = prepare(model, ranks, example, workload.loss)
    if plan.mesh.tp > 1:
        from foretell.runtime.parallel.tensor import split as tensor

        found = tensor.prepare(model, plan, ranks, example, workload.loss)
    if plan.mesh.pp == 1:
        loss = workload.loss
        if plan.kernels.get("loss") == "compiled" and loss is not None:
            loss = torch.compile(loss, backend=backend)
        sums = ExactSum(model, plan, ranks) if exact else None
        runner: Runner = WholeModel(model, loss, autocast(plan, ranks, whole=exact), context, _in_chunks(workload, plan), sums)
        held = [paths]
    else:
        from foretell.runtime.parallel.pipeline.stages import cut

        stages = cut(model, plan, ranks, example, workload.loss)
        runner = Piped(stages)
        every = stages_of(plan, paths)
        held = [list(every[index]) for index in stages.indices]
    split = _split(runner, found)
    if context is not None and isinstance(runner, Piped):
        runner.stages.share(context)
    for part, blocks in zip(runner.parts, held, strict=True):
        kept = {path: residency for path, residency in expand(plan.blocks, paths).items() if path in blocks}
        if split is None or found is None:
            recompute(part, kept)
            away = _away(part, kept, ranks.device, scratch)
            compile_part(part, blocks, plan, backend)
        else:  # its compiler takes calls, not code: what is computed again is the compiled block
            if plan.compile == "blocks":
                from foretell.runtime.parallel.tensor.compile import compile_blocks

                compile_blocks(part, split.team, split.places, found.flow, blocks, backend)
            recompute(part, kept)
        held_experts: list[str] = []
        if stacks:
            from foretell.runtime.parallel.expert import experts as expert

            mesh = ranks.submesh(("ep",))
            assert mesh is not None
            held_experts = [one.path for one in expert.apply(part, stacks, mesh).experts]
        if not exact:
            shard.shard(part, blocks, plan, ranks, held_experts)
    return Job(plan, ranks, runner, place, learning_rate=learning_rate, split=split, away=away, scratch=scratch, base=base,
               tables=tables, shapes=shapes)  # fmt: skip


def _prepare(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Weights in the plan's format, and its kernels in the model's forwards: a CPU runs what they stand for, in plain torch."""
    if plan.precision == "bf16" and plan.adapters is None:
        prepare_precision(model, "bf16")
    if names := own_kernels(plan):
        from foretell.kernels.swap.apply import apply as put_kernels

        put_kernels(model, names, emulated=device.type != "cuda")


def _in_chunks(workload: Workload, plan: Plan) -> Callable[[Workload], Tensor] | None:
    """How the loss is computed where the plan has it in chunks."""
    return in_chunks(workload, plan.loss_chunks).around if plan.loss_chunks > 1 else None


def _away(part: nn.Module, kept: Mapping[str, Residency], device: torch.device, scratch: str | Path | None) -> OffloadedActivations | None:
    """Move the activations of blocks that say so."""
    if not any(residency.mode in AWAY for residency in kept.values()):
        return None
    from foretell.runtime.offload.memory.disk import DiskFile
    from foretell.runtime.offload.saved import attach

    return attach(part, kept, device, functools.partial(DiskFile, folder=scratch or tempfile.gettempdir()))


def _split(runner: Runner, found: Prepared | None) -> TensorParallel | None:
    """Split what this rank holds. From one stage to the next tensors go whole."""
    if found is None:
        return None
    from foretell.runtime.parallel.tensor import split as tensor

    if isinstance(runner, Piped):
        for stage in runner.stages.stages.values():
            stage.gather = tensor.gathered
    applied = [tensor.apply(part, found.derived, found.team) for part in runner.parts]
    return replace(applied[-1], places={path: place for one in applied for path, place in one.places.items()})


def placed(batch: Batch, *, device: torch.device, precision: str) -> Batch:
    """A batch on a device, its floats in bf16 where the weights are."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    moved: Batch = pytree.tree_map(move, batch)
    return cast_floats(moved, torch.bfloat16) if precision in ("bf16", MASTER) else moved


def shapes_of(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every parameter, as a plan remembers them."""
    return {name: (tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters()}


def compile_part(part: nn.Module, blocks: Sequence[str], plan: Plan, backend: str) -> None:
    """Compile every block's forward, or that of the whole. Equal blocks are compiled once."""
    if plan.compile == "none":
        return
    logging.getLogger("torch._dynamo.variables.higher_order_ops").setLevel(
        logging.ERROR
    )  # warns of selective recompute
    mode = "reduce-overhead" if plan.compile == "graphs" and backend == "inductor" else None
    for module in [part.get_submodule(path) for path in blocks] if plan.compile == "blocks" else [part]:
        compiled = torch.compile(module.forward, backend=backend, mode=mode)
        module.forward = aside(compiled) if plan.loss_chunks > 1 else compiled  # type: ignore[method-assign]


def autocast(plan: Plan, ranks: Ranks, *, whole: bool = False) -> Callable[[], AbstractContextManager[Any]]:
    """Around forward and loss: autocast where mixed precision is not already `fully_shard`'s doing."""
    if plan.precision in MIXED and (whole or plan.together.spread == 1):
        dtype = getattr(torch, computes_in(plan.precision))
        return lambda: torch.autocast(ranks.device.type, dtype)
    return nullcontext


def _outer(plan: Plan, parameters: list[nn.Parameter], ranks: Ranks) -> Outer:
    from foretell.runtime.parallel.sync.mean import GroupExchange, Mean
    from foretell.runtime.parallel.sync.outer import Outer

    assert plan.sync is not None
    sync, replica = plan.sync, ranks.replica
    if replica is not None:
        from foretell.runtime.parallel.sync.peer import joined

        return Outer(sync, parameters, 1, lambda elements: joined(replica, elements, sync))
    exchange = GroupExchange(ranks.group("dp_replicate"), ranks.size("dp_replicate"), ranks.coordinate("dp_replicate"))
    return Outer(sync, parameters, exchange.replicas, lambda elements: Mean(exchange, elements, sync.format, ranks.device))


def _optimizer(plan: Plan, parameters: list[nn.Parameter], whole: Sequence[Tensor]) -> torch.optim.Optimizer:
    """One group of parameters for every mesh they are spread over: an optimizer's fused ops take one mesh at a time."""
    if not parameters:
        raise ModelError("this rank has no parameter to train", "unfreeze some, or use fewer stages")
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    state_format = plan.state_format if plan.coded else "fp32"
    return build_optimizer(plan.optimizer, [{"params": group} for group in groups.values()], state_format, whole)
