"""Options of one step of a model: `fit` and `plan advise`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.options import words
from foretell.options.adapters import of_adapters
from foretell.options.describe import option
from foretell.options.kernels import of_kernels
from foretell.options.sync import of_sync

if TYPE_CHECKING:
    from foretell.hardware.types import Cluster

TIME_LIMIT = 600.0
"""Seconds that tracing one step may take."""


def quiet(doing: str) -> None:
    """No sign of life."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How one step is trained, and how it is traced."""

    hardware: str | Cluster
    """`H100`, `8xH100`, `2x8xH100`, `H100,memory=60GiB`, `auto` (this machine), a cluster file, or a `Cluster`."""
    batch: Any = None
    """For a module of yours: what its forward takes. A model given by name makes its own."""
    loss: Any = option(None, "Loss of (output, batch); default: the model's own.", metavar="FILE.PY:FUNCTION", typed=str)
    micro_batch: int | str | None = option(None, "Samples per forward on each device; max: the largest that fits; default: 1, or 2 where "
                                                 "a batch norm needs them.", metavar="N", typed=str, read=words.size("--micro-batch"))  # fmt: skip
    seq: int | str | None = option(None, "Tokens per sample; max: all that fit; default: the model's usual.", metavar="N", typed=str,
                                   read=words.size("--seq"))  # fmt: skip
    image: int | None = option(None, "Side of the image in pixels; default: the model's usual.", metavar="N")
    optimizer: Any = option("adamw-fused", "sgd, momentum, adam or adamw; with -fused, -foreach or -loop where torch has it.", metavar="NAME",
                            typed=str)  # fmt: skip
    state_format: str = option("fp32", "AdamW's moments on the device: fp32, int8 or int4.", metavar="NAME")
    precision: str | None = option(None, "fp32, tf32, bf16-mixed, fp16-mixed (fp32 weights, autocast), bf16 or, with --infer, fp16; "
                                         "default: by device.", metavar="NAME")  # fmt: skip
    recompute: str = option("none", "none, full (every block), selective or host (full, from inputs in host memory).", metavar="HOW")
    accumulate: int = option(1, "Micro-batches per optimizer step.", metavar="N")
    loss_chunks: int = option(1, "Compute the output layer and cross entropy over N chunks of the tokens, so that logits of one exist at a time.",
                              metavar="N")  # fmt: skip
    kernels: tuple[str, ...] | None = of_kernels()
    clip: float | None = option(None, "Clip the gradient norm to X; default: no clipping.", metavar="X")
    lora: int | None = of_adapters("lora")
    nf4: bool = of_adapters("nf4")
    adapter: str = of_adapters("adapter")
    lora_alpha: float = of_adapters("lora_alpha")
    lora_dropout: float = of_adapters("lora_dropout")
    lora_targets: tuple[str, ...] | None = of_adapters("lora_targets")
    lora_train: tuple[str, ...] | None = of_adapters("lora_train")
    base: tuple[str, ...] = of_adapters("base")
    sync_every: int | None = of_sync("sync_every")
    outer_lr: float = of_sync("outer_lr")
    outer_momentum: float = of_sync("outer_momentum")
    sync_format: str = of_sync("sync_format")
    sync_delay: int = of_sync("sync_delay")
    sync_quorum: int = of_sync("sync_quorum")
    sync_grace: float = of_sync("sync_grace")
    freeze: tuple[str, ...] = option((), "Freeze parameters whose names start with PREFIX; may be repeated.", metavar="PREFIX",
                                     typed=list[str], read=tuple)  # fmt: skip
    infer: bool = option(False, "Inference: one forward pass without gradients.")
    overrides: Mapping[str, Any] | None = option(
        None, "Change a setting of the model, such as --set layers=4; VALUE is JSON or text; may be repeated.", flag="--set",
        metavar="KEY=VALUE", typed=list[str], read=words.overrides)  # fmt: skip
    hints: Mapping[str, float] | None = option(
        None, "Expected size for data-dependent ops: share of elements kept, or a value; may be repeated.", flag="--hint",
        metavar="PATTERN=NUMBER", typed=list[str], read=words.hints)  # fmt: skip
    expandable_segments: bool = option(False, "The caching allocator grows segments instead of adding new ones (expandable_segments:True).")
    compile: bool | str = option(False, "The model runs under torch.compile; default: eager.", typed=bool)
    channels_last: bool = option(False, "Images and convolutions in torch.channels_last; default: as they are.")
    time_limit: float = option(TIME_LIMIT, "Longest time that tracing one step may take: 30m, 2h or seconds.", metavar="TIME", typed=str,
                               read=words.duration("--time-limit"), shown="10m")  # fmt: skip
    cache: bool = option(True, "Ignore the trace cache.", flag="--no-cache", negates=True)
    progress: Callable[[str], None] = quiet
    """Is told what is going on."""


@dataclass(frozen=True, kw_only=True)
class FitOptions(StepOptions):
    """What `fit` is asked."""

    tokens: float | None = option(None, "Total training tokens, e.g. 1T (K, M, B or T).", metavar="N", typed=str, read=words.amount("--tokens"))
    samples: float | None = option(None, "Total training samples, e.g. 300M.", metavar="N", typed=str, read=words.amount("--samples"))
    epochs: float | None = option(None, "Total training epochs; needs --dataset-size.", metavar="N", typed=str, read=words.amount("--epochs"))
    dataset_size: float | None = option(None, "Samples in one epoch, such as 1.28M.", metavar="N", typed=str,
                                        read=words.amount("--dataset-size"))  # fmt: skip
    region: str | None = option(None, "Region for carbon intensity, e.g. FR; default: world average.", metavar="NAME")
    price: float | None = option(None, "Price per device-hour; default: a list price.", metavar="DOLLARS")
    mtbf: float | None = option(None, "Mean time between failures of the whole run, e.g. 4h: adds the useful share of the time.", metavar="TIME",
                                typed=str, read=words.duration("--mtbf", "30m, 4h or 2d"))  # fmt: skip
    trace_out: str | None = option(None, "Write the predicted timeline as a Chrome trace.", metavar="FILE")
    keep_writes: bool = option(False, "Let a script write its files; default: into a scratch folder.")
    advice_seconds: float | None = option(None, "After which no further way to make it fit is tried; 0: none; default: 10, or as long as the "
                                                "answer took.", cli=False)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AdviseOptions(StepOptions):
    """What `advise` is asked."""

    seconds: float = option(300.0, "After which no further change is predicted.", metavar="S")
