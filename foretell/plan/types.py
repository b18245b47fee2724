"""How to run a model: the values of a plan. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from foretell.trace.recipe import CODED_FORMATS as CODED_FORMATS
from foretell.trace.recipe import COMPILES as COMPILES
from foretell.trace.recipe import SYNC_FORMATS as SYNC_FORMATS
from foretell.trace.recipe import Adapters as Adapters
from foretell.trace.recipe import Sync as Sync

SCHEMA_VERSION = 1
OWN_KERNEL = "foretell"
"""What a plan calls a kernel of `kernels/`."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh axes from the outermost (ranks far apart) to the innermost (ranks side by side)."""
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zero-bubble-v")
LOOPED = {"interleaved-1f1b", "zero-bubble", "zero-bubble-v"}
"""Schedules in which a rank may hold several stages."""
FP16 = "fp16-mixed"
"""fp32 weights, fp16 compute, and a loss that is scaled so that gradients neither vanish nor overflow."""
PRECISIONS = ("fp32", "bf16-mixed", FP16, "bf16")
"""bf16-mixed: fp32 weights, bf16 compute (autocast; FSDP2's MixedPrecisionPolicy where parameters are sharded)."""
FLOAT8 = "float8"
"""bf16-mixed with products of the blocks' linear layers in float8: where torchao is installed. Run, not predicted."""
MASTER = "bf16-master"
"""bf16 weights and gradients, fp32 weights and moments in the optimizer: as fully_shard's mixed precision computes."""
MODES = ("keep", "recompute", "selective", "host", "disk", "recompute-host")
AWAY = ("host", "disk", "recompute-host")
"""Residencies of activations that are moved."""
REST = "rest"
"""What `Plan.states` calls the parameters outside all blocks."""
TIERS = ("device", "host", "disk")
"""Where optimizer states may be between updates."""
FORMATS = ("fp32", "split", "bf16", "int8", "int4", "split-int8")
"""Of optimizer states: fp32; split: what rounding cut off instead of whole master weights; bf16: moments in bf16; int8: moments
in 8 bits with a scale for every 256; int4: in 4 bits with one for every 128; split-int8: split and int8. CODED_FORMATS go beside
weights without a master too, where states stay on the device."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many ranks lie along each axis."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Experts are spread over ranks of the data axes: ep adds no ranks of its own."""

    @property
    def world(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def spread(self) -> int:
        """Ranks among which `fully_shard` spreads parameters, or copies of them: those that see other samples, or other
        positions of a sample."""
        return self.data * self.cp


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Stages and the order their micro-batches run in."""

    schedule: str = "1f1b"
    cuts: tuple[str, ...] = ()
    """Block that begins each stage after the first. What runs before the blocks is in the first stage, what runs
    after them in the last. Stage s is on rank s % pp (zero-bubble-v: on rank s, then back)."""

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1


@dataclass(frozen=True, kw_only=True)
class Split:
    """How tensor parallelism splits modules; without rules they are derived from the model's dataflow."""

    rules: Mapping[str, str] = field(default_factory=dict)
    """Module path, a block's number written as `*` → column, row, column:N (N fused parts), vocab, sequence, ..."""
    sequence: bool = True
    """Between split regions, activations are split along the sequence."""
    loss: bool = True
    """The loss is computed on logits that stay split along the vocabulary, where the loss allows it."""


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Where a block's activations are between forward and backward."""

    mode: str = "keep"
    """keep; recompute = the whole block again; selective = keep results of products and attention; host, disk = moved there;
    recompute-host = the whole block again, from inputs that were moved to the host."""


KEEP = Residency()


def computed(mode: str) -> str:
    """keep, recompute or selective: which ops a block of this residency runs, wherever what it keeps is moved to."""
    return {"host": "keep", "disk": "keep", "recompute-host": "recompute"}.get(mode, mode)


def moved_to(mode: str) -> str:
    """host or disk for residencies that move, the residency itself for those that do not."""
    return mode.removeprefix("recompute-") if mode in AWAY else mode


WEIGHT_FORMATS = ("bf16", "fp8", "int8", "int4")
KV_FORMATS = ("bf16", "fp8", "int8")
"""bf16 stands for the 16 bits, or 32, that the model itself is in."""


@dataclass(frozen=True, kw_only=True)
class ServeLayout:
    """Ranks, formats and limits of a server."""

    replicas: int = 1
    tp: int = 1
    pp: int = 1
    weights: str = "bf16"
    """Of products inside blocks; one of WEIGHT_FORMATS."""
    kv: str = "bf16"
    """One of KV_FORMATS."""
    page: int = 16
    """Tokens."""
    pages: int = 1024
    """Of each replica."""
    running: int = 64
    """Sequences of each replica."""
    tokens: int = 512
    """Of a step, of each replica."""
    share: bool = True
    """Prompts that begin alike share pages."""
    graphs: bool = True
    """The host's launches are replayed."""
    compiled: bool = True
    """Blocks under torch.compile."""
    invariant: bool = False
    """The bits of an answer depend on nothing else that is served."""
    load: str = ""
    """It was planned for, as `--load` takes it."""
    slo: str = ""

    @property
    def devices(self) -> int:
        return self.replicas * self.tp * self.pp

    def to_json(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServeLayout:
        return cls(**data)

    @property
    def not_run_yet(self) -> tuple[str, ...]:
        """What of it `foretell serve` does not do yet on a GPU."""
        found = []
        if self.weights != "bf16":
            found.append(f"{self.weights} weights")
        if self.kv != "bf16":
            found.append(f"{self.kv} keys and values")
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to run one model on one machine or cluster."""

    model: Mapping[str, Any]
    """What `trace.load.model.Source` takes: model, overrides, seq, image, loss; `parameters`, `digest`, `shapes` and `blocks` say
    which model that was (see `plan.recipe.model_of`)."""
    hardware: str
    """As `--on` takes it."""
    mesh: Mesh = Mesh()
    placement: tuple[int, ...] = ()
    """Device of each rank, rank by rank, devices numbered node by node; empty: rank r is on device r."""
    pipeline: Pipeline | None = None
    split: Split | None = None
    micro_batch: int = 1
    """Samples of one micro-batch on one data rank."""
    accumulate: int = 1
    """Micro-batches of one optimizer step on one data rank; a pipeline has them all in flight."""
    precision: str = "bf16-mixed"
    optimizer: str = "adamw-fused"
    clip: float | None = 1.0
    blocks: Mapping[str, Residency] = field(default_factory=dict)
    """Block path, or a range such as `blocks.0-11` or `blocks.*` → residency; others keep."""
    states: Mapping[str, str] = field(default_factory=dict)
    """Block path or range, or `rest` → where optimizer states are between updates; others are on the device."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Block path or range → host: weights that come to the device for forward and for backward alone."""
    state_format: str = "fp32"
    adapters: Adapters | None = None
    """What is trained instead of the model, whose own weights stay as they are."""
    base: Mapping[str, str] = field(default_factory=dict)
    """Layers with an adapter, by a name or the end of a path, or `adapted` for all of them → one of BASE_FORMATS: the format that
    their frozen weights are held in."""
    loss_chunks: int = 1
    """Pieces of a micro-batch's tokens of which the output layer and the cross entropy are computed one after another, forward
    and backward: the logits of one of them exist at a time."""
    sync: Sync | None = None
    """How replicas stay together; None: they sum their gradients in every step."""
    cpu_share: float = 0.0
    """Share of the states on the host that the CPU updates; the device updates the others."""
    reshard: bool | int = True
    """FSDP2's reshard_after_forward."""
    compile: str = "none"
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Op → what computes it: OWN_KERNEL for an op of `kernels/`; `compiled` for a loss."""
    serve: ServeLayout | None = None
    """How the model is served instead; None: it is trained. `mesh` has the same ranks."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """What was predicted when the plan was made: step_seconds, low_seconds, high_seconds, memory_bytes, ..."""
    notes: tuple[str, ...] = ()
    version: int = SCHEMA_VERSION

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch * self.accumulate * self.mesh.data

    @property
    def together(self) -> Mesh:
        """The ranks that do every step together: all, or those of one replica where replicas step alone."""
        return self.mesh if self.sync is None else replace(self.mesh, dp_replicate=1)

    @property
    def offloads(self) -> bool:
        """Whether the optimizer is foretell's own: states are elsewhere, or beside bf16 weights."""
        return bool(self.states or self.weights) or self.precision == MASTER

    @property
    def coded(self) -> bool:
        """Whether AdamW's moments are codes beside weights that have no master."""
        return self.state_format in CODED_FORMATS and not self.offloads

    def device_of(self, rank: int) -> int:
        """The device that a rank of the mesh is on."""
        return self.placement[rank] if self.placement else rank

    def with_(self, **changes: Any) -> Plan:
        return replace(self, **changes)
