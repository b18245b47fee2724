"""Rows of a table of published runs as what the model of a step takes. No seconds here.

A row is *eligible* when every cell that decides the work is filled and something was measured; other rows are still
predicted where the gaps can be filled with a framework's defaults, and say so (`Row.assumed`). Numbers are read
leniently: an odd cell means "not given", never an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.foreign.schedule import GPIPE, ONE_BY_ONE, ZB_V, schedule_of
from benchmarks.foreign.stacks import Stack, stack
from foretell.errors import UnknownName
from foretell.hardware import catalog, links
from foretell.hardware.types import Cluster, Device

NEEDED = (
    "layers", "hidden", "heads", "vocab", "seq_len", "gpu", "gpus", "tp", "pp", "micro_batch", "global_batch",
    "precision", "activation_recompute",
)  # fmt: skip
CANNOT_DO_WITHOUT = ("layers", "hidden", "heads", "seq_len", "gpu", "gpus", "global_batch")
STEP, TOKENS, TFLOPS = "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu"
MEGATRON_VOCABULARY, LLAMA_2_VOCABULARY = 51200, 32000

Cells = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The model by its dimensions, the mesh, and how it was run."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    """0: a single layer was measured."""
    seq: int
    gated: bool
    micro: int
    micros: int
    world: int
    per_node: int
    stack: Stack
    experts: int = 0
    topk: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    """Model parts of a pipeline rank."""
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    shard: str = "none"
    """none, zero1, zero2 or zero3, over the data ranks."""
    shard_group: int = 0
    precision: str = "bf16"
    float8: str = ""
    """Recipe of 8-bit products; empty without."""
    narrow_gathers: bool = False
    """Shards travel in 8 bits."""
    recompute: str = "none"
    offload: str = "none"
    hides_tensor: bool = False
    """Tensor-parallel traffic runs beside products (asynchronous tensor parallelism)."""

    @property
    def dp(self) -> int:
        return max(1, self.world // (self.tp * self.pp * self.cp))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run: what was measured, and what the model needs."""

    id: str
    source: str
    quantity: str
    published: float
    run: Run
    cluster: Cluster
    convention: str
    memory: float | None
    """GB or GiB as printed."""
    eligible: bool
    assumed: tuple[str, ...]
    """Cells that were empty and how they were filled."""


class LeftOut(Exception):
    """Why a row has no prediction."""


def number(text: str | None) -> float | None:
    """The number a cell holds; None for anything else."""
    match = re.fullmatch(r"\s*([0-9][0-9,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*", text or "")
    return float(match.group(1).replace(",", "")) if match else None


def count(cells: Cells, name: str, default: int = 0) -> int:
    found = number(cells.get(name))
    return round(found) if found else default


def source_of(cells: Cells) -> str:
    return cells["id"].split("-")[0]


def one_layer(cells: Cells) -> bool:
    return count(cells, "layers") == 1 and ("one layer" in cells.get("model", "").lower() or "-layer-" in cells["id"])


def measured(cells: Cells) -> str:
    """The quantity to compare; "" where nothing usable was measured."""
    return next((name for name in (STEP, TOKENS, TFLOPS) if number(cells.get(name))), "")


def eligible(cells: Cells) -> bool:
    """Every cell that decides the work is filled, as the notes to the table define it."""
    needed = [name for name in NEEDED if name != "vocab" or not one_layer(cells)]
    return all(cells.get(name, "").strip() for name in needed) and bool(measured(cells))


def read_row(cells: Cells) -> Row:
    """What a row asks; `LeftOut` with the reason where it cannot be predicted."""
    missing = [name for name in CANNOT_DO_WITHOUT if not cells.get(name, "").strip()]
    if missing:
        raise LeftOut(f"not given: {', '.join(missing)}")
    odd = [name for name in CANNOT_DO_WITHOUT if name != "gpu" and count(cells, name) < 1]
    if odd:
        raise LeftOut(f"no number: {', '.join(odd)}")
    quantity = measured(cells)
    if not quantity:
        raise LeftOut("neither step time, tokens per second nor TFLOP/s")
    run, assumed = _run(cells, stack_of(cells))
    cluster = cluster_of(cells, run)
    return Row(
        id=cells["id"], source=source_of(cells), quantity=quantity, published=number(cells[quantity]) or 0.0, run=run,
        cluster=cluster, convention=convention_of(cells), memory=number(cells.get("peak_memory_gib")),
        eligible=eligible(cells), assumed=assumed,
    )  # fmt: skip


def predicted(row: Row, seconds: float) -> float:
    """The row's own quantity, from the seconds of a step."""
    run = row.run
    if row.quantity == STEP:
        return seconds
    if row.quantity == TOKENS:
        return run.dp * run.micros * run.micro * run.seq / seconds / run.world
    return step_flops(run, row.convention) / seconds / run.world / 1e12


# ---------------------------------------------------------------- shape and plan


def _run(cells: Cells, stack: Stack) -> tuple[Run, tuple[str, ...]]:
    assumed: list[str] = []

    def otherwise(name: str, value: object) -> str:
        given = cells.get(name, "").strip()
        if given:
            return given
        assumed.append(f"{name}={value}")
        return str(value)

    gated = cells.get("family", "") in ("llama", "qwen", "moe", "mixtral", "deepseek", "gpt-oss") or bool(
        count(cells, "experts")
    )
    layers, hidden, heads = (count(cells, name) for name in ("layers", "hidden", "heads"))
    vocab = 0 if one_layer(cells) else number(otherwise("vocab", _vocabulary(cells))) or 0
    world = count(cells, "gpus")
    tp, pp, cp = (max(1, count(cells, name, 1)) for name in ("tp", "pp", "cp"))
    dp = max(1, world // (tp * pp * cp))
    batch, seq = count(cells, "global_batch"), count(cells, "seq_len")
    micro = max(1, round(number(otherwise("micro_batch", 1)) or 1))
    hidden = _hidden(cells, layers, hidden, heads, int(vocab))
    schedule, chunks = _schedule(cells, layers, pp)
    recompute = otherwise("activation_recompute", "full" if "DeepSpeed" in stack.framework else "none").lower()
    precision = otherwise("precision", "bf16").lower()
    recipe, narrow = float8_of(cells)
    run = Run(
        layers=layers, hidden=hidden, heads=heads, kv_heads=count(cells, "kv_heads", heads),
        ffn=_ffn(cells, layers, hidden, int(vocab), gated), vocab=int(vocab), seq=seq,
        gated=gated, micro=micro, micros=max(1, round(batch / dp / micro)), world=world,
        per_node=min(world, count(cells, "gpus_per_node", 8)), stack=stack, experts=count(cells, "experts"),
        topk=max(1, count(cells, "topk", 1)), tp=tp, pp=pp, cp=cp, ep=max(1, count(cells, "ep", 1)), chunks=chunks,
        schedule=schedule, sequence_parallel=_sequence_parallel(cells, stack), shard=_shard(cells),
        shard_group=count(cells, "shard_group"), precision=precision, recompute=_recompute(recompute),
        offload=cells.get("offload", "") or "none", float8=recipe, narrow_gathers=narrow,
        hides_tensor=bool(re.search(r"async[ -]?tp", f"{cells.get('compile', '')} {cells.get('notes', '')}", re.IGNORECASE)),
    )  # fmt: skip
    return run, tuple(assumed)


def _vocabulary(cells: Cells) -> int:
    name = cells.get("model", "").lower()
    return LLAMA_2_VOCABULARY if cells.get("family") == "llama" and "3" not in name else MEGATRON_VOCABULARY


def _recompute(text: str) -> str:
    return next((name for name in ("full", "selective") if name in text), "none")


def _shard(cells: Cells) -> str:
    text = cells.get("fsdp_shard", "").lower()
    return next((name for name in ("zero3", "zero2", "zero1") if name in text), "none")


def _sequence_parallel(cells: Cells, stack: Stack) -> bool:
    text = cells.get("sequence_parallel", "").strip().lower()
    if text:
        return text in ("yes", "true", "1", "on")
    return stack.sequence


def _schedule(cells: Cells, layers: int, pp: int) -> tuple[str, int]:
    """Schedule and model parts of a rank; a word such as "max" means one layer a part."""
    if pp == 1:
        return ONE_BY_ONE, 1
    name, text = cells.get("schedule", "").strip(), cells.get("vpp", "").strip()
    schedule = schedule_of(name)
    if schedule == ZB_V:
        return schedule, 2
    if schedule not in (ONE_BY_ONE, GPIPE):
        return schedule, 1
    chunks = count(cells, "vpp", 1)
    if "max" in text.lower() or (chunks <= 1 and re.search(r"1f1b-i|interleav", name.lower())):
        chunks = max(1, ceil(layers / pp))
    return schedule, max(1, min(chunks, ceil(layers / pp)))


def _ffn(cells: Cells, layers: int, hidden: int, vocab: int, gated: bool) -> int:
    """Width of the feed-forward part; of one expert where there are several, which the parameter count tells best."""
    given = count(cells, "ffn_hidden", ceil(8 * hidden / 3) if gated else 4 * hidden)
    experts, stated = count(cells, "experts"), number(cells.get("params_b"))
    if not experts or not stated:
        return given
    rest = stated * 1e9 - 2 * vocab * hidden - layers * 4 * hidden**2
    found = round(rest / (layers * experts * 3 * hidden))
    return found if 0 < found < given else given


def _hidden(cells: Cells, layers: int, hidden: int, heads: int, vocab: int) -> int:
    """The hidden size, mended where the row's own parameter count contradicts it by a fifth or more."""
    stated = number(cells.get("params_b"))
    if not stated or cells.get("experts", "").strip() or cells.get("family", "gpt") != "gpt" or stated < 10:
        return hidden
    given = (12 * layers * hidden**2 + vocab * hidden) / 1e9
    if abs(given / stated - 1) < 1 / 5 or one_layer(cells):
        return hidden
    step = 128
    sizes = range(step, 65536, step)
    return min(sizes, key=lambda size: abs((12 * layers * size**2 + vocab * size) / 1e9 - stated))


# ---------------------------------------------------------------- software


FROM_2022 = ("seqsel", "mlm", "megascale")
"""Sources whose Megatron-LM is of February 2022 or later, by the date of their paper or page."""


def stack_of(cells: Cells) -> Stack:
    """The software a row names: framework, compiled or not."""
    name, how, notes = cells.get("stack", "").lower(), cells.get("compile", ""), cells.get("notes", "")
    if name == "megatron-lm" and source_of(cells) in FROM_2022:
        name = "megatron-lm-2022"
    found = _named_stack(name, how, notes, cells.get("precision", "").lower(), cells.get("gpu", ""), cells.get("model", ""))
    if re.search(r"no flash", how, re.IGNORECASE):
        return replace(found, spelled=True)
    if found.spelled and re.search(r"flash", how, re.IGNORECASE):
        return replace(found, spelled=False, kernel="flash-2" if "2" in how else "flash-1")
    return found


def float8_of(cells: Cells) -> tuple[str, bool]:
    """Recipe of 8-bit products, and whether shards travel in 8 bits; empty without."""
    how, name = cells.get("compile", ""), cells.get("stack", "").lower()
    if cells.get("precision", "").lower() not in ("fp8", "mxfp8", "nvfp4"):
        return "", False
    recipes = ("rowwise_with_gw_hp", "rowwise", "mxfp8", "tensorwise")
    usual = "tensorwise" if "titan" in name else "delayed"
    narrow = "float8 all-gather" in how or name == "torchtitan"  # its document on float8 and its configuration of 405B ask for it
    return next((recipe for recipe in recipes if recipe in how), usual), narrow


def _named_stack(name: str, how: str, notes: str, precision: str, gpu: str, model: str) -> Stack:
    compiled = "torch.compile" in how
    if "foundry" in name:
        return stack("llm-foundry-0.1" if "mixed_precision PURE" in notes else "llm-foundry-0.3")
    if "titan" in name:
        newest = _torchao_stack(gpu) if "torchao" in name else "torchtitan-compile"
        found = stack(newest if compiled or precision == "fp8" or "405B" in model else "torchtitan")  # 405B: its configuration compiles
        return replace(found, selective="layers") if "selective layer" in notes else found
    if "megatron-deepspeed" in name or ("megatron" in name and "Megatron-DeepSpeed" in notes):
        return _megatron_deepspeed(notes)
    if any(word in name for word in ("bridge", "nemo", "automodel", "megatron-core", "primus")):
        return stack("megatron-core")
    for word in ("megascale", "megatron-lm-2022", "megatron-lm", "internevo", "deepspeed"):
        if word in name:
            return stack(word)
    if name in ("llm.c", "nanogpt", "nanochat"):
        return stack(name)
    return stack("pytorch-compile" if compiled else "pytorch")


def _torchao_stack(gpu: str) -> str:
    """Its page gives versions by device: H100 of March 2025, MI300X and B200 of August."""
    return "torchtitan-2025-03" if gpu.startswith("H100") else "torchtitan-2025-08-cudnn" if gpu.startswith("B200") else "torchtitan-2025-08"


def _megatron_deepspeed(notes: str) -> Stack:
    """By what the notes say of BLOOM's diary: blocking launches all along, a bf16 optimizer from 28 February on."""
    if "Rebalancing" in notes or "bf16 optimizer" in notes:
        return stack("megatron-deepspeed-bf16")
    if re.search(r"\b02-[0-9]{2}\b", notes) or "iteration 2 of a run" in notes:
        return stack("megatron-deepspeed-blocking")
    return stack("megatron-deepspeed")


MARKS = (
    r"mixed_precision PURE", r"selective layer", r"Megatron-DeepSpeed", r"Rebalancing", r"bf16 optimizer",
    r"\b02-[0-9]{2}\b", r"iteration 2 of a run", r"power limited", r"async TP",
)  # fmt: skip
"""Words in a row's notes that change what is predicted; the table kept beside the script holds only these."""


def marks(notes: str) -> str:
    """The notes, cut down to what this module reads."""
    return "; ".join(match.group(0) for mark in MARKS if (match := re.search(mark, notes, re.IGNORECASE)))


# ---------------------------------------------------------------- machines


BOARDS = {("torchao", "H100-SXM-80GB"): "H100-SXM-96GB"}
"""Source and device as its row names it → the board it was. A log by torchao's authors of the same run (torchtitan, pull request 808)
has 47.65 GiB as 50.16 % of the device's memory, which is 95 GiB: torchtitan's H100, of 96 GB and 500 W."""
LIMITED = {"B200": 750.0}
"""Watts of boards that a row calls power limited: torchao's authors write of "750W limited" B200 (pytorch/ao, pull request 3566), and a
script of the same team sets 750 W (pytorch/helion, pull request 347)."""


def device_of(cells: Cells) -> Device:
    """The device of a row, at its own power limit."""
    found = _named_device(BOARDS.get((source_of(cells), cells["gpu"].strip()), cells["gpu"].strip()))
    watts = LIMITED.get(found.name) if re.search(r"power limited", cells.get("notes", "")) else None
    return replace(found, name=f"{found.name} at {watts:.0f} W", tdp_watts=watts) if watts else found


def _named_device(name: str) -> Device:
    tries = [name, re.sub(r"\s*\(.*\)", "", name), re.sub(r"[-_ ]?[0-9]+ ?GB.*$", "", name)]
    tries += [name.split("-")[0], name.split()[0] if name.split() else name]
    for attempt in tries:
        try:
            return catalog.find(attempt)
        except UnknownName:
            continue
    raise LeftOut(f"unknown device '{name}'")


def cluster_of(cells: Cells, run: Run) -> Cluster:
    device = device_of(cells)
    network = network_of(cells.get("inter_node_link", ""), device, run.per_node)
    return replace(_cluster(device.name.split(" at ")[0], run.world, run.per_node, network), device=device)


@lru_cache(maxsize=256)
def _cluster(name: str, world: int, per_node: int, network: str | None) -> Cluster:
    nodes = max(1, ceil(world / per_node))
    return links.with_links(Cluster(device=catalog.find(name), nodes=nodes, devices_per_node=per_node), network)


def network_of(text: str, device: Device, per_node: int) -> str | None:
    """The network a row's words mean, as `8xRoCE200`; None: the device's usual one."""
    low = text.lower()
    kind = next((name for word, name in _KINDS if word in low), None)
    if kind is None:
        return None
    if kind == "OPA":
        return "4xOPA100" if "400" in low else "1xOPA100"
    match = re.search(r"([0-9]+) ?x ?([0-9]+) ?g", low)
    if match:
        return _known(int(match.group(1)), kind, int(match.group(2)))
    match = re.search(r"([0-9]+) ?gb(?:ps|/s|it/s)? per (node|gpu)", low)
    if match is None:
        return None
    rate = int(match.group(1)) // (8 if match.group(2) == "node" and int(match.group(1)) >= 800 else 1)
    return _known(per_node if match.group(2) == "gpu" or rate < int(match.group(1)) else 1, kind, rate)


_KINDS = (
    ("omni", "OPA"),
    ("roce", "RoCE"),
    ("infiniband", "IB"),
    ("hdr", "IB"),
    ("ndr", "IB"),
    ("slingshot", "Slingshot"),
)


def _known(cards: int, kind: str, rate: int) -> str | None:
    try:
        links.network(f"{cards}x{kind}{rate}")
    except UnknownName:
        return None
    return f"{cards}x{kind}{rate}"


# ---------------------------------------------------------------- FLOP conventions

MODEL, MODEL_CAUSAL, HARDWARE, WEIGHTS = "model", "model-causal", "hardware", "weights"


def step_flops(run: Run, convention: str) -> float:
    """FLOPs of a step over all devices, as tables count them.

    model: products three times, attention over the full square. model-causal: attention over half of it.
    hardware: with full recomputation the forward of the layers once more. weights: six a parameter and token.
    """
    tokens = float(run.dp * run.micros * run.micro * run.seq)
    h, kv = run.hidden, run.hidden // run.heads * run.kv_heads
    ffn = run.ffn * (run.topk if run.experts else 1)
    layer = 2 * (h * (2 * h + 2 * kv) + (3 if run.gated or run.experts else 2) * h * ffn)
    scores = 4 * run.seq * h * (0.5 if convention == MODEL_CAUSAL else 1.0)
    head = 2 * h * run.vocab
    if convention == WEIGHTS:
        return 3 * tokens * (run.layers * layer + head)
    passes = 4 if convention == HARDWARE and run.recompute == "full" else 3
    return tokens * (passes * run.layers * (layer + scores) + 3 * head)


_HARDWARE = ("sc21", "mlm-2022", "bsv100", "bsa100", "bloom", "dsazure", "mtnlg", "internevo", "bs1b3", "frontier")
_CAUSAL = ("bridge", "stas", "automodel")


def convention_of(cells: Cells) -> str:
    """How a source counts FLOPs, by the notes to the table."""
    name = cells["id"]
    if name.startswith("bs1b3") and _recompute(cells.get("activation_recompute", "").lower()) == "none":
        return WEIGHTS
    if name.startswith(_HARDWARE):
        return HARDWARE
    return MODEL_CAUSAL if name.startswith(_CAUSAL) else MODEL
