"""Checks of single answers: pure, over what the parent received. Each names what it refuses.

    type      not a plain tensor with memory of its own, or on another device      (lazy subclasses)
    mutation  an input's values changed            guards    something beside an input changed
    alias     an output is an input's memory       deferred  an output changed after it was returned
    unwritten memory nobody wrote was returned     detached  a gradient is cut off
    values    wrong            accuracy  less precise than twice eager's error      nonfinite  NaN or infinite elsewhere
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foretell.tune.verify.compare import Errors, Problem, problem, torch_of
from foretell.tune.verify.draw import TaskCase
from foretell.tune.verify.sides import GUARD, Answer, KernelCall
from foretell.tune.verify.wire import BYTES, RawTensor


def answer_problem(case: TaskCase, sent: KernelCall, found: Answer) -> tuple[Problem | None, float]:
    """The first thing that is wrong with an answer to `sent`, which asks what the case asks; and its error."""
    wrong = form(case, found) or inputs_kept(case, sent, found) or late(found)
    return (wrong, 0.0) if wrong is not None else values(case, found)


def form(case: TaskCase, found: Answer) -> Problem | None:
    """Kinds, counts and places of the outputs."""
    if len(found.outputs) != len(case.eager.outputs):
        return Problem("kind", f"{len(found.outputs)} outputs, and the reference has {len(case.eager.outputs)}")
    for place, (mine, theirs) in enumerate(zip(found.facts, case.eager.facts, strict=True)):
        if mine.get("tensor") != theirs.get("tensor"):
            return Problem("kind", f"output {place} is a {mine.get('type')}, and the reference's a {theirs.get('type')}")
        if not mine.get("tensor"):
            continue
        if not mine.get("exact"):
            return Problem("type", f"output {place} is a {mine.get('type')}, not a torch.Tensor")
        if not mine.get("real"):
            return Problem("type", f"output {place} has no memory of its own")
        if mine.get("device") != theirs.get("device"):
            return Problem("type", f"output {place} is on {mine.get('device')}, and the reference's on {theirs.get('device')}")
        if mine.get("input") is not None and theirs.get("input") is None:
            return Problem("alias", f"output {place} is the memory of input {mine['input']}")
        if theirs.get("grad") and not mine.get("grad"):
            return Problem("detached", f"output {place} has no gradient, and the reference's has one")
    return None


def inputs_kept(case: TaskCase, sent: KernelCall, found: Answer) -> Problem | None:
    """Whether the inputs' storages are as they were, but for what the reference changes itself."""
    tensors = [one for one in sent.inputs if isinstance(one, RawTensor)]
    own = [one for one in case.question.inputs if isinstance(one, RawTensor)]
    if len(found.after) != len(tensors):
        return Problem("protocol", f"{len(found.after)} inputs came back of {len(tensors)}")
    for place, (raw, plain, after, theirs) in enumerate(zip(tensors, own, found.after, case.eager.after, strict=True)):
        if after == raw.data or theirs != plain.data:
            continue
        band = GUARD * BYTES[raw.dtype] if raw.offset != plain.offset else 0
        outside = after[:band] != raw.data[:band] or after[len(after) - band :] != raw.data[len(raw.data) - band :]
        if band and outside:
            return Problem("guards", f"memory beside input {place} was written")
        return Problem("mutation", f"input {place} was changed")
    return None


def late(found: Answer) -> Problem | None:
    """Whether the outputs, a moment after they were returned, are what they were."""
    for place, (one, digest) in enumerate(zip(found.outputs, found.late, strict=True)):
        if one is not None and hashlib.blake2b(one.data, digest_size=16).hexdigest() != digest:
            return Problem("deferred", f"output {place} changed after it was returned")
    return None


def values(case: TaskCase, found: Answer) -> tuple[Problem | None, float]:
    """Outputs, then gradients, against the oracle."""
    worst = 0.0
    for place, row in enumerate(zip(found.outputs, case.oracle.outputs, case.eager.outputs, strict=True)):
        room = case.room[place] if place < len(case.room) else None
        wrong, ratio = _compared(row, f"output {place}", room)
        worst = max(worst, ratio)
        if wrong is not None:
            return wrong, worst
    wanted = case.question.wanted
    if wanted is None:
        return None, worst
    names = [*(f"the gradient of input {place}" for place in wanted.inputs), *(f"the gradient of {name}" for name in wanted.parameters)]
    if len(found.gradients) != len(names):
        return Problem("gradients", f"{len(found.gradients)} gradients, and {len(names)} were asked for"), worst
    for name, *grads in zip(names, found.gradients, case.oracle.gradients, case.eager.gradients, strict=True):
        wrong, ratio = _compared(grads, name, None)
        worst = max(worst, ratio)
        if wrong is not None:
            return Problem("accuracy" if wrong.check == "accuracy" else "gradients", wrong.text), worst
    return None, worst


def _compared(row: Sequence[RawTensor | None], name: str, room: Errors | None) -> tuple[Problem | None, float]:
    found, oracle, eager = row
    return problem(found, oracle, eager, name=name, room=room)


def unwritten(plain: Answer, poisoned: Answer) -> Problem | None:
    """Whether memory that nobody wrote was returned: where torch.empty gives NaN there is NaN."""
    for place, (one, other) in enumerate(zip(plain.outputs, poisoned.outputs, strict=False)):
        if one is None or other is None or one.shape != other.shape or not one.is_float or not one.numel:
            continue
        new = torch_of(other).isnan() & ~torch_of(one).isnan()
        if bool(new.any()):
            return Problem("unwritten", f"{int(new.sum())} of {one.numel} places of output {place} are memory that was never written")
    return None


# ---------------------------------------------------------------- several answers


def determinism(answers: Sequence[Answer]) -> bool:
    """Whether the same question has the same bits as its answer each time."""
    first = answers[0].outputs
    return all(
        (a is None) == (b is None) and (a is None or b is None or a.data == b.data)
        for other in answers[1:] for a, b in zip(first, other.outputs, strict=True)
    )  # fmt: skip


def digest_of(answer: Answer) -> str:
    """Of all outputs together."""
    whole = hashlib.blake2b(digest_size=16)
    for one in answer.outputs:
        whole.update(repr((one.dtype, one.shape)).encode() + one.data if one is not None else b"none")
    return whole.hexdigest()


def passes_through(mine: Sequence[str], theirs: Sequence[str]) -> Problem | None:
    """Whether a candidate without kernels of its own runs the reference's own ops."""
    left, right = (Counter(name for name in names if name not in _MOVES) for names in (mine, theirs))
    if right and all(left[name] >= count for name, count in right.items()):
        return Problem("passthrough", f"it runs the reference's own ops: {', '.join(sorted(right))}")
    return None


_MOVES = frozenset(
    f"aten.{name}" for name in (
        "empty", "empty_like", "new_empty", "empty_strided", "zeros", "zeros_like", "ones_like", "full", "full_like", "copy_", "clone", "detach",
        "alias", "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "as_strided",
        "_to_copy", "fill_", "zero_",
    )
)  # fmt: skip
"""Ops that compute nothing."""

_COMPILERS = ("ptxas", "gcc", "g++", "cc", "c++", "clang", "clang++", "ld", "as", "nvcc", "cuobjdump", "ninja", "ldconfig", "uname")
_PRIVATE = ("/mem", "/environ", "/cmdline", "/maps", "/fd", "/stack")


def conduct(noted: Mapping[str, Any], *, settled: bool) -> Problem | None:
    """What a process did beside computing; `settled`: it has answered the same question before, and has nothing left to compile."""
    replaced = noted.get("replaced") or []
    if replaced:
        return Problem("tamper", f"it replaced {', '.join(map(str, replaced[:3]))}")
    changed = noted.get("settings") or {}
    if changed:
        name, (before, now) = next(iter(changed.items()))
        return Problem("settings", f"it changed a setting of torch: {name} from {before} to {now}")
    for kind, what in noted.get("events") or []:
        if kind == "network":
            return Problem("network", f"it reached for the network: {what}")
        if kind == "process" and (settled or not _compiles(str(what))):
            return Problem("processes", f"it started a process: {what}")
        if kind == "file" and (settled or _private(str(what))):
            return Problem("files", f"it opened {what} while it computed" if settled else f"it opened {what}")
    return None


def _compiles(what: str) -> bool:
    words = what.strip("[]'\"").replace("'", " ").replace(",", " ").split()
    return bool(words) and words[0].rsplit("/", 1)[-1] in _COMPILERS


def _private(path: str) -> bool:
    return path.startswith("/proc/") and path.endswith(_PRIVATE)


def faster_later(early: Sequence[float], later: Sequence[float]) -> Problem | None:
    """Whether all early calls took far longer than a later one: a kernel that waits while it is warmed up. The quickest of each, as
    other users of a machine only ever add to a time."""
    first, last = min(early), min(later)
    if first > 5 * last and first - last > 5e-3:
        return Problem("pace", f"its first calls take {first * 1e3:.1f} ms, and later ones {last * 1e3:.1f} ms")
    return None


def leak(before: int, after: int, calls: int, output_bytes: int) -> Problem | None:
    """Whether memory grows with calls."""
    grown = after - before
    if grown > max(8 << 20, calls * output_bytes // 2):
        return Problem("memory", f"it holds {grown >> 20} MiB more after {calls} calls")
    return None


# ---------------------------------------------------------------- tasks that draw


def drawn_alike(mine: Sequence[RawTensor | None], theirs: Sequence[RawTensor | None]) -> Problem | None:
    """Whether two outputs could be draws of one distribution: zeros, mean, spread, and the largest gap of their distributions."""
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return Problem("kind", f"output {place} is {a.dtype}{list(a.shape)}, and the reference's {b.dtype}{list(b.shape)}")
        x, y = torch_of(a).double().flatten().sort()[0], torch_of(b).double().flatten().sort()[0]
        if not bool(x.isfinite().all()):
            return Problem("nonfinite", f"output {place} is not finite")
        points = torch.cat([x, y])
        gap = float((torch.searchsorted(x, points, right=True) - torch.searchsorted(y, points, right=True)).abs().max()) / x.numel()
        allowed = 3.0 * (2.0 / x.numel()) ** 0.5  # far beyond what chance gives: about 1 in 10^7
        if gap > allowed:
            return Problem("randomness", f"output {place} is drawn otherwise: distributions {gap:.3f} apart, {allowed:.3f} is chance")
    return None


def slope(plus: RawTensor, minus: RawTensor, gradient: RawTensor, direction: RawTensor, step: float, cotangent: RawTensor) -> Problem | None:
    """Whether a gradient is that of the draw it belongs to: against the difference of two forwards with the same seed."""
    g = torch_of(cotangent).double()
    measured = float(((torch_of(plus).double() - torch_of(minus).double()) * g).sum()) / (2 * step)
    told = float((torch_of(gradient).double() * torch_of(direction).double()).sum())
    size = float(torch_of(gradient).double().norm() * torch_of(direction).double().norm()) + abs(measured) + 1e-12
    if abs(measured - told) > 0.02 * size:
        return Problem("gradients", f"the gradient of a draw says {told:.3e} where forwards with that seed say {measured:.3e}")
    return None
