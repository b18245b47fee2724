"""Peak bytes of a device in training a transformer, counted from its shape and its software stack.

    states        parameters, gradients, optimiser: bytes a parameter, whole or sharded
    kept          what forward leaves for backward, times the micro-batches a pipeline rank holds
    working       the layer under way, logits, gathered shards
    around        the context, communicators and buckets, and what the allocator cannot fill

The fullest pipeline rank counts. Nothing was measured on several devices here: the answer is counted and assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretell.cost import transformer as work
from foretell.cost.stage_schedule import GPIPE, ZB_1P, ZB_2P, ZB_V, partition
from foretell.cost.transformer import Training
from foretell.hardware.types import Device

CONTEXT_BYTES = 1.6e9
"""What a process holds before the first tensor: libraries and kernels; 1,271 MiB on V100 and 1,573 on A100 were seen."""
GATHERED = 4
"""Whole activations that stand while a layer or the head runs under sequence parallelism: inputs and gradients that
were gathered; assumed."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest rank."""

    states: float
    kept: float
    working: float
    fragments: float
    buffers: float

    @property
    def allocated(self) -> float:
        """What tensors take: torch's max_memory_allocated."""
        return self.states + self.kept + self.working

    @property
    def reserved(self) -> float:
        """What the allocator takes from the device for them."""
        return self.allocated + self.fragments

    @property
    def total(self) -> float:
        """What nvidia-smi shows for the process."""
        return self.reserved + self.buffers + CONTEXT_BYTES


def peak(run: Training) -> tuple[Memory, ...]:
    """Every rank of the pipeline, the first stage first."""
    layers = partition(run.layers, run.pp * run.chunks)
    return tuple(_rank(run, rank, [layers[stage] for stage in _stages(run, rank)]) for rank in range(run.pp))


def reported(run: Training, device: Device) -> float:
    """Bytes in the sense in which the framework's users report them (`Stack.reports`), at most what the device has."""
    ranks = peak(run)
    if run.stack.reports == "allocated":
        found = max(rank.allocated for rank in ranks)
    elif run.stack.reports == "reserved":
        found = max(rank.reserved for rank in ranks)
    else:
        found = ranks[0].total
    return min(found, float(device.memory_bytes))


def _stages(run: Training, rank: int) -> list[int]:
    if run.schedule == ZB_V and run.chunks == 2:
        return [rank, 2 * run.pp - 1 - rank]
    return list(range(rank, run.pp * run.chunks, run.pp))


def _rank(run: Training, rank: int, layers: list[int]) -> Memory:
    held, first, last = sum(layers), rank == 0, rank == run.pp - 1
    root = work.outside_parameters(run)
    ends = 0.0 if not (first or last) else root if run.stack.tied or run.pp == 1 else root / 2
    states = _states(run, held * work.layer_parameters(run) + ends)
    inside = in_flight(run, rank)
    kept = held * kept_bytes(run) * inside
    if run.pp > 1:
        kept += run.tokens * run.hidden * run.wide / (run.tp if run.sequence_parallel else 1) * inside
    working = layer_bytes(run)
    if run.sequence_parallel and run.tp > 1:
        working += GATHERED * run.tokens * run.hidden * run.wide
    if last and run.vocab:
        working += run.tokens * run.vocab / run.tp * run.stack.logit_bytes
    if run.shard in ("zero2", "zero3"):
        block = work.layer_parameters(run)
        working += 2 * block * (run.stack.gather_bytes + run.stack.reduce_bytes) + 2 * ends
    full = states + kept + working
    parameters = held * work.layer_parameters(run) + ends
    return Memory(
        states=states, kept=kept, working=working, fragments=full * run.stack.fragments,
        buffers=min(run.stack.buffer_bytes, 4 * parameters) if run.world > 1 else 0.0,
    )  # fmt: skip


def _states(run: Training, parameters: float) -> float:
    """Parameters, gradients and optimiser states of a rank."""
    whole, spread = run.stack.state_bytes
    size = run.sharded
    host = run.offload.lower()
    if "optim" in host or "cpu" in host:
        spread = min(spread, 4.0)
    if run.shard == "zero3":
        return parameters * (whole + spread) / size
    if run.shard == "zero2":
        return parameters * (2 + (whole - 2 + spread) / size)
    if run.shard != "zero1":
        return parameters * (whole + spread)
    kept = whole or spread / 2
    return parameters * (kept + (whole + spread - kept) / size)


def in_flight(run: Training, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at once, counted in whole ranks (all its parts)."""
    if run.pp == 1:
        return 1.0
    if run.schedule == GPIPE:
        return float(run.micros)
    if run.schedule == ZB_2P:
        return float(min(run.micros, 2 * run.pp - 1))
    if run.schedule in (ZB_1P, ZB_V):
        return float(min(run.micros, run.pp))
    if run.chunks > 1:
        ahead = (run.chunks - 1) * run.pp + 2 * (run.pp - 1 - rank) + 1
        return min(run.micros * run.chunks, ahead) / run.chunks
    return float(min(run.micros, run.pp - rank))


def kept_bytes(run: Training) -> float:
    """Bytes that one layer's forward leaves for backward, of one micro-batch."""
    entry = run.tokens * run.hidden * run.wide / (run.tp if run.sequence_parallel else 1)
    if run.recompute == "full":
        return 0.0 if "activation" in run.offload.lower() else entry
    if run.recompute == "selective" and run.stack.selective == "ops":
        saved = work.products(run)[::2]
        return 2 * entry + run.wide * run.tokens * sum(outputs for _, outputs in saved)
    if run.recompute == "selective" and run.stack.selective == "layers":
        return (entry + layer_bytes(run)) / 2
    return layer_bytes(run) - (scores_bytes(run) if run.recompute == "selective" else 0.0)


def layer_bytes(run: Training) -> float:
    """Everything one layer's forward makes that backward reads."""
    rows, h, q, kv = run.tokens, run.hidden, run.head_dim * run.local_heads, run.kv_width
    split = run.tp if run.sequence_parallel else 1
    ffn = run.ffn / run.tp if not run.experts else float(run.ffn * run.topk)
    if run.gated:
        wide = run.wide * (4 * h / split + q + 2 * kv + q + 3 * ffn)
    else:
        wide = run.wide * (4 * h / split + 2 * q + 2 * kv + 2 * ffn) + 2 * h / split
    if run.eight_bit:
        wide += ffn + h / split
    return rows * wide + scores_bytes(run)


def scores_bytes(run: Training) -> float:
    """Scores, softmax and dropout's mask where attention is spelt out: five bytes a score in 16 bits."""
    if run.stack.attention != "math":
        return 0.0
    return 5.0 * run.wide / 2 * run.micro * run.local_heads * (run.seq / run.cp) * run.seq
