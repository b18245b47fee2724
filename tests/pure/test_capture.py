"""What a trace says of a step, held against real runs, brute force and a grid of choices measured on an H200."""

from __future__ import annotations

import copy
import functools
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from foretell.errors import ModelError
from foretell.simulate.memory.replay import peak_live
from foretell.trace.adapters.formats import pack, unpack
from foretell.trace.cuda.attention import choose
from foretell.trace.load.model import Source, load
from foretell.trace.load.module import capture_module
from foretell.trace.recipe import Adapters, Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace

GRID = Path(__file__).parents[1] / "data" / "sdpa_choices_h200.json.gz"
BROADCAST = GRID.with_name("sdpa_broadcast_h200.json.gz")
STEPS = ("first_step", "steady_step", "steady_step")


@functools.cache
def traced(model: str, *, routing: str | None = None, nonzero: float | None = None, **recipe: Any) -> Trace:
    source = Source(model=model, micro_batch=2, overrides={"routing": routing} if routing else {})
    hints = None if nonzero is None else {"aten.nonzero.default": nonzero}
    return capture(lambda: load(source), Recipe(**recipe), hints=hints)


def measured(source: Source, recipe: Recipe) -> int:
    """Peak bytes in tensors of a real run, without what CPU kernels take for themselves."""
    return measure_on_cpu(source, recipe)[0]


def bytes_by_role(trace: Trace) -> Counter[str]:
    found: Counter[str] = Counter()
    for storage in trace.storages.values():
        found[storage.role] += storage.nbytes
    return found


def flops_in(trace: Trace, phase: str, inside: str = "") -> int:
    ops = trace.programs["micro_first"].ops
    return sum(op.flops or 0 for op in ops if op.phase == phase and op.module.startswith(inside))


# --------------------------------------------------------------------------- CUDA's choice of an attention kernel


def grid_rows(grid: dict) -> Iterator[tuple[tuple, str]]:
    """(dtype, head, lengths, mask, dropout, causal, grad, gqa) and what the H200 chose, in the order measured."""
    chosen = iter(grid["chosen"])
    for row in itertools.product(*grid["axes"].values()):
        if not (row[5] and (row[3] or row[2][0] != row[2][1])):
            yield row, grid["choices"][int(next(chosen))]
    assert next(chosen, None) is None


def test_attention_choices_equal_those_of_an_h200() -> None:
    """Every one of 15,912 combinations for which torch 2.11 was asked for its choice on the GPU."""
    grid = json.loads(gzip.decompress(GRID.read_bytes()))
    wrong: Counter[tuple[str, str, str, int]] = Counter()
    count = 0
    for (name, head, (queries, keys), kind, dropout, causal, grad, gqa), real in grid_rows(grid):
        dtype = getattr(torch, name)
        query = torch.empty(2, 8, queries, head, dtype=dtype, device="meta", requires_grad=grad)
        key = torch.empty(2, 2 if gqa else 8, keys, head, dtype=dtype, device="meta", requires_grad=grad)
        shape = (1, 1, queries, keys) if kind == "bcast" else (2, 8, queries, keys)
        kinds = {"bool": torch.bool, "float": torch.float32, "same": dtype, "bcast": dtype}
        mask = torch.empty(shape, dtype=kinds[kind], device="meta") if kind else None
        ours = choose(query, key, key, mask, dropout, causal, gqa, (9, 0), grad, grid["torch"])
        count += 1
        if ours != real:
            wrong[ours, real, name, head] += 1
    assert count == 15912
    assert not wrong


def test_no_fused_attention_broadcasts_heads_or_samples() -> None:
    """2,400 combinations of unlike heads, samples and masks, as an H200 chose."""
    grid = json.loads(gzip.decompress(BROADCAST.read_bytes()))
    wrong = Counter()
    for name, *shapes, gqa, mask, causal, real in grid["rows"]:
        dtype = getattr(torch, name)
        query, key, value = (torch.empty(*shape, 64, 64, dtype=dtype, device="meta", requires_grad=True) for shape in shapes)
        given = torch.empty(mask, dtype=dtype, device="meta") if mask else None
        ours = choose(query, key, value, given, 0.0, causal, gqa, (9, 0), True, grid["torch"])
        wrong[ours, real] += ours != real
    assert len(grid["rows"]) == 2400 and not wrong.total()


def test_attention_choice_elsewhere_than_on_hopper() -> None:
    """PyTorch tries cuDNN first on Hopper and data centre Blackwell only, with heads over 128 on Hopper alone."""

    def chosen(head: int, capability: tuple[int, int], value: int | None = None, **more: Any) -> str:
        dtype = more.get("dtype", torch.bfloat16)
        query = torch.empty(2, 8, 64, head, dtype=dtype, device="meta")
        values = torch.empty(2, 8, 64, value or head, dtype=dtype, device="meta")
        return choose(query, query, values, more.get("mask"), 0.0, False, False, capability, more.get("grad", True), torch.__version__)

    assert [chosen(64, c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == ["flash", "flash", "cudnn", "cudnn", "flash"]
    assert [chosen(256, c) for c in ((8, 0), (9, 0), (10, 0))] == ["flash", "cudnn", "flash"]
    assert [chosen(192, c, 128) for c in ((8, 0), (9, 0), (10, 0))] == ["efficient", "cudnn", "cudnn"]
    assert chosen(64, (7, 5), dtype=torch.float16) == "efficient" and chosen(64, (7, 5)) == "math"
    mask = torch.empty(2, 8, 64, 64, dtype=torch.bfloat16, device="meta")
    assert chosen(64, (8, 0), mask=mask) == "efficient"


def test_attention_kernels_that_are_switched_off_are_not_chosen() -> None:
    """`sdpa_kernel` and the switches of torch.backends.cuda, which user code turns to rule a kernel out."""
    query = torch.empty(2, 8, 64, 64, dtype=torch.bfloat16, device="meta")

    def chosen(mask: Tensor | None = None) -> str:
        return choose(query, query, query, mask, 0.0, False, False, (9, 0), True, torch.__version__)

    for only in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        with sdpa_kernel(getattr(SDPBackend, only)):
            assert chosen() == only.partition("_")[0].lower()
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert chosen() == "efficient"
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(ModelError, match=r"switched on \(flash\).*with a mask"):
        chosen(torch.empty(2, 8, 64, 64, dtype=torch.bfloat16, device="meta"))
    assert chosen() == "cudnn"


def test_a_step_keeps_the_scores_where_the_model_asks_for_the_plain_kernel() -> None:
    """A model that rules fused kernels out keeps a matrix of scores for each head, as its run does."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            query, key, value = self.project(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(SDPBackend.MATH):
                return nn.functional.scaled_dot_product_attention(query, key, value).sum()

    model = Attention()
    trace = capture_module(model, torch.randn(2, 128, 64), lambda out, _: out, Recipe(precision="bf16-autocast"), capability=(9, 0), hints=None)
    names = {op.name for op in trace.programs["micro_first"].ops}
    assert "aten._safe_softmax.default" in names and not any("_attention_backward" in name for name in names)


@functools.lru_cache(4)
def angles(length: int, more: str = "") -> dict[str, tuple[Tensor, str]]:
    return {"table": (torch.arange(float(length)).cos(), more)}


def test_a_trace_leaves_nothing_to_real_steps_in_what_functions_remember() -> None:
    """Tables of positions that a library keeps between calls: those of a trace have no numbers."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.project(x) * angles(8)["table"][0]).sum()

    model, x = Turned(), torch.randn(2, 8)
    real = model(x)
    angles.cache_clear()
    capture_module(model, x, lambda out, _: out, Recipe(precision="fp32"), capability=None, hints=None)
    assert torch.equal(model(x), real)
    kept = angles.cache_info().hits
    capture_module(model, x, lambda out, _: out, Recipe(precision="fp32"), capability=None, hints=None)
    assert angles.cache_info().hits > kept  # what real steps left is still there


# --------------------------------------------------------------------------- against a real run on this CPU

EXACT: list[dict[str, Any]] = [
    {}, {"optimizer": "sgd"}, {"optimizer": "momentum"}, {"accumulate": 2}, {"accumulate": 3}, {"clip": 1.0},
    {"recompute": "full"}, {"recompute": "selective"}, {"freeze": ("tokens", "positions", "blocks.0")},
    {"precision": "bf16-autocast"},
]  # fmt: skip


ACTIVE = ("gpt-tiny", "llama-tiny", "bert-tiny", "mixtral-tiny", "tnt-tiny", "ssm-tiny")
BF16 = pytest.param({"precision": "bf16"}, marks=pytest.mark.slow(reason="products in bf16 take seconds on most CPUs"))

TWICE = pytest.mark.slow(reason="another number or optimizer through the same code")
AGAIN = ({"optimizer": "momentum"}, {"accumulate": 3}, {"optimizer": "sgd"}, {"clip": 1.0})


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(one, marks=TWICE if one in AGAIN else ()) for one in EXACT), BF16],
    ids=lambda o: "-".join(map(str, o.values())) or "default",
)
def test_peak_of_a_cpu_step_is_exact_to_the_byte(options: dict[str, Any]) -> None:
    """Short sequences: the peak is where the two gradients of the tied embedding meet."""
    seq = 8 if "precision" in options else 32  # products in bf16 take long on most CPUs
    source, recipe = Source(model="gpt-tiny", micro_batch=2, seq=seq), Recipe(**{"precision": "fp32", **options})
    assert peak_live(trace_as_cpu(source, recipe), STEPS[:2]) == measured(source, recipe)


def test_peak_of_a_recurrent_cpu_step_counts_what_the_library_keeps() -> None:
    source, recipe = Source(model="lstm-tiny", micro_batch=2), Recipe(precision="fp32")
    assert peak_live(trace_as_cpu(source, recipe), STEPS[:2]) == pytest.approx(measured(source, recipe), rel=0.005)


ANOTHER = pytest.mark.slow(reason="another model; what is held of it is counted as for those that run")


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in ("gpt-tiny", "mixtral-tiny") else ANOTHER) for model in ACTIVE]
)
def test_peak_in_the_activations_is_exact_too(model: str) -> None:
    source, recipe = Source(model=model, micro_batch=1), Recipe(precision="fp32")
    trace = trace_as_cpu(source, recipe)
    assert peak_live(trace, STEPS[:2]) == measured(source, recipe)


@pytest.mark.parametrize("optimizer", [pytest.param("adam-loop", marks=TWICE), "adamw-foreach"])
def test_peak_in_the_update_is_exact_but_for_numbers(optimizer: str) -> None:
    """PyTorch makes tensors of 4 or 8 bytes of Python numbers; two are alive where these optimizers peak."""
    source, recipe = Source(model="gpt-tiny", seq=32), Recipe(precision="fp32", optimizer=optimizer)
    assert 0 <= measured(source, recipe) - peak_live(trace_as_cpu(source, recipe), STEPS[:2]) <= 16


def test_the_random_states_that_recompute_keeps_are_traced_too() -> None:
    """One for each block, and one more while a block is computed again; on a GPU machine that is host memory."""
    source, recipe = Source(model="gpt-tiny"), Recipe(precision="fp32", recompute="full")
    assert measured(source, recipe) == peak_live(trace_as_cpu(source, recipe), STEPS[:2])


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("lora", ()), ("dora", (("adapted", "nf4-double"),)), ("lora", (("adapted", "int8"), ("up", "float8"), ("down", "bf16"))),
    ],
)  # fmt: skip
def test_adapters_are_exact(kind: str, base: tuple[tuple[str, str], ...]) -> None:
    """But for the tables of formats that a process makes once, before it is looked at here."""
    for one in ("nf4-double", "int8", "float8"):
        unpack(*pack(torch.zeros(64), one), (64,), torch.float32, one)
    source, recipe = Source(model="gpt-tiny"), Recipe(precision="fp32", adapters=Adapters(kind=kind, rank=4), base=base)
    assert measured(source, recipe) == peak_live(trace_as_cpu(source, recipe), STEPS[:2])


# --------------------------------------------------------------------------- modules and phases


CROSSED = pytest.mark.slow(reason="each model, and each way to recompute, is there with another")


@pytest.mark.parametrize(
    ("recompute", "model"),
    [
        pytest.param(recompute, model, marks=() if kept else CROSSED)
        for recompute, model, kept in (
            ("none", "gpt-tiny", True), ("full", "gpt-tiny", True), ("selective", "gpt-tiny", True), ("none", "llama-tiny", False),
            ("full", "llama-tiny", True), ("selective", "llama-tiny", False), ("none", "vit-tiny", False),
            ("full", "vit-tiny", False), ("selective", "vit-tiny", True),
        )
    ],
)  # fmt: skip
def test_backward_ops_know_their_module_and_phase(model: str, recompute: str) -> None:
    trace = traced(model, recompute=recompute)
    paths = {name for name, _ in load(Source(model=model)).model.named_modules()}
    ops = [op for op in trace.programs["micro_first"].ops if not op.name.startswith("foretell.")]
    assert {op.module for op in ops} <= paths
    phases = {"forward", "backward", "recompute"} if recompute != "none" else {"forward", "backward"}
    assert {op.phase for op in ops} == phases
    assert {op.phase for op in trace.programs["update"].ops} == {"update"}
    behind = [op for op in ops if op.phase in ("backward", "recompute")]
    outside = Counter(op.name for op in ops if op.phase == "forward" and not op.module)
    nowhere = [op for op in behind if not op.module]
    assert len(nowhere) <= 3 * outside.total(), "backward of what the top level and the loss compute themselves"
    assert sum(bool(op.module) for op in behind) >= 0.95 * (len(behind) - len(nowhere)) > 0
    assert sum(op.flops or 0 for op in nowhere) <= 0.1 * sum(op.flops or 0 for op in behind)


@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny", "vit-tiny"])
def test_backward_of_every_module_costs_twice_its_forward(model: str) -> None:
    """Matrix products come in threes; a backward op given to the wrong module would break the ratio in both."""
    trace = traced(model)
    products = [op for op in trace.programs["micro_first"].ops if op.name in ("aten.mm.default", "aten.addmm.default")]
    ahead, behind = Counter[str](), Counter[str]()
    for op in products:
        (ahead if op.phase == "forward" else behind)[op.module] += op.flops or 0
    assert set(ahead) == set(behind) and len(ahead) >= 12
    for module, forward in ahead.items():
        assert behind[module] == 2 * forward, module


@pytest.mark.parametrize("model", ["gpt-tiny", pytest.param("llama-tiny", marks=ANOTHER), pytest.param("vit-tiny", marks=ANOTHER)])
def test_recompute_computes_blocks_again_and_keeps_less(model: str) -> None:
    none, selective, full = (traced(model, recompute=how) for how in ("none", "selective", "full"))

    def saved(trace: Trace, inside: str) -> int:
        return sum(s.nbytes for s in trace.storages.values() if s.saved and s.module.startswith(inside))

    assert saved(none, "blocks.") > saved(selective, "blocks.") > saved(full, "blocks.")
    assert saved(none, "norm") == saved(full, "norm") > 0
    blocks = flops_in(none, "forward", "blocks.")
    assert flops_in(none, "recompute") == 0
    assert flops_in(full, "forward") == flops_in(none, "forward")
    assert flops_in(full, "backward") == flops_in(none, "backward")
    # checkpoint stops as soon as the last saved tensor is there: the last product of a block is not computed again
    last = max(
        (op for op in none.programs["micro_first"].ops if op.phase == "forward" and op.module.startswith("blocks.0.")),
        key=lambda op: (op.name in ("aten.mm.default", "aten.addmm.default"), none.programs["micro_first"].ops.index(op)),
    )
    left_out = len(none.meta["blocks"]) * (last.flops or 0)  # type: ignore[arg-type]
    assert flops_in(full, "recompute") == pytest.approx(blocks - left_out, rel=0.02)
    assert flops_in(selective, "recompute") < 0.02 * blocks


# --------------------------------------------------------------------------- storages

MANY: list[tuple[str, dict[str, Any]]] = [
    ("gpt-tiny", {}), ("gpt-tiny", {"accumulate": 3}), ("gpt-tiny", {"recompute": "full", "clip": 1.0}),
    ("gpt-tiny", {"precision": "fp16-autocast", "clip": 1.0}), ("gpt-tiny", {"optimizer": "adamw", "clip": 1.0}),
    ("gpt-tiny", {"optimizer": "adamw-loop"}), ("gpt-tiny", {"lora": 4, "nf4": True}), ("llama-tiny", {}),
    ("vit-tiny", {"optimizer": "momentum"}), ("t5-tiny", {}), ("resnet-tiny", {}), ("lstm-tiny", {}),
    ("mixtral-tiny", {}),
]  # fmt: skip


LEAKS = [pytest.param(*one, marks=ANOTHER if one[0] in ("t5-tiny", "resnet-tiny") or one[1] == {"optimizer": "adamw-loop"} else ()) for one in MANY]


@pytest.mark.parametrize(("model", "recipe"), LEAKS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())))
def test_nothing_leaks_and_nothing_dies_twice(model: str, recipe: dict[str, Any]) -> None:
    trace = traced(model, **recipe)
    alive, after = set(trace.resident), []
    assert len(alive) == len(trace.resident)
    for name in (*STEPS, "steady_step"):
        for program, times in trace.schedule[name]:
            for op in trace.programs[program].ops * times:
                assert not alive & set(op.allocates), op
                alive |= set(op.allocates)
                for number in op.frees:
                    # constants made of Python numbers (`torch.tensor(0.0)`) come from no op, and die all the same
                    assert number in alive or trace.storages[number].nbytes <= 8, op
                    alive.discard(number)
        after.append(set(alive))
    assert after[0] == after[1] == after[2] == after[3]
    assert {trace.storages[number].role for number in after[0] - set(trace.resident)} <= {"optimizer"}


def test_inputs_of_an_op_are_alive_when_it_runs() -> None:
    for trace in (traced("gpt-tiny", recompute="full"), traced("llama-tiny", accumulate=2), traced("vit-tiny")):
        alive = set(trace.resident)
        for name in STEPS:
            for program, times in trace.schedule[name]:
                for op in trace.programs[program].ops * times:
                    assert {ref.storage for ref in op.inputs} <= alive, op
                    alive |= set(op.allocates)
                    assert {ref.storage for ref in op.outputs} <= alive, op
                    alive -= set(op.frees)


@pytest.mark.parametrize("model", ["gpt-tiny", pytest.param("llama-tiny", marks=ANOTHER), pytest.param("vit-tiny", marks=ANOTHER)])
def test_bytes_of_parameters_gradients_and_optimizer_state(model: str) -> None:
    real = load(Source(model=model)).model
    parameters = list(real.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trace = traced(model)
    held = bytes_by_role(trace)
    assert trace.meta["parameters"] == trace.meta["trainable"] == count
    assert held["parameter"] == held["gradient"] == 4 * count
    assert held["optimizer"] == 2 * 4 * count + 4 * len(parameters)
    assert held["buffer"] == sum(buffer.nbytes for buffer in real.buffers())
    assert bytes_by_role(traced(model, optimizer="sgd"))["optimizer"] == 0
    assert bytes_by_role(traced(model, optimizer="momentum"))["optimizer"] == 4 * count
    half = bytes_by_role(traced(model, precision="bf16"))
    assert half["parameter"] == half["gradient"] == 2 * count


def test_what_the_optimizer_makes_are_no_logits() -> None:
    """A foreach op has outputs of many shapes; one that is as wide as the logits does not make logits of them all."""
    trace = traced("gpt-tiny", optimizer="adamw")
    born = {number for name in ("update_first", "update") for op in trace.programs[name].ops for number in op.allocates}
    assert sum(trace.storages[number].role == "temporary" for number in born) > 52
    assert {trace.storages[number].role for number in born} == {"optimizer", "temporary"}
    logits = [s.nbytes for s in trace.storages.values() if s.role == "logits"]
    assert 2 * 128 * 512 * 4 in logits and 2 * 128 * 512 * 2 in logits


class _Wide(torch.nn.Module):
    """A hidden layer as wide as the vocabulary; logits are capped, and shifted by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)
        self.down, self.head = torch.nn.Linear(64, 16), torch.nn.Linear(16, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.nn.functional.gelu(self.up(hidden)))
        return 30 * torch.tanh(self.head(hidden) / 30)


def _shifted(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _segments(output: torch.Tensor, _: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, torch.zeros(2, 8, 8, dtype=torch.long))


def test_logits_are_what_the_loss_reads_from_the_head() -> None:
    """Not what is as wide: neither a hidden layer of the vocabulary's width, nor a picture as wide as there are classes."""
    step = capture(lambda: Workload(_Wide(), torch.zeros(2, 8, dtype=torch.long), _shifted), Recipe(precision="fp32"))
    assert "logits" not in {s.role for s in step.storages.values() if s.module.startswith(("up", "down", "embed"))}
    kept = Counter(s.nbytes for s in step.storages.values() if s.role == "logits" and s.saved)
    row = 64 * 4
    assert kept == {16 * row: 1, 14 * row: 1}, "what tanh saves, and the log-probabilities"
    every = Counter(s.nbytes for s in step.storages.values() if s.role == "logits")
    assert every[16 * row] >= 7 and every[14 * row] >= 3 and set(every) == {16 * row, 14 * row}

    def pictures() -> Workload:
        layers = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(6, 8, 1))
        return Workload(layers, torch.zeros(2, 3, 8, 8), _segments)

    found = capture(pictures, Recipe(precision="fp32"))
    assert {(s.module, s.nbytes) for s in found.storages.values() if s.role == "logits"} == {("2", 2 * 8 * 64 * 4), ("", 2 * 8 * 64 * 4)}
    tiny = traced("gpt-tiny")
    assert not [s for s in tiny.storages.values() if s.role == "logits" and "mlp" in s.module], "its MLP is as wide as its vocabulary"


def test_frozen_prefix_has_no_gradient_and_no_state() -> None:
    real = dict(load(Source(model="gpt-tiny")).model.named_parameters())
    kept = [value for name, value in real.items() if not name.startswith(("tokens", "blocks.0."))]
    assert 0 < len(kept) < len(real)
    trace = traced("gpt-tiny", freeze=("tokens", "blocks.0."))
    held = bytes_by_role(trace)
    trainable = sum(value.numel() for value in kept)
    assert trace.meta["trainable"] == trainable
    assert held["gradient"] == 4 * trainable
    assert held["optimizer"] == 8 * trainable + 4 * len(kept)
    assert held["parameter"] == 4 * sum(value.numel() for value in real.values())
    owners = {s.module for s in trace.storages.values() if s.role in ("gradient", "optimizer")}
    assert not any(owner.startswith(("tokens", "blocks.0")) for owner in owners)


def test_lora_trains_adapters_only_and_nf4_packs_the_base() -> None:
    linear = [
        module
        for path, module in load(Source(model="gpt-tiny")).model.named_modules()
        if isinstance(module, nn.Linear) and path.startswith("blocks.")
    ]
    adapters = sum(4 * (layer.in_features + layer.out_features) for layer in linear)
    plain, lora, packed = traced("gpt-tiny"), traced("gpt-tiny", lora=4), traced("gpt-tiny", lora=4, nf4=True)
    held = bytes_by_role(lora)
    assert lora.meta["trainable"] == packed.meta["trainable"] == adapters
    assert held["gradient"] == 4 * adapters
    assert held["optimizer"] == 8 * adapters + 4 * 2 * len(linear)
    assert held["parameter"] == bytes_by_role(plain)["parameter"] + 4 * adapters
    weights = sum(layer.weight.numel() for layer in linear)
    small = bytes_by_role(packed)
    base = held["parameter"] + held["buffer"] - (small["parameter"] + small["buffer"])
    assert base == 4 * weights - (weights // 2 + 4 * (weights // 64)), "half a byte a weight, one fp32 for every 64"


def test_module_of_the_user_is_left_as_it_was() -> None:
    model = load(Source(model="gpt-tiny", seq=16)).model.eval()
    model.blocks[1].mlp.up.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(value) for name, value in model.named_parameters()}
    forwards = [module.forward.__func__ for module in model.modules()]
    batch = {"input_ids": torch.randint(0, 512, (2, 16))}
    recipe = Recipe(precision="bf16", recompute="full", lora=4, nf4=True)
    for asked in (recipe, Recipe(freeze=("blocks",)), Recipe(mode="infer")):
        capture_module(model, batch, lambda out, _: out.float().mean(), asked, capability=(9, 0), hints=None)
    assert not model.training
    assert {name: id(value) for name, value in model.named_parameters()} == identities
    assert [name for name, value in model.named_parameters() if not value.requires_grad] == ["blocks.1.mlp.up.weight"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.forward.__func__ for module in model.modules()] == forwards
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


# --------------------------------------------------------------------------- what depends on data


class Inner(nn.Module):
    def __init__(self, compute: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layer, x)


class Outer(nn.Module):
    def __init__(self, compute: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(compute)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


def nonzero(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x[torch.nonzero(x[:, 0])[:, 0]])


def where(layer: nn.Linear, x: Tensor) -> Tensor:
    rows, _ = torch.where(x > 0)
    return layer(x[rows])


def mask_of_elements(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    return y[y > 0]


def mask_of_rows(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x[x[:, 0] > 0])


def masked_select(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    return torch.masked_select(y, y > 0)


def item(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x[: int(x.abs().sum().long().item())])


def of_data(compute: Callable, hints: dict[str, float] | None) -> Trace:
    """Of a batch whose numbers nobody knows."""
    return capture(lambda: Workload(Outer(compute), torch.empty(16, 8)), Recipe(precision="fp32"), hints=hints)


DATA = [
    (nonzero, "aten.nonzero.default", 0.25, (4, 8)),
    (where, "aten.nonzero.default", 0.25, (32, 8)),
    (mask_of_elements, "aten.index.Tensor", 0.25, (32,)),
    (mask_of_rows, "aten.index.Tensor", 0.25, (4, 8)),
    (masked_select, "aten.masked_select.default", 0.25, (32,)),
    (item, "aten._local_scalar_dense.default", 3, (3, 8)),
]


@pytest.mark.parametrize(("compute", "op", "hint", "shape"), DATA, ids=lambda v: getattr(v, "__name__", ""))
def test_sizes_that_depend_on_data(compute: Callable, op: str, hint: float, shape: tuple[int, ...]) -> None:
    whole = {(4, 8): (16, 8), (32, 8): (128, 8), (32,): (128,), (3, 8): (1, 8)}[shape]
    for hints in (None, {"another": hint}):
        trace = of_data(compute, hints)
        assert trace.meta["assumed"], "an answer without a hint says what it rests on"
        assert last_sum(trace) == whole
    for pattern in (op, "inner", f"{op}@inner", "aten.*"):
        assert last_sum(of_data(compute, {pattern: hint})) == shape


def last_sum(trace: Trace) -> tuple[int, ...]:
    """Shape of what the loss is the sum of."""
    ops = [o for o in trace.programs["micro_first"].ops if o.phase == "forward" and o.name == "aten.sum.default"]
    return ops[-1].inputs[0].spec.shape


def test_whole_share_of_rows_costs_what_no_mask_costs() -> None:
    masked = of_data(mask_of_rows, {"inner": 1.0})
    plain = of_data(lambda layer, x: layer(x[torch.arange(16)]), None)
    assert flops_in(masked, "forward", "inner.layer") == flops_in(plain, "forward", "inner.layer") > 0


def test_experts_that_take_the_tokens_that_chose_them() -> None:
    even = traced("mixtral-tiny", routing="loop")
    assert any("spread evenly" in line for line in even.meta["assumed"])  # type: ignore[attr-defined]
    products = {}
    for share in (0.125, 0.5):
        trace = traced("mixtral-tiny", routing="loop", nonzero=share)
        found = [op for op in trace.programs["micro_first"].ops if op.name == "aten.nonzero.default"]
        assert found and all(op.outputs[0].spec.shape[0] == share * op.inputs[0].spec.numel for op in found)
        ops = [op for op in trace.programs["micro_first"].ops if op.module == "blocks.0.moe" and op.name == "aten.mm.default"]
        assert {op.phase for op in ops} == {"forward", "backward"}
        products[share] = sum(op.flops or 0 for op in ops)
    assert products[0.5] == 4 * products[0.125] > 0


def test_questions_about_a_whole_tensor_are_answered_as_usual_and_told() -> None:
    def ask(layer: nn.Linear, x: Tensor) -> Tensor:
        if (x > 0).all():
            x = x * 2
        if torch.isnan(x).any():
            x = x + 1
        return layer(x)

    trace = of_data(ask, None)
    assert trace.meta["assumed"] == [
        "aten.gt.Scalar in module 'inner' is taken to be true everywhere",
        "aten.isnan.default in module 'inner' is taken to find none",
    ]
    names = {op.name for op in trace.programs["micro_first"].ops if op.phase == "forward"}
    assert "aten.mul.Tensor" in names and "aten.add.Tensor" not in names
