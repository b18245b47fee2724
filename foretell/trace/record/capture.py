"""Trace a step: run it once on fake tensors, with CUDA's choices, and write down what happened."""

from __future__ import annotations

import platform
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from foretell.errors import UserError
from foretell.trace import types
from foretell.trace.adapters.put import packed_away
from foretell.trace.cuda.select import cuda_choices, real_masks
from foretell.trace.cuda.tf32 import products_in_tf32
from foretell.trace.doubts import ONE_DRAW
from foretell.trace.flops import flops
from foretell.trace.flow.logits import logits_of
from foretell.trace.fold.blocks import find_blocks
from foretell.trace.load.lazy import lazy_modules
from foretell.trace.recipe import Recipe
from foretell.trace.record.collection import no_collection
from foretell.trace.record.copies import plain_copies
from foretell.trace.record.cpu import cpu_choices
from foretell.trace.record.gradients import plain_formulas
from foretell.trace.record.ragged import any_lengths
from foretell.trace.record.recorder import RecordedOp, Recorder
from foretell.trace.record.step import Step, Workload
from foretell.trace.record.subclasses import own_classes
from foretell.trace.record.values import value_of
from foretell.trace.sandbox.blame import is_users, made_at, users_frames, users_line
from foretell.trace.sandbox.devices import device_is_there
from foretell.trace.sandbox.wrappers import COMPILED, compiled_as, seen_through
from foretell.trace.serving.programs import served

TRAIN_FIRST = ("micro_first", "micro_next", "update_first", "zero_grad")
TRAIN_STEADY = ("micro_first", "micro_next", "update", "zero_grad")
NUMBERS = (1.0, 0.5, 0.05, 4.0)
"""What a number is taken to be that code reads and nothing is known of: the next where the code itself raises at one."""


def capture(
    build: Callable[[], Workload],
    recipe: Recipe,
    *,
    capability: tuple[int, int] | None = (9, 0),
    hints: Mapping[str, float] | None = None,
    release: str | None = None,
) -> types.Trace:
    """Trace the step that `build` and `recipe` describe, as a device of this compute capability runs it.

    Choices of CUDA are those of the installed torch, or of another `release` (trace/cuda/versions.py); ops are always the
    installed one's.

    `build` is called under a fake tensor mode: the factory functions it uses allocate nothing. Without a
    capability the step is traced as this machine's CPU runs it.
    """
    first: Exception | None = None
    for number in NUMBERS:
        recorder = Recorder(hints)
        recorder.ordinary_number = number
        try:
            return _captured(recorder, build, recipe, capability, release or torch.__version__)
        except Exception as error:
            first = first or error
            if isinstance(error, UserError) or not recorder.read_numbers or not _raised_by_users(error):
                break
    assert first is not None
    if recorder.in_backward and not isinstance(first, UserError) and not users_frames(first):
        told: list[str] = []
        with suppress(Exception):
            _captured(Recorder(hints), build, recipe, capability, release or torch.__version__, _remembering(told))
        made_at(first, next(filter(None, (users_line(text, innermost_last=True) for text in told)), ""))
    raise first


@contextmanager
def _remembering(told: list[str]) -> Iterator[None]:
    """Let autograd remember the forward of every node: a backward that fails then writes down the lines that led to it."""
    with warnings.catch_warnings(record=True) as found, torch.autograd.set_detect_anomaly(True, check_nan=False):
        warnings.simplefilter("always")
        try:
            yield
        finally:
            told += [str(one.message) for one in found]


def _raised_by_users(error: BaseException) -> bool:
    """Whether a line of the user's own raised it: a number that it was given may be one that does not occur."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return is_users(last.filename)


def _captured(
    recorder: Recorder, build: Callable[[], Workload], recipe: Recipe, capability: tuple[int, int] | None, release: str,
    around: AbstractContextManager[None] | None = None,
) -> types.Trace:  # fmt: skip
    choices = cuda_choices(recorder, capability, release) if capability else cpu_choices(recorder)
    with no_collection(), seeded(), recorder, plain_formulas(), choices, any_code(recorder, capability), products_in_tf32(recipe.precision == "tf32"):
        with no_initialisation():
            workload = build() if recipe.packed is None else served(build(), *recipe.packed)
        step = Step(workload, recipe, device_type="cpu", observer=recorder)
        resident = resident_storages(recorder, step.workload)
        with recorder.modules(workload.model), real_masks(recorder), around or nullcontext():
            if recipe.mode == "infer":
                with recorder.program("forward"):
                    step.evaluate()
                roles = Roles(recorder, step, resident)
            else:
                roles = train_once(recorder, step, resident)
    return finished(recorder, step, roles, capability, release)


@contextmanager
def any_code(recorder: Recorder, capability: tuple[int, int] | None, sees: Callable[[str], bool] = is_users) -> Iterator[None]:
    """Until the end of the block, code may do on fake tensors what it does on real ones; files that `sees` knows see a device."""
    with (
        plain_copies(), lazy_modules(), device_is_there(capability, sees), seen_through(recorder.assumed.add, recorder.compiled),
        recorder.reads(), any_lengths(recorder), own_classes(),
    ):  # fmt: skip
        yield


@contextmanager
def seeded() -> Iterator[None]:
    """The same draws in every trace, and generators afterwards as they were: a model may be built and run by chance."""
    state, plain = torch.get_rng_state(), random.getstate()
    torch.manual_seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(plain)


@contextmanager
def no_initialisation() -> Iterator[None]:
    """Fake weights have no values to initialise; not trying saves a good part of building a large model."""
    with ExitStack() as stack:
        for name in ("normal_", "uniform_", "fill_", "zero_"):
            stack.enter_context(mock.patch.object(Tensor, name, _not_needed(getattr(Tensor, name))))
        yield


def _not_needed(initialise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def unless_known(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if value_of(tensor) is None else initialise(tensor, *args, **kwargs)

    return unless_known


def train_once(recorder: Recorder, step: Step, resident: list[int]) -> Roles:
    step.create_optimizer()
    drawn = _drawn()
    with recorder.program("micro_first"):
        step.micro_batch()
    if _drawn() != drawn and not type(step.model).__module__.startswith("foretell.zoo."):
        recorder.assumed.add(f"what Python's or numpy's random gives the step {ONE_DRAW}")
    roles = Roles(recorder, step, resident)
    if step.recipe.accumulate > 1:
        with recorder.program("micro_next"):
            step.micro_batch()
    with recorder.program("update_first"):
        step.update()
    roles.note_optimizer(step)
    with recorder.program("update"):
        step.update()
    with recorder.program("zero_grad"):
        step.zero_grad()
    return roles


def _drawn() -> tuple[Any, ...]:
    """Where the generators are that Python code draws from: what they give is read at once, and may decide what is done."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else ()
    return random.getstate(), *(one.tobytes() if hasattr(one, "tobytes") else one for one in state)


def resident_storages(recorder: Recorder, workload: Workload) -> list[int]:
    """Storages that exist before the step, in the order in which `.to(device)` would make them."""
    tensors = [*in_move_order(workload.model), *_leaves(workload.batch)]
    parts = [part for one in tensors for part in ((one,) if one.layout is torch.strided else recorder.parts(one))]
    return list(dict.fromkeys(recorder.storage_id(part) for part in parts))


def in_move_order(module: nn.Module) -> Iterator[Tensor]:
    for child in module.children():
        yield from in_move_order(child)
    yield from (parameter for parameter in module._parameters.values() if parameter is not None)
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)


def _leaves(batch: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


class Roles:
    """What each storage is for, gathered while the tensors that hold them are at hand."""

    def __init__(self, recorder: Recorder, step: Step, resident: list[int]) -> None:
        self.recorder, self.resident = recorder, resident
        self.roles: dict[int, str] = {}
        self.owners: dict[int, str] = {}
        self.host: set[int] = set()
        for path, parameter in step.model.named_parameters():
            self._name(parameter, types.PARAMETER, path.rpartition(".")[0])
        self.note_gradients(step)
        for path, buffer in step.model.named_buffers():
            self._name(buffer, types.BUFFER, path.rpartition(".")[0])
        for leaf in _leaves(step.workload.batch):
            self._name(leaf, types.INPUT, "")

    def note_gradients(self, step: Step) -> None:
        for path, parameter in step.model.named_parameters():
            if parameter.grad is not None:
                self._name(parameter.grad, types.GRADIENT, path.rpartition(".")[0])

    def note_optimizer(self, step: Step) -> None:
        paths = {id(parameter): path.rpartition(".")[0] for path, parameter in step.model.named_parameters()}
        for parameter, state in step.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._name(value, types.OPTIMIZER, paths.get(id(parameter), ""))
                    if key == "step" and not step.recipe.optimizer.endswith("-fused"):
                        self.host.add(self.recorder.storage_id(value))

    def _name(self, tensor: Tensor, role: str, owner: str) -> None:
        number = self.recorder.storage_id(tensor)
        self.roles.setdefault(number, role)
        self.owners.setdefault(number, owner)


def _add_in_place(recorder: Recorder) -> None:
    """Let autograd's own additions reuse the first gradient's storage, as they do without a dispatch mode.

    It does so when nobody else holds that gradient: then its storage died right after the addition. The same holds
    for a bias that `linear` adds to its own product.
    """
    moved: dict[int, int] = {}

    def renamed(refs: tuple[types.Ref, ...]) -> tuple[types.Ref, ...]:
        if any(ref.storage in moved for ref in refs):
            return tuple(types.Ref(moved.get(ref.storage, ref.storage), ref.spec) for ref in refs)
        return refs

    for rows in recorder.programs.values():
        for position, row in enumerate(rows):
            row.inputs = renamed(row.inputs)
            row.frees = [moved.get(number, number) for number in row.frees]
            in_place = row.by_engine or _adds_bias(rows[max(0, position - 2) : position], row)
            if in_place and row.allocates and row.outputs[0].spec == row.inputs[0].spec:
                first = row.inputs[0].storage
                if first in row.frees:
                    moved[row.allocates[0]] = first
                    row.frees.remove(first)
                    row.frees = [moved.get(number, number) for number in row.frees]  # the sum itself may die at once
                    row.allocates = []
            row.outputs = renamed(row.outputs)
    recorder.moved = moved


def _adds_bias(before: list[RecordedOp], row: RecordedOp) -> bool:
    """Whether `linear` adds its bias here, to a product of an input that was not contiguous."""
    return (
        row.name == "aten.add.Tensor"
        and len(row.inputs) == 2
        and len(row.inputs[1].spec.shape) == 1
        and [earlier.name for earlier in before] == ["aten.mm.default", "aten._unsafe_view.default"]
        and before[0].outputs[0].storage == row.inputs[0].storage
    )


def _order_births(recorder: Recorder, roles: Roles) -> None:
    """The order in which CUDA's ops make their outputs, and the random state that flash attention does not make."""
    for rows in recorder.programs.values():
        for row in rows:
            if row.name == "aten._scaled_dot_product_cudnn_attention.default":
                row.allocates.sort(key=lambda number: recorder.sizes[number] > 16)
            elif row.name == "aten._scaled_dot_product_flash_attention.default":
                roles.host.update([number for number in row.allocates if recorder.sizes[number] <= 16][1:])
            elif row.name == "aten._cudnn_rnn.default":
                reserve = row.outputs[3].storage
                row.allocates.sort(key=lambda number, reserve=reserve: number == reserve)  # type: ignore[misc]


def finished(recorder: Recorder, step: Step, roles: Roles, capability: tuple[int, int] | None, release: str) -> types.Trace:
    _add_in_place(recorder)
    _order_births(recorder, roles)
    known: dict[Any, int | None] = {}
    programs = {
        name: types.Program(name, tuple(_op(row, known) for row in rows)) for name, rows in recorder.programs.items()
    }
    accumulate = step.recipe.accumulate
    times = {"micro_next": accumulate - 1}

    def schedule(names: Iterable[str]) -> tuple[tuple[str, int], ...]:
        return tuple((name, times.get(name, 1)) for name in names if times.get(name, 1) > 0)

    runs = (
        {"evaluation": (("forward", 1),)}
        if step.recipe.mode == "infer"
        else {"first_step": schedule(TRAIN_FIRST), "steady_step": schedule(TRAIN_STEADY)}
    )
    return types.Trace(
        programs=programs,
        schedule=runs,
        storages=_storages(recorder, roles),
        resident=tuple(roles.resident),
        meta=_meta(recorder, step, capability, release),
    )


def _op(row: RecordedOp, known: dict[Any, int | None]) -> types.Op:
    inputs, outputs = tuple(ref.spec for ref in row.inputs), tuple(ref.spec for ref in row.outputs)
    key = (row.name, inputs, outputs, row.attrs)
    if key not in known:
        known[key] = flops(row.name, inputs, outputs, row.attrs)
    return types.Op(
        row.name, row.inputs, row.outputs, row.module, row.phase, known[key],
        tuple(row.allocates), tuple(row.frees), row.attrs,
    )  # fmt: skip


def _storages(recorder: Recorder, roles: Roles) -> dict[int, types.Storage]:
    storages: dict[int, types.Storage] = {}
    parameters = {number for number, role in roles.roles.items() if role == types.PARAMETER}
    logits = logits_of(recorder.programs, recorder.born_in, parameters)
    for number, target in recorder.moved.items():
        if number in roles.roles:
            roles.roles[target], roles.owners[target] = roles.roles[number], roles.owners[number]
    for number, nbytes in recorder.sizes.items():
        if number in recorder.moved:
            continue
        row = recorder.born_in[number]
        saved = number in recorder.alive_at_backward and row is not None and row.phase == "forward"
        role = roles.roles.get(number) or (types.ACTIVATION if saved else types.TEMPORARY)
        if role in (types.ACTIVATION, types.TEMPORARY) and number in logits:
            role = types.LOGITS
        owner = roles.owners.get(number) or (row.module if row is not None else "")
        storages[number] = types.Storage(nbytes, role, owner, saved, number in roles.host)
    return storages


def _meta(recorder: Recorder, step: Step, capability: tuple[int, int] | None, release: str) -> dict[str, object]:
    parameters, blocks = list(step.model.parameters()), find_blocks(step.model)
    compiles = compiled_as(recorder.compiled, step.model, blocks) if capability else ""
    return {
        "parameters": sum(parameter.numel() for parameter in parameters) + packed_away(step.model),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "blocks": blocks,
        "recipe": step.recipe.to_json(),
        "batch": [[str(t.dtype)[6:], *map(int, t.shape)] for t in tree_leaves(step.workload.batch) if isinstance(t, Tensor)],
        "capability": list(capability or ()),
        "assumed": sorted(recorder.assumed - ({COMPILED} if compiles else set())),
        **({"compiles": compiles} if compiles else {}),
        **({"context": context} if step.recipe.packed and (context := getattr(step.model, "context", None)) else {}),
        **({"kernels": step.kernels} if step.kernels else {}),
        **({"backwards": step.backwards} if step.backwards > 1 else {}),
        **({"masked_if_compiled": sorted(recorder.left_out)} if recorder.left_out else {}),
        "versions": {"torch": release.split("+")[0], "python": platform.python_version()},
    }
