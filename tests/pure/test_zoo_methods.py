"""Ways of training in the zoo: layers with losses of their own beside backpropagation, and dendrites that grow."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from foretell import api, zoo
from foretell.errors import UserError
from foretell.hardware import parse
from foretell.plan.default import default_plan
from foretell.plan.recipe import model_of, refuse_other_model
from foretell.search.traces import child as search_child
from foretell.simulate.memory.replay import peak_live
from foretell.trace import types
from foretell.trace.fold.deep import extended
from foretell.trace.fold.extend import Doubt
from foretell.trace.fold.phases import in_turn
from foretell.trace.load.model import Source, load
from foretell.trace.load.module import capture_module
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import peaks_of, trace_as_cpu
from foretell.trace.record.step import Step, Workload, compute_loss, each_loss
from foretell.trace.sandbox import child as trace_child
from foretell.trace.sandbox.child import request
from foretell.trace.store.file import loads
from foretell.trace.types import Trace
from foretell.zoo.listing.methods import ENTRIES
from foretell.zoo.methods import perforated
from foretell.zoo.vision import resnet
from tests.pure.on_cpu import compare_on_cpu

SMALL = [entry.name for entry in ENTRIES if entry.small]
LOCAL = ["ff-tiny", "cafo-tiny", "mf-tiny"]
CASES = [*((name, "") for name in SMALL if name != "perforated-tiny"), *(("perforated-tiny", p) for p in perforated.PHASES)]
FP32 = Recipe(precision="fp32")
RUNS = ("first_step", "steady_step")


pytestmark = pytest.mark.usefixtures("one_thread")


def source_of(name: str, **overrides: Any) -> Source:
    return Source(model=name, micro_batch=2, overrides={key: value for key, value in overrides.items() if value != ""})


def loaded(name: str, **overrides: Any) -> Workload:
    torch.manual_seed(0)
    return load(source_of(name, **overrides))


@functools.cache
def here(name: str, **overrides: Any) -> Trace:
    return trace_as_cpu(source_of(name, **overrides), FP32)


def held(trace: Trace, *roles: str) -> int:
    """The most bytes that storages of these roles hold at once."""
    alive: set[int] = set()
    now = most = 0
    for run in RUNS:
        for program, times in trace.schedule[run]:
            for op in trace.programs[program].ops * times:
                born = [n for n in op.allocates if n not in alive and trace.storages[n].role in roles]
                alive.update(born)
                now += sum(trace.storages[n].nbytes for n in born)
                most = max(most, now)
                dead = [n for n in op.frees if n in alive]
                alive.difference_update(dead)
                now -= sum(trace.storages[n].nbytes for n in dead)
    return most


def kept(trace: Trace) -> int:
    return held(trace, types.ACTIVATION, types.TEMPORARY, types.LOGITS)


def trained_bytes(model: nn.Module) -> int:
    return sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)


# ---------------------------------------------------------------- every entry


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_it_trains_all_that_it_says_and_nothing_else(name: str, phase: str) -> None:
    made = loaded(name, phase=phase)
    total = torch.zeros(())
    for loss in each_loss(made, torch.enable_grad):
        total += loss.detach()
        loss.backward()
    assert torch.isfinite(total)
    for path, parameter in made.model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, path
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), path


TWIN = pytest.mark.slow(reason="a step of it runs above and a trace of it is read below; the memory of others is measured")
RUN = (("mf-tiny", ""),)


@pytest.mark.parametrize(
    ("name", "phase"), [pytest.param(*case, marks=() if case in RUN else TWIN) for case in CASES]
)
def test_memory_is_as_measured_and_every_op_has_a_rule(name: str, phase: str) -> None:
    predicted, measured, trace = compare_on_cpu(source_of(name, phase=phase), FP32)
    assert measured > 4e6
    assert predicted == pytest.approx(measured, rel=0.05)
    assert trace.ops_without_flop_rule == ()
    source = source_of(name, phase=phase)
    assert capture(lambda: load(source), Recipe(), capability=(9, 0)).ops_without_flop_rule == ()
    model = loaded(name, phase=phase).model
    assert held(trace, types.GRADIENT) == trained_bytes(model)
    steps = 4 * sum(p.requires_grad for p in model.parameters())
    assert held(trace, types.OPTIMIZER) == 2 * trained_bytes(model) + steps


def test_entries_name_paper_task_motif_and_trap() -> None:
    for entry in ENTRIES:
        assert entry.paper and entry.task and entry.motif and entry.trap, entry.name
        assert entry.small == entry.name.endswith("-tiny")
        assert zoo.get(entry.name) is entry


# ---------------------------------------------------------------- layers with losses of their own


@pytest.mark.parametrize("name", LOCAL)
def test_layer_by_layer_gives_the_gradients_of_the_sum(name: str) -> None:
    local, summed = loaded(name), loaded(name).summed()
    losses = []
    for loss in each_loss(local, torch.enable_grad):
        losses.append(loss.item())
        loss.backward()
    whole = compute_loss(summed)
    whole.backward()
    assert len(losses) == len(local.model.blocks)
    assert sum(losses) == pytest.approx(whole.item(), rel=1e-5)
    for one, other in zip(local.model.parameters(), summed.model.parameters(), strict=True):
        assert one.requires_grad == other.requires_grad
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["ff-tiny", "mf-tiny"])
def test_a_layers_loss_reaches_that_layer_alone(name: str) -> None:
    made = loaded(name)
    for index, loss in enumerate(each_loss(made, torch.enable_grad)):
        loss.backward()
        touched = [any(p.grad is not None for p in block.parameters()) for block in made.model.blocks]
        assert touched == [place <= index for place in range(len(touched))]


OTHER = pytest.mark.slow(reason="another method with losses of its own; one is here, and all run a step")


@pytest.mark.parametrize("name", [pytest.param("ff", marks=OTHER), "mf"])
@pytest.mark.slow(reason="a step of the model runs above; that losses by layer keep less is shown by their sums, which keep more")
def test_kept_activations_grow_with_depth_under_backpropagation_only(name: str) -> None:
    few, many = ({"layers": 6}, {"layers": 12})
    assert here(f"{name}-tiny", **many).meta["backwards"] == 12
    assert kept(here(f"{name}-tiny", **many)) <= 1.02 * kept(here(f"{name}-tiny", **few))
    assert kept(here(f"{name}-twin-tiny", **many)) >= 1.7 * kept(here(f"{name}-twin-tiny", **few))
    assert kept(here(f"{name}-tiny", **many)) < 0.75 * kept(here(f"{name}-twin-tiny", **many))
    predicted, measured, *_ = compare_on_cpu(source_of(f"{name}-tiny", **many), FP32)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.slow(reason="a step of the model runs above; that losses by layer keep less is shown by their sums, which keep more")
def test_forward_forward_sees_twice_the_rows_and_so_needs_depth_to_gain() -> None:
    assert kept(here("ff-tiny", layers=2)) > kept(here("ff-twin-tiny", layers=2))


@pytest.mark.slow(reason="a step of the model runs above; that losses by layer keep less is shown by their sums, which keep more")
def test_cascaded_forward_keeps_nothing_for_its_frozen_blocks() -> None:
    assert kept(here("cafo-tiny")) < 0.75 * kept(here("cafo-twin-tiny"))
    assert not any(p.requires_grad for p in loaded("cafo-tiny").model.blocks.parameters())
    late = [op for op in here("cafo-tiny").ops() if op.phase == "backward"]
    assert late and not any(op.module.startswith("blocks") for op in late)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "cafo-tiny" else OTHER) for name in LOCAL])
def test_the_sum_keeps_more(name: str) -> None:
    summed = capture(lambda: loaded(name).summed(), FP32, capability=None)
    assert "backwards" not in summed.meta
    assert held(summed, types.ACTIVATION) > held(here(name), types.ACTIVATION)
    if name != "cafo-tiny":  # there a block takes more for a moment than all predictors keep, and gradients come sooner
        assert peak_live(summed, RUNS) > 1.3 * peak_live(here(name), RUNS)


def test_accumulated_micro_batches_weigh_each_loss() -> None:
    gradients = []
    for workload in (loaded("mf-tiny", group=4), loaded("mf-tiny", group=4).summed()):
        step = Step(workload, replace(FP32, accumulate=2, optimizer="sgd"), device_type="cpu")
        step.create_optimizer()
        step.micro_batch()
        assert step.backwards == (8 if workload.losses else 1)
        gradients.append([p.grad for p in workload.model.parameters()])
    torch.testing.assert_close(*gradients)


def test_autocast_holds_in_forward_and_not_in_backward() -> None:
    source = source_of("mf-tiny", group=8)
    trace = capture(lambda: load(source), Recipe(), capability=(9, 0))
    products = [op for op in trace.programs["micro_first"].ops if op.name in ("aten.mm.default", "aten.addmm.default")]
    assert {op.phase for op in products} == {"forward", "backward"}
    assert {op.outputs[0].spec.dtype for op in products} == {"bfloat16"}
    assert trace.meta["backwards"] == 8


@pytest.mark.slow(reason="several traces of one model, in processes of their own; its losses one by one are compared above")
def test_sharding_plans_and_compile_are_of_one_backward() -> None:
    source = source_of("mf-tiny", group=4)
    for answer, backwards in ((search_child.answer, None), (trace_child.trace_asked, 8)):
        assert loads(answer(request(source, Recipe(), (9, 0), {}))["text"]).meta.get("backwards") == backwards
    assert "backwards" not in capture(lambda: load(source), Recipe(shards=2, precision="fsdp-bf16")).meta
    with pytest.raises(UserError, match="one by one"):
        api.predict(here("mf-tiny"), Recipe(compile="model"), parse("H100"), {"source": "mf-tiny"})


def test_a_deep_stack_is_traced_whole() -> None:
    source = source_of("mf-tiny", group=1, dim=8, pixels=8, layers=50)
    with pytest.raises(Doubt, match="one by one"):
        extended(lambda: load(source), FP32, capability=None)


def test_a_file_may_bring_losses_if_they_are_a_generator(tmp_path: Path) -> None:
    head = "import torch\nfrom torch import nn\ndef model(): return nn.Linear(4, 4)\ndef batch(): return torch.ones(2, 4)\n"
    head += "def loss(output, batch): return 2 * output.sum()\n"
    own, other = tmp_path / "own.py", tmp_path / "other.py"
    own.write_text(head + "def losses(model, batch):\n    for _ in range(2): yield model(batch).sum()\n")
    other.write_text(head + "def losses(predicted): return predicted\n")
    assert trace_as_cpu(Source(model=str(own)), FP32).meta["backwards"] == 2
    assert load(Source(model=str(other))).losses is None


def test_a_loss_that_is_no_scalar_is_told() -> None:
    made = replace(loaded("mf-tiny", group=1), losses=lambda model, batch: iter([torch.ones(3)]))
    with pytest.raises(UserError, match="no scalar loss"):
        list(each_loss(made, torch.enable_grad))


def test_forward_forward_writes_the_label_and_hides_the_length() -> None:
    made = loaded("ff-tiny", group=4)
    model, batch = made.model, made.batch
    rows = model.labelled(batch["images"], batch["targets"])
    assert torch.equal(rows[:, :10].argmax(1), batch["targets"]) and torch.equal(rows[:, 10:], batch["images"][:, 10:])
    assert not (batch["wrong"] == batch["targets"]).any()
    torch.testing.assert_close(model.blocks[0](rows), model.blocks[0](7 * rows), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------- dendrites


def small(phase: str = "neuron", dendrites: int = 2) -> Workload:
    return loaded("perforated-tiny", phase=phase, dendrites=dendrites)


def test_new_dendrites_change_nothing_until_neurons_listen() -> None:
    made = small()
    config = zoo.get("perforated-tiny").config
    plain = resnet.build(**{key: value for key, value in config.items() if key != "dendrites"})
    weights = {name.replace(".layer.", "."): value for name, value in made.model.state_dict().items()}
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    images = made.batch["images"]
    torch.testing.assert_close(made.model.eval()(images), plain.eval()(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Linear(5, 3), nn.Conv2d(5, 3, 3, padding=1)])
def test_errors_pass_the_dendrites_by(layer: nn.Module) -> None:
    one = perforated.Perforated(layer, 2)
    one.set_phase("neuron")
    for weight in one.weights:
        nn.init.ones_(weight)
    shape = (4, 5) if isinstance(layer, nn.Linear) else (4, 5, 6, 6)
    inputs = [torch.randn(shape).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    output, plain = one(inputs[0]), layer(inputs[1])
    assert not torch.allclose(output, plain)
    output.sum().backward()
    plain.sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert all(p.grad is None for p in one.dendrites.parameters())
    assert all(w.grad is not None for w in one.weights)


@pytest.mark.parametrize("shape", [(16, 3), (4, 3, 5, 5)])
def test_a_candidate_follows_the_error_as_cascade_correlation_says(shape: tuple[int, ...]) -> None:
    channel = 1
    output, candidate = torch.randn(shape, dtype=torch.double), torch.randn(shape, dtype=torch.double)
    error = torch.randn(shape, dtype=torch.double)
    output.requires_grad_(), candidate.requires_grad_()
    perforated.Correlate.apply(output, candidate, channel).backward(error)
    again = candidate.detach().clone().requires_grad_()
    others = [dim for dim in range(len(shape)) if dim != channel]

    def apart(x: Tensor) -> Tensor:
        return x - x.mean(others, keepdim=True)

    (-(apart(again) * apart(error)).sum(others).abs()).sum().backward()
    torch.testing.assert_close(output.grad, error)
    torch.testing.assert_close(candidate.grad, again.grad)


@pytest.mark.slow(reason="gradients and states of a frozen prefix are counted in test_capture.py")
def test_a_frozen_phase_loses_its_gradients_and_states() -> None:
    neuron, dendrite = (here("perforated-tiny", phase=phase) for phase in perforated.PHASES)
    share = trained_bytes(small("dendrite").model) / trained_bytes(small().model)
    assert share < 1.1
    for role in (types.GRADIENT, types.OPTIMIZER):
        assert held(dendrite, role) / held(neuron, role) == pytest.approx(share, rel=0.02)
    owners = {storage.module for storage in dendrite.storages.values() if storage.role == types.OPTIMIZER}
    assert all(".dendrites.1" in path or path.endswith(".cascade") for path in owners)
    with pytest.raises(UserError, match="no dendrite"):
        small("dendrite", dendrites=0)


@pytest.mark.slow(reason="several traces of one model; that new dendrites change nothing at first is tested above")
def test_a_grown_model_is_traced_anew_and_no_old_plan_takes_it() -> None:
    made = small()
    old = shapes(made.model)
    plan = default_plan(Recipe(), model_of(source_of("perforated-tiny"), shapes=old), "H100")
    refuse_other_model(plan, old)
    perforated.grow(made.model)
    with pytest.raises(UserError, match="another model"):
        refuse_other_model(plan, shapes(made.model))
    grown = capture_module(made.model, made.batch, made.loss, FP32, capability=None, hints=None)
    assert grown.meta["parameters"] > here("perforated-tiny", phase="dendrite").meta["parameters"]  # type: ignore[operator]
    predicted, measured, *_ = compare_on_cpu(source_of("perforated-tiny", phase="dendrite", dendrites=3), FP32)
    assert peak_live(grown, RUNS) == predicted == pytest.approx(measured, rel=0.05)


def test_any_module_can_be_wrapped() -> None:
    module = importlib.import_module("foretell.zoo.vision.vit")
    model = module.build(**zoo.get("vit-tiny").config)
    perforated.perforate(model, 1)
    perforated.set_phase(model, "dendrite")
    batch = module.batch(model, 2, None, zoo.get("vit-tiny").image)
    module.loss(model(batch["images"]), batch).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)


def shapes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(p.shape), "float32") for name, p in model.named_parameters()}


# ---------------------------------------------------------------- phases in turn


def run_in_turn(name: str, phases: tuple[str, ...]) -> int:
    """Measured peak of two rounds of all phases over the same weights, each phase with an optimizer of its own."""
    made = [loaded(name, phase=phase) for phase in phases]
    for other in made[1:]:
        for own, shared in zip(other.model.modules(), made[0].model.modules(), strict=True):
            for key, p in own._parameters.items():
                if p is not None:
                    own._parameters[key] = nn.Parameter(shared._parameters[key].detach(), p.requires_grad)  # type: ignore[union-attr]
            own._buffers = shared._buffers
    steps = [Step(replace(one, batch=made[0].batch), FP32, device_type="cpu") for one in made]
    for step in steps:
        step.create_optimizer()
    tensors = [*made[0].model.parameters(), *made[0].model.buffers(), *made[0].batch.values()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for step in steps * 2:
            step.micro_batch()
            step.update()
            step.zero_grad()
    return sum(t.untyped_storage().nbytes() for t in tensors) + peaks_of(recorded.profiler.kineto_results.events())[0]


@pytest.mark.slow(reason="traces of all phases; phases in turn are predicted in test_zoo_check.py too")
def test_phases_in_turn_hold_the_states_of_all() -> None:
    traces = {phase: here("perforated-tiny", phase=phase) for phase in perforated.PHASES}
    joined = in_turn(traces)
    assert held(joined, types.OPTIMIZER) == sum(held(trace, types.OPTIMIZER) for trace in traces.values())
    assert held(joined, types.GRADIENT) == max(held(trace, types.GRADIENT) for trace in traces.values())
    assert len(joined.resident) == len(traces["neuron"].resident)
    predicted = peak_live(joined, RUNS)
    assert predicted > 1.02 * max(peak_live(trace, RUNS) for trace in traces.values())
    assert predicted == pytest.approx(run_in_turn("perforated-tiny", perforated.PHASES), rel=0.05)


@pytest.mark.slow(reason="several traces; phases in turn are predicted in test_zoo_check.py")
def test_a_joined_trace_is_predicted_like_any_other() -> None:
    source = {phase: source_of("perforated-tiny", phase=phase) for phase in perforated.PHASES}
    traces = {phase: capture(lambda s=s: load(s), FP32) for phase, s in source.items()}  # type: ignore[misc]
    alone = [api.predict(trace, FP32, parse("H100"), {"micro_batch": 2}) for trace in traces.values()]
    both = api.predict(in_turn(traces), FP32, parse("H100"), {"micro_batch": 2})
    assert both.memory.allocated_bytes > max(one.memory.allocated_bytes for one in alone)
    assert both.time is not None and all(one.time is not None for one in alone)
    seconds = [one.time.step_seconds for one in alone if one.time is not None]
    assert both.time.step_seconds == pytest.approx(sum(seconds), rel=0.1)
    assert both.model["flops"] == sum(one.model["flops"] for one in alone)


@pytest.mark.slow(reason="traces of two models; phases that go together are predicted in test_zoo_check.py")
def test_phases_with_other_weights_or_in_a_crowd_are_refused() -> None:
    with pytest.raises(UserError, match="other weights"):
        in_turn({"a": here("mf-tiny"), "b": here("ff-tiny")})
    with pytest.raises(UserError, match="one device"):
        api.fit("perforated-tiny", hardware="8xH100", overrides={"phase": "neuron+dendrite"}, cache=False)
