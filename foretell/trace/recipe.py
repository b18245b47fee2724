"""How a step is run: the choices a user makes besides model, batch and hardware. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from foretell.errors import UnknownName, UserError
from foretell.kernels.names import KERNELS

OPTIMIZERS = (
    "sgd", "sgd-loop", "momentum", "momentum-fused", "momentum-loop",
    "adam", "adam-fused", "adam-foreach", "adam-loop",
    "adamw", "adamw-fused", "adamw-foreach", "adamw-loop",
)  # fmt: skip
COMPUTES = {
    "fp32": "float32", "bf16-autocast": "bfloat16", "fp16-autocast": "float16", "bf16": "bfloat16", "fp16": "float16",
    "fsdp-bf16": "bfloat16", "fsdp-fp16": "float16", "tf32": "tf32",
}  # fmt: skip
"""Precision → the dtype of products."""
PRECISIONS = tuple(COMPUTES)
RECOMPUTES = ("none", "full", "selective", "host")
"""full: every block again in backward; selective: all of it but products and attention; host: as full, from inputs that wait in host memory,
which is no other trace."""
COMPILES = ("none", "blocks", "model", "graphs")
MODES = ("train", "infer")
ADAPTER_KINDS = ("lora", "rslora", "dora", "dora-norm")
"""lora: the update times alpha/rank; rslora: times alpha/√rank; dora: lora with the length of every row of the weight trained
apart, by peft's ops; dora-norm: the same function, which never multiplies the update out."""
NF4_FORMATS = ("nf4", "nf4-double")
"""Of a frozen weight in 4-bit NormalFloat: with fp32 scales, or with scales in 8 bits."""
BASE_FORMATS = ("bf16", "float8", "int8", *NF4_FORMATS)
"""Of a frozen weight under adapters: as it is in bf16, or in codes with a scale for every 64 weights."""
ADAPTED = "adapted"
"""What `base` calls all layers with an adapter."""
CODED_FORMATS = ("int8", "int4")
"""Of AdamW's moments that stay on the device beside weights of their own format: codes with a scale for every block."""
BLOCK = 256
"""Elements that have one scale where moments have 8 bits."""
ALPHA = 8.0
"""peft's default `lora_alpha`."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Small trained updates of frozen linear layers."""

    kind: str = "lora"
    """One of ADAPTER_KINDS."""
    rank: int = 16
    alpha: float = ALPHA
    dropout: float = 0.0
    """Of what goes into an adapter."""
    targets: tuple[str, ...] = ()
    """Layers that get one: names or ends of paths, a number written as `*`; empty: all linear layers inside the blocks."""
    train: tuple[str, ...] = ()
    """Modules, named the same way, that are trained whole."""

    def __post_init__(self) -> None:
        if self.kind not in ADAPTER_KINDS:
            raise UnknownName("kind of adapter", str(self.kind), ADAPTER_KINDS, f"known: {', '.join(ADAPTER_KINDS)}")
        if type(self.rank) is not int or self.rank < 1:
            raise UserError(f"lora must be positive, got {self.rank}", "give lora a value above zero")
        if not 0 < self.alpha < float("inf"):
            raise UserError(f"alpha of adapters is {self.alpha}", "a number above zero, such as 16")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout of adapters is {self.dropout}, not a share", "a number from 0 to below 1")

    @property
    def scale(self) -> float:
        """What the product of the two factors is multiplied with."""
        return self.alpha / (self.rank**0.5 if self.kind == "rslora" else self.rank)

    def to_json(self) -> dict[str, Any]:
        """What has its default is left out, but for kind and rank."""
        usual = Adapters(kind=self.kind, rank=self.rank)
        said = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {name: value for name, value in said.items() if name in ("kind", "rank") or getattr(self, name) != getattr(usual, name)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Adapters:
        given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**given)


SYNC_FORMATS = ("fp32", "int8")
"""In which replicas that step alone tell each other how far they have come."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Replicas step alone for some steps, then an outer optimizer joins them: DiLoCo (arXiv 2311.08105).

    What a replica has moved since the last round, averaged over the replicas, is the gradient of SGD with momentum on
    weights that all replicas begin the next round from.
    """

    every: int
    """Steps of a round."""
    lr: float = 0.7
    """Of the outer optimizer."""
    momentum: float = 0.9
    nesterov: bool = True
    format: str = "fp32"
    """int8: in 8 bits with a scale for every 256; what rounding cut off is sent in the next round (error feedback)."""
    delay: int = 0
    """Steps of the next round that go on while a round's exchange is under way; 0: replicas wait for it."""
    quorum: int = 0
    """A round is finished by so many replicas or more, whoever they are, and replicas come and go; 0: by all, always the same."""
    grace: float = 10.0
    """With a quorum: seconds that a round waits for the other replicas once so many have finished theirs."""

    def to_json(self) -> dict[str, Any]:
        """The outer optimizer by itself; of the rest what differs from the usual."""
        usual = Sync(every=self.every)
        outer = {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov}
        more = {name: getattr(self, name) for name in ("format", "delay", "quorum", "grace") if getattr(self, name) != getattr(usual, name)}
        return {"every": self.every, "outer": outer, **more}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Sync:
        return cls(**{**data.get("outer", {}), **{name: value for name, value in data.items() if name != "outer"}})


def sync_told(sync: Sync) -> str:
    """`every 100 steps, SGD 0.7 with Nesterov momentum 0.9, in int8`."""
    momentum = f" with {'Nesterov ' if sync.nesterov else ''}momentum {sync.momentum:g}" if sync.momentum else ""
    delay = f", {sync.delay} steps of the next round meanwhile" if sync.delay else ""
    quorum = f", by {sync.quorum} replicas or more" if sync.quorum else ""
    return f"every {sync.every} steps, outer SGD {sync.lr:g}{momentum}, in {sync.format}{delay}{quorum}"


_KINDS = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA", "dora-norm": "DoRA without the product"}


def adapters_told(adapters: Adapters, base: Mapping[str, str]) -> str:
    """`LoRA rank 16 on q_proj, v_proj on a base in nf4`."""
    words = f"{_KINDS[adapters.kind]} rank {adapters.rank}" + (f" on {', '.join(adapters.targets)}" if adapters.targets else "")
    words += f", {', '.join(adapters.train)} trained whole" if adapters.train else ""
    formats = [kind if pattern == ADAPTED else f"{kind} for {pattern}" for pattern, kind in base.items()]
    return words + (f", base in {', '.join(formats)}" if formats else "")


def changes_training(sync: Sync) -> str:
    """What people must know of it."""
    return f"changes training: replicas step alone for {sync.every} steps, then an outer optimizer joins them"


def known_base(pattern: str, kind: str) -> None:
    """Raise where that is no format of a base."""
    if kind not in BASE_FORMATS:
        raise UnknownName(f"format of the base of {pattern}", str(kind), BASE_FORMATS, f"known: {', '.join(BASE_FORMATS)}")


def base_untrained(kinds: Iterable[str]) -> str:
    """Why a base in these formats needs adapters."""
    kind = next(iter(kinds))
    return f"{kind} needs LoRA adapters: a {'4-bit base' if kind in NF4_FORMATS else 'base in it'} cannot be trained"


def coded_problems(state_format: str, optimizer: str, scaled: bool) -> Iterator[tuple[str, str]]:
    """What moments in codes do not go with, and what to use instead."""
    if state_format not in CODED_FORMATS:
        return
    if optimizer not in ("adamw-fused", "adam-fused"):
        yield f"the optimizer is {optimizer}, and codes are those of AdamW's moments", "adamw-fused, or states in fp32"
    if scaled:
        yield "gradients are scaled fp16 ones, which codes were never checked with", "bf16-mixed, or states in fp32"


_LEFT_OUT: dict[str, object] = {
    "channels_last": False, "adapters": None, "base": [], "loss_chunks": 1, "state_format": "fp32", "replicas": 1, "sync": None,
    "packed": None, "kernels": [],
}  # fmt: skip
"""Of a recipe's JSON where they are these, their defaults."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a step that is neither the model nor its batch."""

    optimizer: str = "adamw-fused"
    """One of OPTIMIZERS; a bare name is what PyTorch picks on CUDA (foreach)."""
    precision: str = "bf16-autocast"
    """fp32; tf32: fp32, with products that round their inputs; bf16/fp16 autocast over fp32 weights; bf16/fp16 throughout (fp16:
    inference alone); fsdp-bf16, fsdp-fp16 = fp32 shards, compute in bf16 or fp16. Where gradients are in fp16, the loss is scaled."""
    recompute: str = "none"
    """none; full = every block; selective = keep matmul and attention outputs, recompute the rest."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    clip: float | None = None
    """Gradient norm limit, as in clip_grad_norm_."""
    lora: int | None = None
    """Rank of LoRA adapters on every linear layer inside the blocks; the base is frozen. Short for `adapters`, whose rank it is."""
    nf4: bool = False
    """Hold the frozen base of the adapted layers in 4-bit NormalFloat. Short for a `base` with that format."""
    adapters: Adapters | None = None
    """What is trained instead of the model."""
    base: tuple[tuple[str, str], ...] = ()
    """Layers, by a pattern or as `adapted`, and the format that their frozen weights are held in."""
    freeze: tuple[str, ...] = ()
    """Parameters whose name starts with one of these are not trained."""
    mode: str = "train"
    """train, or infer for one forward without gradients."""
    compile: str = "none"
    """none; model: `model.compile()`, one graph, loss and optimizer stay eager; blocks: each block; graphs: the model with
    its launches recorded as CUDA graphs (mode "reduce-overhead")."""
    shards: int = 1
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    loss_chunks: int = 1
    """Pieces of a micro-batch's tokens of which the output layer and the cross entropy are computed one after another."""
    state_format: str = "fp32"
    """Of AdamW's moments: fp32 (the weights' own), or one of CODED_FORMATS."""
    replicas: int = 1
    """Groups of such ranks that step alone, as `sync` says."""
    sync: Sync | None = None
    channels_last: bool = False
    """Images and the weights of convolutions with their channels innermost (`memory_format=torch.channels_last`)."""
    kernels: tuple[str, ...] = ()
    """Ops of the model that foretell's own kernels do, by name."""
    packed: tuple[int, int] | None = None
    """A server's step instead of a batch: tokens of any sequences side by side, and how many of them sample (inference)."""

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", OPTIMIZERS), ("precision", PRECISIONS), ("recompute", RECOMPUTES), ("mode", MODES),
            ("compile", COMPILES), ("state_format", ("fp32", *CODED_FORMATS)),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in known:
                raise UnknownName(name, str(value), known, f"known: {', '.join(known)}")
        for name in ("accumulate", "shards", "clip", "loss_chunks"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} must be positive, got {value}", f"give {name} a value above zero")
        if self.precision == "fp16" and self.mode == "train":
            raise UserError("fp16 weights cannot be trained: updates round to nothing", "fp16-mixed, which keeps fp32 weights; or --infer")
        for name in self.kernels:
            if name not in KERNELS:
                raise UnknownName("kernel", str(name), KERNELS, f"known: {', '.join(KERNELS)}")
        self._settle_adapters()
        for problem, remedy in coded_problems(self.state_format, self.optimizer, "fp16" in self.precision):
            raise UserError(f"states in {self.state_format}: {problem}", remedy)

    def _settle_adapters(self) -> None:
        """The short words and the long ones say the same."""
        if self.lora is not None and self.adapters is None:
            object.__setattr__(self, "adapters", Adapters(rank=self.lora))
        if self.nf4 and not self.base:
            object.__setattr__(self, "base", ((ADAPTED, "nf4"),))
        if self.base and self.adapters is None:
            raise UserError(base_untrained(kind for _, kind in self.base), "add --lora RANK, for example --lora 16")
        for pattern, kind in self.base:
            known_base(pattern, kind)
        rank = None if self.adapters is None else self.adapters.rank
        if self.lora not in (None, rank):
            raise UserError(f"lora is {self.lora} and the adapters have rank {rank}", "give one of the two")
        object.__setattr__(self, "lora", rank)
        object.__setattr__(self, "nf4", bool(self.base))

    def to_json(self) -> dict[str, object]:
        """What the short words say is said by them alone."""
        said = asdict(self) | {"freeze": list(self.freeze)}
        said["adapters"] = None if self.adapters is None or self.adapters == Adapters(rank=self.adapters.rank) else self.adapters.to_json()
        said["sync"] = None if self.sync is None else self.sync.to_json()
        said["kernels"] = list(self.kernels)
        said["base"] = [] if self.base == ((ADAPTED, "nf4"),) else [list(pair) for pair in self.base]
        return {name: value for name, value in said.items() if name not in _LEFT_OUT or value != _LEFT_OUT[name]}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Recipe:
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        if values.get("packed") is not None:
            values["packed"] = tuple(values["packed"])  # type: ignore[arg-type]
        for name in ("freeze", "kernels"):
            if name in values:
                values[name] = tuple(values[name])  # type: ignore[arg-type]
        if isinstance(values.get("adapters"), Mapping):
            values["adapters"] = Adapters.from_json(values["adapters"])  # type: ignore[arg-type]
        if isinstance(values.get("sync"), Mapping):
            values["sync"] = Sync.from_json(values["sync"])  # type: ignore[arg-type]
        if "base" in values:
            values["base"] = tuple((str(pattern), str(kind)) for pattern, kind in values["base"])  # type: ignore[attr-defined]
        return cls(**values)  # type: ignore[arg-type]
