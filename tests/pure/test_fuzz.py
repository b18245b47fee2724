"""Generated models: they pass, are always the same, and what fails shrinks to its culprit; what they found stays mended."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from foretell.cli import main
from foretell.errors import ModelError
from foretell.plan.types import Plan, Residency
from foretell.prove.fuzz import campaign, check, rules
from foretell.prove.fuzz.generate import draw
from foretell.prove.fuzz.render import render, shapes_of
from foretell.prove.fuzz.shrink import shrunk
from foretell.prove.fuzz.table_moves import BY_NAME, KINDS, OPERATORS
from foretell.prove.fuzz.types import Failure, FuzzVerdict, Operator
from foretell.runtime.parallel.apply import apply
from foretell.trace.load.model import Source
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.record.step import Workload
from foretell.trace.types import Trace
from tests.pure.on_cpu import compare_on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = "tests"
FEW, MODELS = 3, 18
"""In `make test`, and of one slow test."""


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(FEW))
def test_a_model_of_a_seed_traces_needs_what_is_predicted_and_composes(index: int, tmp_path: Path) -> None:
    model, run, _ = check.drawn(SEED, index, 7, tmp_path)
    found = check.judged(model, tmp_path, run=run)
    assert found.failure is None and found.traced and found.composed and abs(found.error) <= check.WITHIN


@pytest.mark.slow(reason="many more models of the seed")
@pytest.mark.parametrize("first", [0, MODELS])
def test_models_of_a_seed_trace_need_what_is_predicted_and_compose(first: int, tmp_path: Path) -> None:
    found = []
    for index in range(first, first + MODELS):
        model, run, _ = check.drawn(SEED, index, 7, tmp_path)
        found.append(check.judged(model, tmp_path, run=run))
    assert [one.failure for one in found if one.failure is not None] == []
    assert all(one.traced and one.composed and abs(one.error) <= check.WITHIN for one in found)
    assert sum(one.blocks > 0 for one in found) >= 5 and len({name for one in found for name in one.names}) > 80
    assert sorted(abs(one.error) for one in found)[MODELS // 2] < 0.001


def test_a_model_is_its_seed_and_number() -> None:
    first, again, other, of_another = draw("7", 3), draw("7", 3), draw("7", 4), draw("8", 3)
    assert first == again and render(first) == render(again)
    assert len({render(one) for one in (first, other, of_another)}) == 3


def test_a_model_is_a_plain_file(tmp_path: Path) -> None:
    model, run, _ = check.drawn("7", 1, 8, tmp_path)
    names: dict[str, Any] = {}
    exec(compile(render(model), "model.py", "exec"), names)
    assert "foretell" not in render(model).split('"""')[2]
    torch.manual_seed(0)
    module = names["build"]()
    batch = names["batch"](module)
    torch.manual_seed(1)
    total = sum(
        float(names["loss"](module(**{k: v for k, v in one.items() if k.startswith("x")}), one).detach() / model.accumulate)
        for one in check._batches(batch, model, 0)
    )
    assert total == pytest.approx(run.losses[0], rel=1e-5)


def test_the_table_has_ops_of_every_kind() -> None:
    assert len(OPERATORS) == len(BY_NAME) > 120
    assert {"attention", "complex", "construct", "convolution", "fft", "in-place", "linalg", "recurrent", "sort"} <= set(KINDS)


# --- rules -----------------------------------------------------------------------------------------------------------


def cases(operator: Operator, dice: random.Random, count: int) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Some ranks and discrete arguments of an operator."""
    every = list(itertools.product(*[slot.ranks for slot in operator.slots]))
    found = []
    for ranks in dice.sample(every, min(count, len(every))):
        known = {
            name: dice.randrange(ranks[0]) if of == "axis" else tuple(dice.sample(range(ranks[0]), ranks[0])) if of == "order" else dice.choice(of)
            for name, of in operator.args.items() if of != "size"
        }  # fmt: skip
        found.append((ranks, known))
    return found


def test_inferred_rules_are_those_of_torch_on_arguments_they_never_saw() -> None:
    dice = random.Random("held out")
    told = {"right": 0, "wrong": 0, "valid": 0, "other shape": 0}
    for operator in dice.sample([one for one in OPERATORS if one.kind not in ("unary", "recurrent", "linalg")], 45):
        for ranks, known in cases(operator, dice, 2):
            rule = rules.rule_of(operator, ranks, known)
            if rule is None:
                continue
            for _ in range(12):
                names = [*(name for group in rule.groups for name in group), *rule.free]
                sizes: dict[str, int] = {}
                for name in names:
                    sizes[name] = dice.choice(list(sizes.values())) if sizes and dice.random() < 0.7 else dice.choice((1, 2, 3, 5, 7, 9, 10))
                shapes = [tuple(sizes[name] for name in group) for group in rule.groups]
                if any(torch.Size(shape).numel() > 20_000 for shape in shapes):
                    continue
                real = rules.tried(operator, shapes, {**known, **{name: sizes[name] for name in rule.free}}, "cpu")
                said = rule.result(sizes) if rule.allows(sizes) else None
                told["right" if (said is None) == (real is None) else "wrong"] += 1
                if said is not None and real is not None:
                    told["valid"] += 1
                    told["other shape"] += said != real
    assert told["valid"] > 100 and told["right"] > 600
    assert told["wrong"] <= 0.01 * told["right"] and told["other shape"] <= 0.005 * told["valid"]


@pytest.mark.parametrize(
    ("name", "ranks", "known", "valid", "shape"),
    [
        ("mm", (2, 2), {}, {("equal", "a1", "b0")}, (("same", "a0"), ("same", "b1"))),
        ("add", (2, 1), {}, {("broadcast", "a1", "b0")}, (("same", "a0"), ("wider", "a1", "b0"))),
        ("topk", (2,), {"dim": 1}, {("at most", "k", "a1", 0)}, (("same", "a0"), ("same", "k"))),
        ("reshape", (2, 3), {}, {("product", ("a0", "a1"), ("b0", "b1", "b2"))}, (("same", "b0"), ("same", "b1"), ("same", "b2"))),
        ("glu", (2,), {"dim": 1}, {("divisible by", "a1", 2)}, (("same", "a0"), ("affine", "a1", 1, 0, 2))),
    ],
)
def test_rules_are_what_one_would_write(name: str, ranks: Any, known: Any, valid: Any, shape: Any) -> None:
    rule = rules.rule_of(BY_NAME[name], ranks, known)
    assert rule is not None and set(rule.valid) == valid and rule.outputs[0][1] == shape and not rule.loose


# --- shrinking -------------------------------------------------------------------------------------------------------


def inflated(operator: str) -> check.Predict:
    """A predictor with a fault: what this op makes counts three times."""

    def predict(trace: Trace) -> int:
        held = trace.storages
        wrong = {
            number: held[number]._replace(nbytes=3 * held[number].nbytes)
            for program in trace.programs.values() for op in program.ops if op.name.startswith(f"aten.{operator}.")
            for number in op.allocates
        }  # fmt: skip
        return check.predict(Trace(trace.programs, trace.schedule, {**trace.storages, **wrong}, trace.resident, trace.meta))

    return predict


def test_a_fault_in_one_op_shrinks_to_that_op(tmp_path: Path) -> None:
    predict = inflated("roll")
    for index in range(200):
        if "roll" not in draw("culprit", index, 8).names:
            continue
        model, run, _ = check.drawn("culprit", index, 8, tmp_path)
        failure = check.judged(model, tmp_path, run=run, predict=predict).failure
        if failure is not None and model.ops > 5:
            break
    assert failure is not None and failure.kind == "memory" and "over" in failure.alike
    small, trials = shrunk(model, lambda one: check.fails_alike(one, tmp_path, failure, predict))
    assert "roll" in small.names and small.ops <= 3 < model.ops and trials > 3
    assert check.judged(small, tmp_path).failure is None  # the fault is the predictor's alone
    text = check.repro(small, failure)
    assert "torch.roll" in text and failure.said.split(";")[0][:40] in text and "tell(__file__" in text
    (tmp_path / "repro.py").write_text(text)
    assert check.tell(str(tmp_path / "repro.py"), optimizer=small.optimizer).startswith("nothing fails")


def test_what_is_smaller_is_still_a_model(tmp_path: Path) -> None:
    """Reduced by nothing but size, what is left is one op."""
    model, _, _ = check.drawn("7", 5, 12, tmp_path)
    small, _ = shrunk(model, lambda one: bool(shapes_of(one)), most=400)
    assert small.ops == 1 < model.ops
    assert (small.optimizer, small.accumulate, small.clip, small.recompute) == ("sgd", 1, None, "none")


# --- campaigns -------------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="three processes that import torch")
def test_a_campaign_outlives_a_process_that_dies(tmp_path: Path) -> None:
    worker = campaign.Worker(SEED, 6)
    try:
        died = worker.ask("shrink", 0, {"no": "failure"}, 60)
        assert isinstance(died, str) and died.startswith("crash")
        answer = worker.ask("judge", 0, None, 60)
        assert isinstance(answer, dict) and FuzzVerdict.from_json(answer).composed
        slow = worker.ask("judge", 1, None, 0.0)
        assert isinstance(slow, str) and slow.startswith("hang")
    finally:
        worker.stop()


def test_the_command_tells_the_whole_and_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--n", "1", "--seed", SEED, "--ops", "5", "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["fuzz"]
    assert (told["models"], told["traced"], told["composed"], told["failures"]) == (1, 1, 1, 0)
    assert len((tmp_path / "out" / "rows.jsonl").read_text().splitlines()) == 1
    for words in (["--n", "0"], ["--ops", "0"], ["--seed", "a/b"]):
        assert main(["fuzz", *words]) == 2
        assert "try:" in capsys.readouterr().err


def test_a_failure_is_told_with_its_file() -> None:
    good = FuzzVerdict(0, 5, ("add",), 100, 100, traced=True, composed=True)
    bad = FuzzVerdict(1, 3, ("mul",), 200, 100, traced=True, failure=Failure("memory", "too much"))
    found = campaign.Campaign("1", 2, [good, bad], ["memory_1.py"])
    assert found.line() == (
        "2 models, 8 ops of 2 kinds; traced 2, memory within 5% 1 (median 50.00%, worst 100.00%), composed equal 1; failures 1 → memory_1.py"
    )
    assert FuzzVerdict.from_json(json.loads(json.dumps(found.verdicts[1].to_json()))) == found.verdicts[1]


# --- what they found -------------------------------------------------------------------------------------------------

FOUND = {
    "a mean square keeps its elements": "F.mse_loss(self.a(x), torch.zeros(64, 96))",
    "a smooth loss too": "F.smooth_l1_loss(self.a(x), torch.zeros(64, 96))",
    "products without zeros": "self.a(x).prod(0).square().mean()",
    "running products": "torch.cumprod(torch.sigmoid(self.a(x)), 1).mean()",
    "largest go back into zeros": "self.a(x).max(0).values.square().mean()",
    "sorted too": "self.a(x).sort(0).values.square().mean()",
    "gathered too": "self.a(x).gather(0, self.i).square().mean()",
    "indexed too": "self.a(x)[self.i[:, 0]].square().mean()",
    "a formula that adds": "sum(part.abs().mean() for part in torch.var_mean(self.a(x), 1))",
    "a biased product nobody takes": "[self.a(x.view(4, 16, 96).transpose(0, 1)) is None, self.a(x).square().mean()][1]",
    "a norm of what wants no gradient": "self.n(x).diagonal().square().mean() + self.a(x[:1]).mean()",
    "largest of what wants no gradient": "self.a(F.max_pool1d(x.repeat(4, 2), 2)).square().mean()",
    "a norm of strided input is dense": "self.a(self.n(torch.fft.fft(self.a(x)).real).view(4, 16, 96)).square().mean()",
    "a grid of one pixel": "F.affine_grid(self.a(x[:2])[:, :6].view(2, 2, 3), (2, 1, 1, 4096), align_corners=False).square().mean()",
    "a bias that is trained alone": "F.conv_transpose1d(x.view(2, 32, 96), self.a.weight.detach()[:, :72].reshape(32, 24, 9), "
    "self.a.bias[:24], stride=2).square().mean()",
    "rolled channels stay where they are": "self.a(torch.roll(self.a(x).view(4, 4, 4, 96).permute(0, 3, 1, 2), 1, 2).flatten(2)"
    ".repeat(1, 1, 6)).square().mean()",
    "conjugates are copied": "torch.polar(self.a(x).abs() + 1, self.a(x)).real.abs().mean()",
}
FILE = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Linear(96, 96), nn.BatchNorm1d(96)
        self.register_buffer("i", torch.randint(0, 64, (64, 96)))

    def forward(self, x):
        return {}

def build(): return Model()
def batch(model): return {{"x": torch.randn(64, 96)}}
def loss(output, batch): return output
"""


ALIKE = pytest.mark.slow(reason="of the same rule as the one above it")


@pytest.mark.parametrize("name", [pytest.param(name, marks=ALIKE) if name.endswith(" too") else name for name in FOUND])
def test_what_models_found_is_exact_now(name: str, tmp_path: Path) -> None:
    (tmp_path / "found.py").write_text(FILE.format(FOUND[name]))
    predicted, measured, _ = compare_on_cpu(Source(model=f"{tmp_path}/found.py:build"), Recipe(precision="fp32", optimizer="sgd"))
    assert predicted == pytest.approx(measured, abs=64)


class Counting(nn.Module):
    """A block that reads what it updates."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean(0))
        return x + self.norm(self.linear(x)) * self.seen


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def mean_square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def test_recomputed_blocks_see_buffers_as_they_were_and_leave_them_as_they_are() -> None:
    def run(mode: str) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model, batch = Stack(Counting), {"x": torch.randn(16, 8)}
        modes = {f"blocks.{number}": Residency(mode=mode) for number in range(3)}
        plan = Plan(model={"model": "m"}, hardware="auto", precision="fp32", optimizer="sgd", clip=None, accumulate=2, blocks=modes)
        job = apply(Workload(model, batch, mean_square), plan, check.ALONE, learning_rate=0.1)
        losses = [float(job.train_step([batch, {"x": -batch["x"]}]).loss) for _ in range(3)]
        return losses, {name: value.clone() for name, value in model.state_dict().items()}

    kept = run("keep")
    for mode in ("recompute", "selective"):
        losses, state = run(mode)
        assert losses == kept[0]
        assert all(torch.equal(value, state[name]) for name, value in kept[1].items())


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.linear(x))


class Steep(Rectified):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(self.linear(x)).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(("block", "said"), [(Rectified, "changes in place"), (Steep, "differentiates inside")])
def test_what_selective_recompute_cannot_do_is_said_and_full_recompute_does_it(block: type[nn.Module], said: str) -> None:
    def traced(how: str) -> Trace:
        return capture(lambda: Workload(Stack(block), {"x": torch.randn(16, 8)}, mean_square), Recipe(precision="fp32", recompute=how))

    assert traced("full").programs
    with pytest.raises(ModelError, match=said):
        traced("selective")


STOPS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(96, 96)

    def forward(self, x):
        made = self.a(x)
        beside = torch.cat([made, made], 1).tanh()
        return torch.cummax(made, 0).values

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build(): return Model()
def batch(model): return {"x": torch.randn(256, 96)}
def loss(output, batch): return output.square().mean()
"""


def test_where_recomputation_stops_the_record_calls_results_scratch(tmp_path: Path) -> None:
    """Why a prediction may lie above what was measured of a recomputed step: without the early stop, both are the same."""
    (tmp_path / "stops.py").write_text(STOPS)
    source, recipe = Source(model=f"{tmp_path}/stops.py:build"), Recipe(precision="fp32", optimizer="sgd", recompute="full")
    predicted = check.predict(trace_as_cpu(source, recipe))
    measured, whole = measure_on_cpu(source, recipe)
    assert measured * (1 + check.WITHIN) < predicted <= whole
    with set_checkpoint_early_stop(False):
        assert measure_on_cpu(source, recipe)[0] == pytest.approx(predicted, abs=64)
