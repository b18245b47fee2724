"""Tensor parallelism between pipeline stages: activations that are split along the sequence cross as whole tensors.

A stage gathers what it sends and takes its part of what it receives, forward and backward. The program of one rank of
a split model itself is traced (`search.traces.split`), not derived here: what is costed is then what runs.

The first norm of a later stage in truth computes on the whole tensor it received; here it computes on its part, so that
bytes of such a stage come out a little low or high (tests say by how much) and two of its small messages differ.
"""

from __future__ import annotations

from dataclasses import replace

from foretell.lower.pipeline.cut import CutStage
from foretell.trace import types
from foretell.trace.types import Op, Ref, Storage, TensorSpec, Trace

SPLIT_STREAM = "split_stream"
"""In a trace's meta: activations between split regions are split along the sequence."""


def degree(trace: Trace) -> int:
    """Ranks over which activations between blocks are split; 1 where they are whole."""
    ranks = trace.meta.get("tp", 1)
    assert isinstance(ranks, int)
    return ranks if trace.meta.get(SPLIT_STREAM) else 1


def whole_between(stage: CutStage, ranks: int, storages: dict[int, Storage]) -> CutStage:
    """The stage with whole tensors where it meets its neighbours."""
    if ranks == 1:
        return stage
    forward, backward = list(stage.forward), list(stage.backward)
    held = list(stage.held)
    received, took = _taken(stage.received, ranks, storages, "forward")
    held += [ref.storage for ref in stage.received]
    sent, gathered = _gathered(stage.sent, ranks, storages, "forward")
    held += [ref.storage for ref in sent]
    arrived, took_back = _taken(stage.gradients_received, ranks, storages, "backward")
    given, gathered_back = _gathered(stage.gradients_sent, ranks, storages, "backward")
    forward = [*took, *forward, *gathered]
    backward = [*took_back, *backward, *gathered_back]
    parts = [ref.storage for ref in (*stage.received, *stage.gradients_received, *stage.gradients_sent)]
    dying = [*parts, *(ref.storage for ref in sent)]
    if backward:
        backward[-1] = replace(backward[-1], frees=tuple(dict.fromkeys((*backward[-1].frees, *dying))))
    return replace(
        stage, forward=tuple(forward), backward=tuple(backward), received=received, sent=sent,
        gradients_received=arrived, gradients_sent=given, held=tuple(dict.fromkeys(held)),
    )  # fmt: skip


def _whole(ref: Ref, ranks: int, storages: dict[int, Storage]) -> Ref:
    number = max(storages) + 1
    batch, length, *rest = ref.spec.shape
    spec = TensorSpec((batch, length * ranks, *rest), ref.spec.dtype)
    storages[number] = Storage(spec.nbytes, types.ACTIVATION, storages[ref.storage].module)
    return Ref(number, spec)


def _taken(refs: tuple[Ref, ...], ranks: int, storages: dict[int, Storage], phase: str) -> tuple[tuple[Ref, ...], list[Op]]:
    """What arrives, and this rank's part of it."""
    whole = tuple(_whole(ref, ranks, storages) for ref in refs)
    ops = [
        Op("aten.clone.default", (Ref(all_.storage, ref.spec),), (ref,), "", phase, 0, (ref.storage,))
        for ref, all_ in zip(refs, whole, strict=True)
    ]
    return whole, ops


def _gathered(refs: tuple[Ref, ...], ranks: int, storages: dict[int, Storage], phase: str) -> tuple[tuple[Ref, ...], list[Op]]:
    """What is sent, gathered from all parts."""
    whole = tuple(_whole(ref, ranks, storages) for ref in refs)
    attrs = ("axis:tp", f"ranks:{ranks}")
    ops = [
        Op("foretell.all_gather", (ref,), (all_,), "", phase, 0, (all_.storage,), (), attrs)
        for ref, all_ in zip(refs, whole, strict=True)
    ]
    return whole, ops
