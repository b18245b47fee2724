"""What would lower the peak, and by how much: estimated from the trace at hand, without tracing again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from foretell.cost.memory import careful_limit, run_order, sizes_for
from foretell.cost.prediction import Memory, Remedy
from foretell.cost.timeline import Replay, Sizes
from foretell.hardware.types import Cluster, Overhead
from foretell.plan.precision import missing
from foretell.trace import types
from foretell.trace.recipe import Recipe


def remedies(
    trace: types.Trace, recipe: Recipe, memory: Memory, cluster: Cluster, overhead: Overhead, micro_batch: int,
    *, expandable: bool = False,
) -> tuple[Remedy, ...]:  # fmt: skip
    """Changes that save at least one percent of the device, those that make it fit first, then the largest."""
    beside = overhead.context_bytes + overhead.nccl_for(cluster)
    limit = careful_limit(trace, memory.capacity_bytes, beside)

    def judged(remedy: Remedy) -> Remedy:
        return replace(remedy, fits=memory.device_bytes - remedy.saves_bytes - beside <= limit)

    found = [judged(remedy) for remedy in _all(trace, recipe, memory, cluster, overhead, micro_batch, expandable)]
    worth = [remedy for remedy in found if remedy.saves_bytes > 0.01 * memory.device_bytes]
    return tuple(sorted(worth, key=lambda remedy: (not remedy.fits, _dear(remedy), -remedy.saves_bytes)))


def _dear(remedy: Remedy) -> int:
    """Changes of the mathematics come after those that leave it alone."""
    return int(remedy.flag.startswith(("--lora", "--precision", "--seq")))


def _all(
    trace: types.Trace, recipe: Recipe, memory: Memory, cluster: Cluster, overhead: Overhead, micro_batch: int,
    expandable: bool,
) -> Iterator[Remedy]:  # fmt: skip
    held = memory.categories
    moving = sum(held.get(name, 0) for name in ("activations", "logits", "temporaries"))
    state = sum(held.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
    training = recipe.mode == "train"
    in_update, elsewhere = _peaks(trace, sizes_for(cluster, overhead))
    above = memory.allocated_bytes - in_update
    if training and recipe.recompute == "none":
        saved = min(recompute_saves(trace), above)
        yield _remedy("recompute every block in backward", "--recompute full", saved, "about a third more compute")
    if micro_batch > 1:
        flag = f"--micro-batch {micro_batch // 2}" + (f" --accumulate {recipe.accumulate * 2}" if training else "")
        saved = moving // 2
        if training and recipe.accumulate == 1:  # gradients then live through the second forward
            saved -= _bytes_of(trace, types.GRADIENT) - held.get("gradients", 0)
        saved = min(saved, above) * memory.reserved_bytes // memory.allocated_bytes
        change = "halve the micro-batch, accumulate twice as often" if training else "halve the batch"
        yield _remedy(change, flag, saved, "smaller kernels")
    if not expandable:
        yield _remedy(
            "let allocator segments grow", "--expandable-segments", _defragmented(trace, memory, cluster, overhead),
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )  # fmt: skip
    if training and not recipe.optimizer.endswith("-fused") and recipe.optimizer.startswith("adam"):
        kind = recipe.optimizer.partition("-")[0]
        saved = min(held.get("temporaries", 0), memory.allocated_bytes - elsewhere)
        yield _remedy("use the fused optimizer", f"--optimizer {kind}-fused", saved, "none: it is faster")
    if training and state > memory.device_bytes * 0.3:
        count = cluster.count
        name = cluster.device.name
        yield _remedy(f"shard over {2 * count} devices", f"--on {shlex.quote(f'{name}:{2 * count}')}", state // 2, "twice the devices")
        if recipe.lora is None:
            frozen = held.get("gradients", 0) + held.get("optimizer", 0)
            yield _remedy("train LoRA adapters only", "--lora 16", int(frozen * 0.97), "trains a different thing")
        if recipe.precision.endswith("autocast") and not missing("bfloat16", cluster):
            yield _remedy("keep weights and optimizer state in bf16", "--precision bf16", state // 2, "changes the numerics")


def _peaks(trace: types.Trace, sizes: Sizes) -> tuple[int, int]:
    """Highest allocated bytes while the optimizer works, which fewer activations do not lower, and elsewhere."""
    replay, peaks = Replay(trace, sizes), [0, 0]

    def look(op: types.Op | None, _: tuple[int, ...]) -> None:
        where = int(op is None or op.phase != "update")
        peaks[where] = max(peaks[where], replay.allocator.allocated)

    replay.watch(look)
    replay.start()
    for name in dict.fromkeys(run_order(trace)):
        replay.run(name)
    return peaks[0], peaks[1]


def _bytes_of(trace: types.Trace, role: str) -> int:
    return sum(storage.nbytes for storage in trace.storages.values() if storage.role == role)


def _remedy(change: str, flag: str, saves: int, costs: str) -> Remedy:
    return Remedy(change=change, flag=flag, saves_bytes=max(0, int(saves)), fits=False, costs=costs)


def recompute_saves(trace: types.Trace) -> int:
    """Saved activations inside blocks, less one input per block and one block at work."""
    blocks = [str(path) for path in trace.meta.get("blocks", ())]  # type: ignore[attr-defined]
    if not blocks:
        return 0
    per_block: dict[str, int] = dict.fromkeys(blocks, 0)
    for storage in trace.storages.values():
        if storage.saved and storage.role == types.ACTIVATION:
            for path in _prefixes(storage.module):
                if path in per_block:
                    per_block[path] += storage.nbytes
                    break
    inputs = sum(_input_bytes(trace, path) for path in blocks)
    return max(0, sum(per_block.values()) - max(per_block.values()) - inputs)


def _prefixes(module: str) -> Iterator[str]:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def _input_bytes(trace: types.Trace, block: str) -> int:
    """What enters a block: the first activation its first op reads."""
    for program in ("micro_first", "forward"):
        for op in trace.programs[program].ops if program in trace.programs else ():
            if op.phase == "forward" and (op.module == block or op.module.startswith(block + ".")) and op.inputs:
                return op.inputs[0].spec.nbytes
    return 0


def _defragmented(trace: types.Trace, memory: Memory, cluster: Cluster, overhead: Overhead) -> int:
    replay = Replay(trace, sizes_for(cluster, overhead), expandable=True)
    replay.start()
    for name in dict.fromkeys(run_order(trace)):
        replay.run(name)
    return memory.reserved_bytes - replay.allocator.peak_reserved
