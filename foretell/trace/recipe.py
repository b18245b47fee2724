"""How a step is run: the choices a user makes besides model, batch and hardware. Plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from foretell.errors import UnknownName, UserError

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
RECOMPUTES = ("none", "full", "selective")
COMPILES = ("none", "blocks", "model", "graphs")
MODES = ("train", "infer")


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
    """Rank of LoRA adapters on every linear layer inside the blocks; the base is frozen."""
    nf4: bool = False
    """Hold the frozen base of the adapted layers in 4-bit NormalFloat."""
    freeze: tuple[str, ...] = ()
    """Parameters whose name starts with one of these are not trained."""
    mode: str = "train"
    """train, or infer for one forward without gradients."""
    compile: str = "none"
    """none; model: `model.compile()`, one graph, loss and optimizer stay eager; blocks: each block; graphs: the model with
    its launches recorded as CUDA graphs (mode "reduce-overhead")."""
    shards: int = 1
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    channels_last: bool = False
    """Images and the weights of convolutions with their channels innermost (`memory_format=torch.channels_last`)."""

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", OPTIMIZERS), ("precision", PRECISIONS), ("recompute", RECOMPUTES), ("mode", MODES),
            ("compile", COMPILES),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in known:
                raise UnknownName(name, str(value), known, f"known: {', '.join(known)}")
        for name in ("accumulate", "shards", "lora", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} must be positive, got {value}", f"give {name} a value above zero")
        if self.precision == "fp16" and self.mode == "train":
            raise UserError("fp16 weights cannot be trained: updates round to nothing", "fp16-mixed, which keeps fp32 weights; or --infer")
        if self.nf4 and self.lora is None:
            raise UserError("nf4 needs LoRA adapters: a 4-bit base cannot be trained", "add --lora RANK, for example --lora 16")

    def to_json(self) -> dict[str, object]:
        said = asdict(self) | {"freeze": list(self.freeze)}
        return said if self.channels_last else {name: value for name, value in said.items() if name != "channels_last"}

    @classmethod
    def from_json(cls, data: dict[str, object]) -> Recipe:
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        if "freeze" in values:
            values["freeze"] = tuple(values["freeze"])  # type: ignore[arg-type]
        return cls(**values)  # type: ignore[arg-type]
