"""Predicted against published tokens per second, for runs on one node and for fully sharded data parallel.

    python benchmarks/published.py                    all rows; prints errors per source
    python benchmarks/published.py --save             also writes benchmarks/results/published.jsonl
    python benchmarks/published.py --runs FILE.csv    another table of the same columns
    python benchmarks/published.py --rows             one line a run

Each run becomes a list of kernels by shape (`layer`, `head`, `update`), a price for each (`price`), and a timeline
of blocks and collectives (`step_seconds`). No figure belongs to one row or one source: constants are data by device
(`foretell.cost.analytic`), by link (`foretell.cost.collectives`) and by software stack (`foretell.cost.stack`).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from foretell.cost import analytic, collectives, streams  # noqa: E402
from foretell.cost.stack import STACKS, Stack, with_float8  # noqa: E402
from foretell.errors import UnknownName  # noqa: E402
from foretell.hardware import catalog, links  # noqa: E402
from foretell.hardware.types import Cluster, Device  # noqa: E402

RUNS = HERE / "data" / "published_runs.csv"
RESULTS = HERE / "results" / "published.jsonl"
NEEDED = (
    "layers", "hidden", "heads", "vocab", "seq_len", "gpu", "gpus", "tp", "pp", "micro_batch", "global_batch",
    "precision", "activation_recompute",
)  # fmt: skip
NOT_SCORED = {"bsv100": "the same run took 129, 125 and 225 s on three days"}
DTYPES = {"fp32": "float32", "tf32": "tf32", "fp16": "float16"}
FITTED = ("foundry", "llmc", "titan2408", "titan2412", "torchao")
BAR = 0.15


# ---------------------------------------------------------------- which rows


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run, as far as it decides the work of a step."""

    id: str
    source: str
    gated: bool
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro: int
    accumulate: int
    world: int
    per_node: int
    shard: str
    """zero3, zero2, zero1 or none: what is sharded over the data-parallel ranks."""
    shard_group: int
    precision: str
    recompute: str
    gpu: str
    network: str
    stack: Stack
    tokens_per_second: float
    """Published, of one device."""

    @property
    def tokens(self) -> int:
        return self.micro * self.seq


def source_of(row: dict[str, str]) -> str:
    return row["id"].rsplit("-", 1)[0].split("-")[0]


def out_of_scope(row: dict[str, str]) -> str:
    """Why a row is no fully specified run on one node or with full sharding; empty when it is one."""
    if any(row[name] not in ("", "1") for name in ("tp", "pp", "cp", "ep")):
        return "tensor, pipeline, context or expert parallel"
    if row["experts"]:
        return "mixture of experts"
    if not all(row[name] for name in NEEDED):
        return "not fully specified"
    if row["offload"] not in ("", "none"):
        return "offload"
    if int(row["gpus"]) > int(row["gpus_per_node"] or 8) and row["fsdp_shard"] not in ("zero2", "zero3"):
        return "several nodes without full sharding"
    return "" if row["tokens_per_s_per_gpu"] or row["step_time_s"] else "neither tokens per second nor step time"


def stack_of(row: dict[str, str]) -> Stack:
    """The software a row names: framework, compiled or not, recipe of 8-bit products."""
    name, how = row["stack"].lower(), row["compile"]
    compiled = "torch.compile" in how
    if "foundry" in name:
        stack = STACKS["llm-foundry-0.1" if "mixed_precision PURE" in row["notes"] else "llm-foundry-0.3"]
    elif "titan" in name:
        stack = STACKS["torchtitan-compile" if compiled else "torchtitan"]
        if "selective layer" in row["notes"]:
            stack = replace(stack, selective="layers")
    else:
        stack = STACKS.get(name) or STACKS["pytorch-compile" if compiled else "pytorch"]
    if "no flash" in how.lower():
        stack = replace(stack, attention="math")
    stack = replace(stack, dtype=DTYPES.get(row["precision"], "bfloat16"))
    if row["precision"] != "fp8":
        return stack
    recipes = ("rowwise_with_gw_hp", "rowwise", "mxfp8", "tensorwise")
    usual = "tensorwise" if "titan" in name else "delayed"
    return with_float8(
        stack, next((recipe for recipe in recipes if recipe in how), usual), gathered="float8 all-gather" in how
    )


def run_of(row: dict[str, str]) -> Run:
    world, hidden, heads = int(row["gpus"]), int(row["hidden"]), int(row["heads"])
    micro, batch, seq = int(row["micro_batch"]), int(row["global_batch"]), int(row["seq_len"])
    rate = float(row["tokens_per_s_per_gpu"] or 0) or batch * seq / float(row["step_time_s"]) / world
    gated = row["family"] == "llama"
    return Run(
        id=row["id"], source=source_of(row), gated=gated, layers=int(row["layers"]), hidden=hidden, heads=heads,
        kv_heads=int(row["kv_heads"] or heads), ffn=int(row["ffn_hidden"] or 4 * hidden), vocab=int(row["vocab"]),
        seq=seq, micro=micro, accumulate=max(1, round(batch / world / micro)), world=world,
        per_node=min(world, int(row["gpus_per_node"] or 8)), shard=row["fsdp_shard"] or "none",
        shard_group=int(row["shard_group"] or world), precision=row["precision"], recompute=row["activation_recompute"],
        gpu=analytic.POWER_LIMITED if row["gpu"] == "B200" and "power limited" in row["notes"] else row["gpu"],
        network=row["inter_node_link"], stack=stack_of(row), tokens_per_second=rate,
    )  # fmt: skip


# ---------------------------------------------------------------- the work of a step


class Work(NamedTuple):
    """One kernel: a product m×n×k, attention over `m` queries, or `nbytes` read and written."""

    kind: str
    """gemm, gemm8, attention, attention_backward, stream."""
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    nbytes: float = 0.0
    launches: int = 1


def price(work: Work, device: Device, stack: Stack) -> float:
    """Seconds of one kernel on a device under a stack. The one place where shapes become seconds."""
    if work.kind == "stream":
        wide = 2 if stack.dtype in ("float32", "tf32") else 1
        return analytic.stream_seconds(work.nbytes * wide, device, launches=work.launches)
    if work.kind in ("gemm", "gemm8"):
        dtype = "float8_e4m3fn" if work.kind == "gemm8" else stack.dtype
        seconds = analytic.gemm_seconds(work.m, work.n, work.k, batch=work.batch, dtype=dtype, device=device)
        return seconds / (stack.product8 if work.kind == "gemm8" else 1.0)
    backward = work.kind == "attention_backward"
    if stack.attention != "math":
        return analytic.attention_seconds(
            batch=work.batch, heads=work.n, queries=work.m, keys=work.m, head_dim=work.k, device=device,
            kernel=stack.attention, backward=backward,
        )  # fmt: skip
    one = Work("gemm", work.m, work.m, work.k, work.batch * work.n)
    scores = Work("stream", nbytes=work.batch * work.n * work.m**2 * stack.score_bytes[backward], launches=6)
    return (4 if backward else 2) * price(one, device, stack) + price(scores, device, stack)


def products(run: Run) -> list[tuple[int, int]]:
    """Weights of a layer as (inputs, outputs), in the order they are used."""
    h, kv = run.hidden, run.hidden // run.heads * run.kv_heads
    if run.gated:
        return [(h, h), (h, kv), (h, kv), (h, h), (h, run.ffn), (h, run.ffn), (run.ffn, h)]
    return [(h, h + 2 * kv), (h, h), (h, run.ffn), (run.ffn, h)]


def layer_parameters(run: Run) -> int:
    return sum(inputs * outputs for inputs, outputs in products(run)) + 2 * run.hidden


def forward(run: Run, *, again: bool = False, saved: bool = False) -> list[Work]:
    """One layer. `again`: as recomputed in backward. `saved`: with the results of every second product kept."""
    kind = "gemm8" if run.precision == "fp8" else "gemm"
    gemms = [Work(kind, run.tokens, outputs, inputs) for inputs, outputs in products(run)]
    if saved:
        gemms = gemms[1::2]
    elif again and run.stack.early_stop:
        gemms = gemms[:-1]
    attention = [] if saved else [Work("attention", run.seq, run.heads, run.hidden // run.heads, run.micro)]
    return gemms + attention + pointwise(run, backward=False) + casts(run, backward=False)


def backward(run: Run) -> list[Work]:
    kind = "gemm8" if run.precision == "fp8" else "gemm"
    made = []
    for inputs, outputs in products(run):
        weight = "gemm" if run.stack.wide_weight_gradients else kind
        made += [Work(kind, run.tokens, inputs, outputs), Work(weight, outputs, inputs, run.tokens)]
    made.append(Work("attention_backward", run.seq, run.heads, run.hidden // run.heads, run.micro))
    weights = Work("stream", nbytes=layer_parameters(run) * run.stack.weight_bytes, launches=len(products(run)))
    return [*made, *pointwise(run, backward=True), *casts(run, backward=True), weights]


def pointwise(run: Run, *, backward: bool) -> list[Work]:
    """Norms, activation, residuals, rotary embedding: bytes of 16-bit tensors, by pass."""
    stack, rows, h = run.stack, run.tokens, run.hidden
    kv = h // run.heads * run.kv_heads
    each = 2 * (stack.norm_bytes[backward] + stack.residual_bytes[backward])
    found = [Work("stream", nbytes=rows * h * each, launches=2 if stack.fused else 4)]
    if not run.gated:
        found.append(Work("stream", nbytes=rows * run.ffn * stack.activation_bytes[backward]))
        if backward:
            found.append(Work("stream", nbytes=rows * (h + 2 * kv) * 4))
        return found
    found.append(Work("stream", nbytes=rows * run.ffn * stack.gate_bytes[backward], launches=1 if stack.fused else 2))
    found.append(
        Work("stream", nbytes=rows * (h + kv) * stack.rotary_bytes[backward], launches=1 if stack.fused else 6)
    )
    if run.kv_heads < run.heads:
        found.append(Work("stream", nbytes=2 * rows * (kv + h) * 2, launches=2))
    return found


def casts(run: Run, *, backward: bool) -> list[Work]:
    """Scaling and casting for 8-bit products: activations and weights forward, gradients backward."""
    if run.precision != "fp8":
        return []
    found = []
    for inputs, outputs in products(run):
        elements = run.tokens * (outputs if backward else inputs) + (0 if backward else inputs * outputs)
        found.append(Work("stream", nbytes=elements * run.stack.cast_bytes, launches=2))
    return found


def head(run: Run) -> list[Work]:
    """Logits, loss and their backward; the embedding is its own table of the same size."""
    logits = run.tokens * run.vocab
    return [
        Work("gemm", run.tokens, run.vocab, run.hidden),
        Work("gemm", run.tokens, run.hidden, run.vocab),
        Work("gemm", run.vocab, run.hidden, run.tokens),
        Work("stream", nbytes=logits * run.stack.loss_bytes, launches=8),
        Work("stream", nbytes=run.tokens * run.hidden * 24 + run.vocab * run.hidden * 8, launches=6),
    ]


def parameters(run: Run) -> int:
    tables = (1 if run.stack.tied else 2) * run.vocab * run.hidden
    learned = 0 if run.gated else run.seq * run.hidden
    return run.layers * layer_parameters(run) + tables + learned


def update(run: Run) -> list[Work]:
    held = parameters(run) / (run.shard_group if run.shard != "none" else 1)
    each = run.stack.optimizer_bytes + run.stack.clip_bytes
    return [Work("stream", nbytes=held * each, launches=20 * run.layers)]


# ---------------------------------------------------------------- one step on a timeline


@lru_cache(maxsize=64)
def cluster_of(gpu: str, world: int, per_node: int, network: str) -> Cluster:
    limited = gpu == analytic.POWER_LIMITED
    device = catalog.find("B200" if limited else gpu)
    asked = "8xRoCE200" if "1600 Gbps per node RoCE" in network else None
    nodes = max(1, world // per_node)
    cluster = links.with_links(Cluster(device=device, nodes=nodes, devices_per_node=per_node), asked)
    return replace(cluster, device=replace(device, name=gpu)) if limited else cluster


class Seconds(NamedTuple):
    forward: float
    again: float
    backward: float
    head: float
    update: float
    kernels: int


def block_seconds(run: Run, device: Device) -> Seconds:
    def total(works: Iterable[Work]) -> float:
        return sum(price(work, device, run.stack) for work in works)

    ahead, back = forward(run), backward(run)
    again = 0.0
    if run.recompute == "full":
        again = total(forward(run, again=True))
    elif run.recompute == "selective":
        selective = {"ops": total(forward(run, saved=True)), "layers": total(forward(run, again=True)) / 2}
        again = selective.get(run.stack.selective, price(_attention(ahead), device, run.stack))
    kernels = sum(work.launches for work in ahead)
    return Seconds(total(ahead), again, total(back), total(head(run)), total(update(run)), kernels)


def _attention(works: Iterable[Work]) -> Work:
    return next(work for work in works if work.kind == "attention")


def step_seconds(run: Run, *, detail: dict[str, Any] | None = None) -> float:
    """One step: a micro-batch alone, each further one at its steady cost, and the update."""
    cluster = cluster_of(run.gpu, run.world, run.per_node, run.network)
    device = cluster.device
    seconds = block_seconds(run, device)
    lines = [
        streams.simulate(_tasks(run, seconds, cluster, n), drag={streams.COLLECTIVES: run.stack.drag}) for n in (1, 2)
    ]
    extra = lines[1].seconds - lines[0].seconds
    if detail is not None:
        detail.update(
            exposed_share=lines[0].exposed_communication / lines[0].seconds, binds=lines[0].binds,
            micro_seconds=lines[0].seconds, update_seconds=seconds.update, head_seconds=seconds.head,
            layers_seconds=run.layers * (seconds.forward + seconds.again + seconds.backward),
            collectives_seconds=lines[0].busy.get(streams.COLLECTIVES, 0.0),
        )  # fmt: skip
    return lines[0].seconds + (run.accumulate - 1) * extra + seconds.update


def _tasks(run: Run, seconds: Seconds, cluster: Cluster, micros: int) -> list[streams.Task]:
    """Micro-batches of blocks with their collectives; a gather starts one block ahead of its use, not earlier."""
    sent = _Wire(run, cluster)
    plan = _Plan(run.stack.host_seconds)
    for number in range(micros):
        reduces = sent.every_micro or number == micros - 1
        gathers: dict[int, int] = {}

        def gather(block: int, gathers: dict[int, int] = gathers) -> None:
            if sent.gather and 0 <= block < run.layers and block not in gathers:
                gathers[block] = plan.add("all_gather", streams.COLLECTIVES, sent.gather, plan.computed)

        def compute(kind: str, block: int, cost: float, kernels: int, gathers: dict[int, int] = gathers) -> None:
            before = (gathers[block],) if block in gathers else ()
            plan.computed = (plan.add(kind, streams.COMPUTE, cost, before, kernels),)

        plan.add("all_gather", streams.COLLECTIVES, sent.root, plan.computed)
        gather(0)
        for block in range(run.layers):
            gather(block + 1)
            compute("forward", block, seconds.forward + sent.copies, seconds.kernels)
        if run.shard == "zero3":
            gathers.clear()
            gather(run.layers - 1)
        compute("head", -1, seconds.head, 20)
        for block in reversed(range(run.layers)):
            gather(block - 1)
            compute("backward", block, seconds.again + seconds.backward + 2 * sent.copies, 2 * seconds.kernels)
            if reduces:
                plan.add("reduce", streams.COLLECTIVES, sent.reduce, plan.computed)
        if reduces:
            plan.add("reduce", streams.COLLECTIVES, sent.root_reduce, plan.computed)
    plan.add("all_gather", streams.COLLECTIVES, sent.after, (len(plan.tasks) - 1,))
    return plan.tasks


class _Plan:
    def __init__(self, host_seconds: float) -> None:
        self.tasks: list[streams.Task] = []
        self.host_seconds = host_seconds
        self.computed: tuple[int, ...] = ()
        """The last task on the compute stream."""

    def add(self, kind: str, resource: str, seconds: float, after: tuple[int, ...] = (), kernels: int = 1) -> int:
        self.tasks.append(streams.Task(kind, resource, seconds, after, kernels * self.host_seconds, kind))
        return len(self.tasks) - 1


class _Wire:
    """Seconds of the collectives of a step, by what the shards are."""

    def __init__(self, run: Run, cluster: Cluster) -> None:
        size = min(run.shard_group, run.world) if run.shard != "none" else run.world
        group, copies = collectives.fabric(cluster, size), run.world // size
        across = collectives.fabric(cluster, copies, stride=size)
        block, root = layer_parameters(run), parameters(run) - run.layers * layer_parameters(run)

        def wire(operation: str, count: float, width: float) -> float:
            return collectives.collective(operation, count * width, group).seconds

        def reduce(count: float) -> float:
            width = run.stack.reduce_bytes
            if run.shard == "none":
                return wire(collectives.ALL_REDUCE, count, width)
            between = collectives.collective(collectives.ALL_REDUCE, count / size * width, across)
            return wire(collectives.REDUCE_SCATTER, count, width) + between.seconds

        self.every_micro = run.shard in ("zero2", "zero3")
        self.reduce, self.root_reduce = reduce(block), reduce(root)
        self.gather = self.root = self.after = self.copies = 0.0
        if self.every_micro:
            self.gather, self.root = (
                wire(collectives.ALL_GATHER, count, run.stack.gather_bytes) for count in (block, root)
            )
            if run.stack.shard_copies:
                self.copies = analytic.stream_seconds(block * 5, cluster.device, launches=2)
        elif run.shard == "zero1":
            self.after = wire(collectives.ALL_GATHER, parameters(run), 2)


def predict(run: Run, *, detail: dict[str, Any] | None = None) -> float:
    """Tokens per second of one device."""
    return run.accumulate * run.tokens / step_seconds(run, detail=detail)


# ---------------------------------------------------------------- errors


def compare(rows: Iterable[dict[str, str]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """One result a row in scope, and how many rows were left out for which reason."""
    found, left = [], {}
    for row in rows:
        why = out_of_scope(row)
        if why:
            left[why] = left.get(why, 0) + 1
            continue
        run = run_of(row)
        detail: dict[str, Any] = {}
        try:
            guess = predict(run, detail=detail)
        except UnknownName:
            left["unknown device"] = left.get("unknown device", 0) + 1
            continue
        found.append(
            {
                "id": run.id, "source": run.source, "stack": run.stack.name, "gpu": run.gpu, "gpus": run.world,
                "published": round(run.tokens_per_second, 1), "predicted": round(guess, 1),
                "error": round(guess / run.tokens_per_second - 1, 4), "fitted": fitted(run.id),
                "scored": run.source not in NOT_SCORED, **{k: _short(v) for k, v in detail.items()},
                "date": time.strftime("%Y-%m-%d"),
            }
        )  # fmt: skip
    return found, left


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def mape(results: Iterable[dict[str, Any]]) -> float:
    errors = [abs(result["error"]) for result in results]
    return sum(errors) / len(errors) if errors else 0.0


def fitted(name: str) -> bool:
    """Whether constants were fitted on the row: those of these sources whose number is even."""
    number = name.rsplit("-", 1)[-1]
    return name.split("-")[0] in FITTED and number.isdigit() and int(number) % 2 == 0


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    for source in sorted({result["source"] for result in results}):
        mine = [result for result in results if result["source"] == source]
        errors = [result["error"] for result in mine]
        held = [result for result in mine if not result["fitted"]]
        unseen = f"{mape(held):6.1%}" if held else "     –"
        yield (
            f"{source:10} {len(mine):4} rows  mean |error| {mape(mine):6.1%}  not fitted {unseen}  "
            f"median {statistics.median(errors):+6.1%}  worst {max(map(abs, errors)):6.1%}"
        )
    scored = [result for result in results if result["scored"]]
    held = [result for result in scored if not result["fitted"]]
    yield f"all        {len(scored):4} rows  mean |error| {mape(scored):6.2%}  not fitted {mape(held):6.2%}  bar {BAR:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="table of published runs")
    parser.add_argument("--rows", action="store_true", help="one line a run")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    asked = parser.parse_args()
    if not asked.runs.exists():
        parser.error(f"{asked.runs} is not there; give the table with --runs")
    results, left = compare(read(asked.runs))
    for result in results if asked.rows else ():
        print(
            f"{result['id']:14} {result['gpu']:26} {result['gpus']:4} {result['published']:9.0f} "
            f"{result['predicted']:9.0f} {result['error']:+7.1%}"
        )
    print("\n".join(table(results)))
    for why, count in sorted(left.items(), key=lambda item: -item[1]):
        print(f"  left out {count:4}: {why}")
    if asked.save:
        RESULTS.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    return 0 if mape(result for result in results if result["scored"]) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
