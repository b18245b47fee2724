"""Options of the search for a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretell.options import words
from foretell.options.adapters import of_adapters
from foretell.options.describe import option
from foretell.options.fit import TIME_LIMIT, quiet
from foretell.options.kernels import of_kernels
from foretell.options.sync import of_sync

if TYPE_CHECKING:
    from foretell.hardware.types import Cluster

MAY = ("adapters", "int8", "sync")
SERVED = ("fp8", "int8", "int4", "kv-fp8", "kv-int8")
"""With --serve: formats of weights, and of keys and values."""
AXES = ("tp", "pp", "dp_shard", "dp_replicate", "cp", "ep")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What `plan` is asked."""

    hardware: str | Cluster = "auto"
    """`H100`, `8xH100`, `2x8xH100`, `auto` (this machine), a cluster file, or a `Cluster`."""
    global_batch: int | None = option(None, "Samples per optimizer step over all ranks; default: what runs fastest.", metavar="N")
    seq: int | None = option(None, "Tokens per sample; default: the model's usual.", metavar="N")
    image: int | None = option(None, "Side of the image in pixels; default: the model's usual.", metavar="N")
    objective: str = option("throughput", "throughput, latency, cost, energy or smallest (fewest devices).", metavar="NAME")
    tp: int | None = option(None, "Fix the tensor-parallel size.", metavar="N")
    pp: int | None = option(None, "Fix the number of pipeline ranks.", metavar="N")
    dp_shard: int | None = option(None, "Fix the FSDP shard count.", metavar="N")
    dp_replicate: int | None = option(None, "Fix the number of replicas.", metavar="N")
    cp: int | None = option(None, "Fix the context-parallel size.", metavar="N")
    ep: int | None = option(None, "Fix the expert-parallel size.", metavar="N")
    schedule: str | None = option(None, "Fix the pipeline schedule, e.g. 1f1b.", metavar="NAME")
    micro_batch: int | None = option(None, "Fix the micro-batch size.", metavar="N")
    margin: float = option(0.0, "Share of each device's memory to leave free, such as 0.1.", metavar="SHARE")
    tokens: float | None = option(None, "Total training tokens, e.g. 1T: adds hours, cost and energy of the run.", metavar="N", typed=str,
                                  read=words.amount("--tokens"))  # fmt: skip
    mtbf: float | None = option(None, "Mean time between failures of the whole run, e.g. 4h: adds the useful share of the time.", metavar="TIME",
                                typed=str, read=words.duration("--mtbf", "30m, 4h or 2d"))  # fmt: skip
    step_law: bool = option(False, "Take the batch from the Step Law for --tokens, and say its learning rate.")
    deadline: float | None = option(None, "For the whole run: 30d, 12h, 90m or seconds.", metavar="TIME", typed=str,
                                    read=words.duration("--deadline", "30d, 12h, 90m or seconds"))  # fmt: skip
    budget: float | None = option(None, "For the whole run.", metavar="DOLLARS")
    precision: str | None = option(None, "fp32, bf16-mixed, fp16-mixed, bf16 or bf16-master; default: by device.", metavar="NAME")
    hbm: int | None = option(None, "GPU memory limit per device: 24GiB, 24GB or 24 (GiB).", metavar="SIZE", typed=str, read=words.memory("--hbm"))
    host: int | None = option(None, "Host memory limit; default: what it is known to have, less a reserve.", metavar="SIZE", typed=str,
                              read=words.memory("--host"))  # fmt: skip
    disk: int | None = option(None, "Disk limit for offloading; default: no disk.", metavar="SIZE", typed=str, read=words.memory("--disk"))
    state_format: str | None = option(None, "AdamW's moments: fp32, int8 or int4; with bf16-master fp32, split, bf16, int8 or split-int8.",
                                      metavar="NAME")  # fmt: skip
    optimizer: Any = option("adamw-fused", "As `foretell fit` takes it.", metavar="NAME", typed=str)
    clip: float = option(1.0, "Clip the gradient norm to X; 0: no clipping.", metavar="X")
    loss_chunks: int | None = option(None, "Fix the number of chunks of the loss, see fit; default: 1, more where memory is short of logits.",
                                     metavar="N")  # fmt: skip
    kernels: tuple[str, ...] | None = of_kernels()
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
    may: tuple[str, ...] | None = option(None, "What plans may do where nothing else fits: int8 (hold AdamW's moments in 8 bits), adapters (train "
                                        "LoRA adapters instead of the model); and where links are slow: sync (see --sync-every). "
                                        "With --serve: fp8, int8, int4 (weights), kv-fp8, kv-int8.",
                                  metavar="NAMES", typed=str, read=words.known_names("--may", tuple(dict.fromkeys(MAY + SERVED))))  # fmt: skip
    compile: str | None = option(None, "Fix torch.compile: none, blocks or model; default: those measured.", metavar="HOW")
    overrides: Mapping[str, Any] | None = option(
        None, "Change a setting of the model, such as layers=4; may be repeated.", flag="--set", metavar="KEY=VALUE", typed=list[str],
        read=words.overrides)  # fmt: skip
    loss: str | None = option(None, "Loss of (output, batch); default: the model's own.", metavar="FILE.PY:FUNCTION")
    what_if: bool = option(False, "Show what one more device, more memory, faster links or other devices would change.")
    exact: bool | None = option(None, "Cost the best plans op by op, or none of them; default: where that is quick.", flag="--exact/--quick")
    patience: float | None = option(None, "Stop the search after this long and take the best so far.", metavar="SECONDS")
    time_limit: float = option(TIME_LIMIT, "Longest time that tracing one step may take: 30m, 2h or seconds.", metavar="TIME", typed=str,
                               read=words.duration("--time-limit"), shown="10m")  # fmt: skip
    cache: bool = option(True, "Ignore the trace cache.", flag="--no-cache", negates=True)
    described: Any = None
    """A layout to cost instead of searching for one, as `export.read.layout.described` makes it of another tool's file."""
    progress: Callable[[str], None] = quiet
    """Is told what is going on."""

    @property
    def fixed(self) -> dict[str, int]:
        """Axis → its degree, where that is given."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
