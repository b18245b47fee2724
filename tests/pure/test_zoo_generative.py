"""The generating models of the zoo: they run as their papers say, and foretell knows what they hold and compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.api import predict
from foretell.hardware import parse
from foretell.hardware.lookup import find_profile
from foretell.price.machine import machine
from foretell.price.speeds import alone
from foretell.simulate.memory.replay import peak_live
from foretell.simulate.time.step import plan_time
from foretell.trace.fold.recompute import recompute_block
from foretell.trace.fold.repeats import fold
from foretell.trace.load.model import Source, load
from foretell.trace.recipe import Recipe
from foretell.trace.record.capture import capture
from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu
from foretell.trace.record.step import Step, Workload, call_model, compute_loss
from foretell.trace.types import BUFFER, GRADIENT, OPTIMIZER, PARAMETER, Program, Trace
from foretell.zoo import get
from foretell.zoo import load as load_module
from foretell.zoo.generative import asd, hummingbird, interprior
from foretell.zoo.listing.generative import ENTRIES
from foretell.zoo.science import allshowers, lamarr
from tests.further import further
from tests.pure.on_cpu import compare_on_cpu

FP32 = Recipe(precision="fp32")
INFER = Recipe(precision="fp32", mode="infer")
SHORTER = {
    "protein-sid-tiny": {"layers": 1},
    "dit-regional-tiny": {"double": 1, "single": 1},
    "hummingbird-tiny": {"levels": 1},
    "allshowers-tiny": {"depth": 1},
    "interprior-tiny": {"depth": 1, "prior_depth": 1},
    "lamarr-tiny": {"depth": 1},
}
"""The same ops in fewer layers."""
SMALL = [entry for entry in ENTRIES if entry.small]


pytestmark = pytest.mark.usefixtures("one_thread")


def phases_of(name: str) -> tuple[str | None, ...]:
    return getattr(load_module(get(name)), "PHASES", (None,))


CASES = [pytest.param(entry.name, phase, id=f"{entry.name}-{phase}") for entry in SMALL for phase in phases_of(entry.name)]


def source(name: str, phase: str | None = None, micro_batch: int = 2, seq: int | None = None, image: int | None = None, **overrides: Any) -> Source:
    chosen = {"phase": phase, **overrides} if phase else overrides
    return Source(model=name, overrides=chosen, micro_batch=micro_batch, seq=seq, image=image)


def workload(name: str, phase: str | None = None, **sizes: Any) -> Workload:
    torch.manual_seed(0)
    return load(source(name, phase, **sizes))


@cache
def compared(name: str, phase: str | None) -> tuple[int, int, Trace]:
    predicted, measured, trace = compare_on_cpu(source(name, phase), FP32)
    return predicted, measured, trace


@cache
def traced(name: str, phase: str | None = None, recipe: Recipe = FP32, **sizes: Any) -> Trace:
    return trace_as_cpu(source(name, phase, **sizes), recipe)


def flops(trace: Trace, of: Callable[[str], bool] = lambda module: True) -> int:
    """Of a step, or of one program where it is an evaluation."""
    run = trace.schedule.get("steady_step") or trace.schedule["evaluation"]
    return sum(times * sum(op.flops or 0 for op in trace.programs[name].ops if of(op.module)) for name, times in run)


def held(trace: Trace, role: str) -> dict[str, int]:
    """Bytes of that role by the first name of the module that owns them."""
    found: dict[str, int] = {}
    for storage in trace.storages.values():
        if storage.role == role:
            owner = storage.module.partition(".")[0]
            found[owner] = found.get(owner, 0) + storage.nbytes
    return found


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_trains(name: str, phase: str | None) -> None:
    given = workload(name, phase)
    compute_loss(given).backward()
    found = compute_loss(given)
    assert torch.isfinite(found)
    trained = {path: parameter for path, parameter in given.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert [path for path, parameter in trained.items() if parameter.grad is None] == []
    assert all(torch.isfinite(parameter.grad).all() for parameter in trained.values())
    frozen = [parameter for parameter in given.model.parameters() if not parameter.requires_grad]
    assert all(parameter.grad is None for parameter in frozen)


LONG = ("hummingbird-tiny-teacher", "hummingbird-tiny-reward")
PHASE = (*LONG, "protein-sid-tiny-generator", "protein-sid-tiny-score", "interprior-tiny-link", "lamarr-tiny-generator")
LARGE = (
    "hummingbird-tiny-prune", "asd-tiny-ratio", "dit-regional-tiny-train", "interprior-tiny-prior", "lamarr-tiny-discriminator",
    "protein-sid-tiny-teacher",
)  # fmt: skip
TRACED = (*PHASE, *LARGE)
"""Held against a real step by the slow tests alone."""


def seen(name: str, phase: str | None) -> Trace:
    """The trace that is held against a real step, where `make test` runs one."""
    return traced(name, phase) if f"{name}-{phase}" in TRACED else compared(name, phase)[2]


LONGER = pytest.mark.slow(reason="a phase of the same networks as those that run, or a model that runs a step above")


def but(*long: str) -> list[Any]:
    """The cases, some of which are long."""
    return [pytest.param(*case.values, id=case.id, marks=LONGER if case.id in long else ()) for case in CASES]


@pytest.mark.parametrize(("name", "phase"), but(*TRACED))
def test_memory_is_as_measured(name: str, phase: str | None) -> None:
    predicted, measured, _ = compared(name, phase)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert predicted > 2_000_000


@pytest.mark.parametrize(("name", "phase"), but(*PHASE, *LARGE))
def test_every_op_has_a_rule(name: str, phase: str | None) -> None:
    here = seen(name, phase)
    on_cuda = capture(lambda: load(source(name, phase, **SHORTER.get(name, {}))), Recipe())
    assert here.ops_without_flop_rule == on_cuda.ops_without_flop_rule == ()
    assert here.meta["blocks"]
    assert here.meta["assumed"] == on_cuda.meta["assumed"] == []


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_says_what_it_is(entry: Any) -> None:
    assert entry.paper and entry.task and entry.motif and entry.trap


@pytest.mark.parametrize(("name", "phase"), but(*PHASE, *LARGE))
def test_only_what_is_trained_has_state(name: str, phase: str | None) -> None:
    trace = seen(name, phase)
    model = workload(name, phase).model
    trained: dict[str, int] = {}
    for path, parameter in model.named_parameters():
        owner = path.partition(".")[0] if path.count(".") else ""
        if parameter.requires_grad:
            trained[owner] = trained.get(owner, 0) + 4 * parameter.numel()
    steps = 4 * sum(parameter.requires_grad for parameter in model.parameters())
    assert held(trace, GRADIENT) == trained
    assert sum(held(trace, OPTIMIZER).values()) == 2 * sum(trained.values()) + steps
    assert sum(held(trace, PARAMETER).values()) == 4 * sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------- protein_sid


def test_protein_padding_has_no_influence() -> None:
    given = workload("protein-sid-tiny")
    batch = dict(given.batch)
    there = batch["mask"][1].sum()
    before = given.model(**batch)[0]
    batch["coords"] = batch["coords"].clone()
    batch["coords"][1, there:] += 3.0
    after = given.model(**batch)[0]
    torch.testing.assert_close(after, before)
    assert not before[1, there:].any()
    batch["coords"][1, 0] += 3.0
    assert not torch.allclose(given.model(**batch)[0], before)


def test_protein_generator_learns_through_the_frozen_networks() -> None:
    given = workload("protein-sid-tiny", "generator")
    seen: list[Tensor] = []
    for part in (given.model.teacher, given.model.score):
        part.register_full_backward_hook(lambda _module, _into, out: seen.append(out[0]))
    compute_loss(given).backward()
    assert len(seen) == 2 and all(gradient.abs().sum() > 0 for gradient in seen)


@pytest.mark.slow(reason="traces of three phases; all of them run a step above")
def test_protein_three_networks_on_one_device() -> None:
    totals = {phase: held(seen("protein-sid-tiny", phase), PARAMETER) for phase in phases_of("protein-sid-tiny")}
    for phase, parameters in totals.items():
        assert set(parameters) == {"teacher", "score", "generator"}
        assert set(held(seen("protein-sid-tiny", phase), OPTIMIZER)) == {phase}
    by_phase = {phase: flops(seen("protein-sid-tiny", phase)) for phase in totals}
    assert by_phase["teacher"] < by_phase["score"] < by_phase["generator"]


@pytest.mark.slow(reason="six traces; that a sampler is one graph repeated is tested with allshowers, and this one's memory below")
def test_protein_few_steps_are_twenty_times_cheaper() -> None:
    def cost(phase: str, steps: int) -> int:
        return flops(traced("protein-sid-tiny", phase, INFER, steps=steps, layers=1))

    many, few = ({steps: cost(phase, steps) for steps in (1, 2, 3)} for phase in ("sample_teacher", "sample"))
    assert many[3] - many[2] == many[2] - many[1]
    assert few[3] - few[2] == few[2] - few[1]
    of_many = many[1] + 399 * (many[2] - many[1])
    of_few = few[1] + 15 * (few[2] - few[1])
    assert of_many / of_few >= 20
    given = workload("protein-sid-tiny", "sample", steps=2)
    with torch.no_grad():
        assert call_model(given.model, given.batch).shape == given.batch["coords"].shape


@pytest.mark.parametrize("phase", [pytest.param("sample_teacher", marks=LONGER), "sample"])
@pytest.mark.slow(reason="a step of the model runs above; bytes of the phases that are trained are held against real steps")
def test_protein_sampler_memory(phase: str) -> None:
    predicted, measured, _ = compare_on_cpu(source("protein-sid-tiny", phase, steps=2, layers=1), INFER)
    assert predicted == pytest.approx(measured, rel=0.05)
    assert predicted == peak_live(traced("protein-sid-tiny", phase, INFER, steps=3, layers=1), ("evaluation",))


# ---------------------------------------------------------------- dit_regional


def test_regional_instances_stay_apart() -> None:
    given = workload("dit-regional-tiny")
    model, early = given.model, {**given.batch, "times": torch.full((2,), 0.9)}
    late = {**early, "times": torch.full((2,), 0.1)}
    tokens, side = model.tokens, model.image // model.patch
    regions = model.regions(early["boxes"])[0, (1 + model.instances) * tokens :]
    assert (regions.sum(1) == 1).all() and regions.any(0).all()

    def moved(batch: dict[str, Tensor], key: str, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Which regions of the velocity another text or another latent changes."""
        with torch.no_grad():
            gap = (call_model(model, batch) - call_model(model, {**batch, key: change(batch[key].clone())}))[0].abs().sum(0)
        patches = gap.view(side, model.patch, side, model.patch).sum((1, 3)).flatten() > 1e-6
        return (patches[:, None] & regions).any(0)

    def other_words(text: Tensor) -> Tensor:
        text[:, 2 * tokens : 3 * tokens] += 1.0
        return text

    def other_latent(x: Tensor) -> Tensor:
        x.flatten(2)[:, :, : 2 * model.image].view(2, -1, 2, model.image)[...] += 1.0  # the first rows: background
        return x

    assert moved(early, "text", other_words).tolist() == [False, False, True, False]
    assert moved(early, "x", other_latent).tolist() == [True, False, False, False]
    assert moved(late, "text", other_words).all() and moved(late, "x", other_latent).all()


def test_regional_mask_matches_its_rule() -> None:
    given = workload("dit-regional-tiny")
    model, boxes = given.model, given.batch["boxes"]
    regions = model.regions(boxes)
    early, late = (model.mask(regions, torch.full((2,), t))[0, 0] for t in (0.9, 0.1))
    words = (1 + model.instances) * model.tokens
    sizes = regions[0].sum(0)
    assert early.sum() == (sizes * sizes).sum()
    assert late[words:, words:].all() and torch.equal(late[:words], early[:words])
    assert early.float().mean() < 0.5 < late.float().mean()


@pytest.mark.slow(reason="the sampler of allshowers is one graph repeated, too")
def test_regional_one_graph_serves_all_steps() -> None:
    ops = {
        steps: list(traced("dit-regional-tiny", "sample", INFER, steps=steps, double=1, single=1).programs["forward"].ops)
        for steps in (2, 3)
    }
    more = len(ops[3]) - len(ops[2])
    kinds = [(op.name, op.module, tuple(ref.spec for ref in (*op.inputs, *op.outputs))) for op in ops[3]]
    begin = next(i for i, kind in enumerate(kinds) if kind[0] == "aten.full_like.default")
    assert kinds[begin : begin + more] == kinds[begin + more : begin + 2 * more] == kinds[begin + 2 * more : begin + 3 * more]
    assert flops(seen("dit-regional-tiny", "train"), lambda module: module.startswith("doubles")) > 0


# ---------------------------------------------------------------- asd


def test_any_size_buckets_have_one_area() -> None:
    shapes = {}
    for bucket, (wide, high) in enumerate(asd.RATIOS):
        model = asd.build(**{**get("asd-tiny").config, "bucket": bucket})
        tall, across = shapes[bucket] = model.shape(32)
        assert tall % model.multiple == across % model.multiple == 0
        assert across / tall == pytest.approx(wide / high, rel=0.1)
        assert tall * across == pytest.approx(32 * 32, rel=0.06)
    assert len(set(shapes.values())) == len(asd.RATIOS)


@pytest.mark.slow(reason="two more traces; that the areas are one is above")
def test_any_size_buckets_do_one_work() -> None:
    square, wide = (flops(traced("asd-tiny", "ratio", INFER, bucket=bucket)) for bucket in (0, 7))
    assert wide == pytest.approx(square, rel=0.1)


@pytest.mark.slow(reason="four traces and two real runs; tiles are run below, and buckets are traced above")
def test_any_size_tiles_hold_one_tile() -> None:
    beside: dict[tuple[str, int], int] = {}
    for phase, scale in (("enlarge", 1), ("enlarge", 2), ("whole", 1), ("whole", 2)):
        trace = traced("asd-tiny", phase, INFER, micro_batch=1, image=16, scale=scale, steps=1, levels=1)
        predicted = peak_live(trace, ("evaluation",))
        if scale == 1:
            measured, _ = measure_on_cpu(source("asd-tiny", phase, micro_batch=1, image=16, scale=scale, steps=1, levels=1), INFER)
            assert predicted == pytest.approx(measured, rel=0.05)
        side = 16 * scale + (32 if phase == "enlarge" else 0)
        resident = sum(trace.storages[number].nbytes for number in trace.resident)
        beside[phase, scale] = predicted - resident - 16 * side * side
    assert beside["enlarge", 1] == beside["enlarge", 2]
    assert beside["whole", 2] > 3.9 * beside["whole", 1]


def test_any_size_shifted_tiles_leave_no_seam() -> None:
    def seams(shift: bool) -> Tensor:
        given = workload("asd-tiny", "enlarge", micro_batch=1, steps=8, strength=0.0, shift=shift, levels=1)
        with torch.no_grad():
            picture = call_model(given.model, {**given.batch, "latents": torch.ones(1, 4, 16, 16)})
        return picture.diff(dim=-1).abs().mean(dim=(0, 1, 2))

    fixed, shifted = seams(False), seams(True)
    borders = torch.arange(15, 31, 16)
    inside = torch.ones(31, dtype=torch.bool)
    inside[borders] = False
    assert fixed[borders].min() > 1.5 * fixed[inside].mean()
    assert shifted[borders].max() < 1.5 * shifted[inside].mean()
    assert shifted.max() < 0.6 * fixed.max()


# ---------------------------------------------------------------- hummingbird


def test_video_sibling_has_half_the_size_and_the_blocks_of_the_full_one() -> None:
    config = get("hummingbird").config
    with torch.device("meta"):
        full, half = (
            sum(p.numel() for p in hummingbird.VideoUNet(4, 320, 4, blocks, 1024, 64).parameters())
            for blocks in (config["blocks"], config["blocks"] // 2)
        )
    assert full == pytest.approx(1.4e9, rel=0.1) and half == pytest.approx(0.7e9, rel=0.1)
    model = workload("hummingbird-tiny", "prune").model
    for small, large in zip((*model.student.down, *model.student.up), (*model.teacher.down, *model.teacher.up), strict=True):
        assert len(small.blocks) == 1 and len(large.blocks) == 2
        for number, block in enumerate(small.blocks):
            assert torch.equal(block.conv1.weight, large.blocks[hummingbird.kept(number)].conv1.weight)


@pytest.mark.slow(reason="two traces of a video model; the phase that prunes is traced above")
def test_video_pruned_cost_is_known_before_pruning() -> None:
    full = seen("hummingbird-tiny", "teacher")
    model = workload("hummingbird-tiny", "prune").model
    spared = {
        f"teacher.{side}.{level}.blocks.{number}"
        for side in ("down", "up")
        for level, (small, large) in enumerate(zip(getattr(model.student, side), getattr(model.teacher, side), strict=True))
        for number in range(len(large.blocks))
        if number not in {hummingbird.kept(other) for other in range(len(small.blocks))}
    }

    def stays(module: str) -> bool:
        return not any(module == path or module.startswith(f"{path}.") for path in spared)

    def left(trace: Trace) -> Trace:
        programs = {name: Program(name, tuple(op for op in program.ops if stays(op.module))) for name, program in trace.programs.items()}
        return replace(trace, programs=programs)

    cut = traced("hummingbird-tiny", "teacher", blocks=1)
    assert flops(left(full), bool) == pytest.approx(flops(cut, bool), rel=1e-4)
    cluster = parse("H200")
    known = machine(cluster.device, find_profile(cluster.device.name))
    assert known is not None
    said, found = (plan_time(trace, alone(known))[0].step_seconds for trace in (left(full), cut))
    assert said == pytest.approx(found, rel=0.25)


@pytest.mark.slow(reason="three traces of a video model")
def test_video_memory_follows_frames() -> None:
    held = {
        frames: peak_live(traced("hummingbird-tiny", "teacher", seq=frames, levels=1, blocks=1), ("first_step", "steady_step"))
        for frames in (4, 8, 12)
    }
    assert held[12] - held[8] == pytest.approx(held[8] - held[4], rel=0.01)
    assert held[12] > 2.5 * held[4]


def test_video_reward_reaches_the_sibling_only() -> None:
    given = workload("hummingbird-tiny", "reward")
    _, _, reward = call_model(given.model, given.batch)
    assert reward.shape == (2,)
    reward.sum().backward()
    assert given.model.student.last.weight.grad.abs().sum() > 0
    assert all(p.grad is None for part in (given.model.decoder, given.model.of_frames, given.model.of_video) for p in part.parameters())


# ---------------------------------------------------------------- allshowers


def test_showers_bands_compute_what_the_mask_says() -> None:
    masked, banded = (workload("allshowers-tiny", attention=form) for form in allshowers.ATTENTIONS)
    banded.model.load_state_dict(masked.model.state_dict())
    torch.testing.assert_close(call_model(banded.model, masked.batch), call_model(masked.model, masked.batch), atol=1e-5, rtol=1e-4)


def test_showers_points_see_near_layers_that_are_there() -> None:
    given = workload("allshowers-tiny", "sample", steps=1)
    model, batch = given.model, dict(given.batch)

    def touched(layer: int, slot: int) -> Tensor:
        other = batch["noise"].clone()
        other[0, layer, slot] += 2.0
        with torch.no_grad():
            gap = call_model(model, {**batch, "noise": other}) - call_model(model, batch)
        return gap[0].abs().amax(dim=(1, 2)) > 0

    far = 2 * len(model.blocks) * model.reach  # two velocities a step, each through all blocks
    assert touched(8, 0).nonzero().flatten().tolist() == list(range(8 - far, 8 + far + 1))
    assert not batch["mask"][0, 0, -1] and not touched(0, model.slots - 1).any()


def test_showers_noise_is_matched_within_layers() -> None:
    batch = workload("allshowers-tiny").batch
    points, noise, mask = batch["points"], batch["noise"], batch["mask"]
    found = allshowers.matched(noise, points, mask)
    for layer in (0, 8):
        count = int(mask[1, layer].sum())
        rows = {tuple(row) for row in found[1, layer, :count].tolist()}
        assert rows == {tuple(row) for row in noise[1, layer, :count].tolist()}

    def cost(of: Tensor) -> Tensor:
        return ((of - points)[..., -1].square() * mask).sum(dim=(1, 2))

    assert (cost(found) < 0.5 * cost(noise)).all()


@pytest.mark.slow(reason="two traces; what bands compute is tested above")
def test_showers_bands_are_priced_at_mask_density() -> None:
    everyone = torch.ones(1, 16, 16, dtype=torch.bool)
    density = allshowers.near(16, 16, 1, everyone).float().mean().item()
    price = {}
    for form in allshowers.ATTENTIONS:
        trace = traced("allshowers-tiny", attention=form, depth=1)
        price[form] = sum(op.flops or 0 for op in trace.ops() if "scaled_dot_product" in op.name)
    assert price["banded"] / price["masked"] == pytest.approx(density, rel=0.05)


@pytest.mark.slow(reason="a step of the model runs above; bytes of the phases that are trained are held against real steps")
def test_showers_sampler_is_one_graph_repeated() -> None:
    stored = {}
    for steps in (4, 6):
        trace = traced("allshowers-tiny", "sample", INFER, micro_batch=1, steps=steps, depth=1)
        blocks = fold(trace).programs["forward"].blocks
        stored[steps] = sum(len(block.template) for block in blocks)
        assert max(len(block) for block in blocks) > 0.7 * len(trace.programs["forward"].ops)
    assert stored[4] == stored[6]


# ---------------------------------------------------------------- interprior


@pytest.mark.parametrize("phase", interprior.PHASES)
@pytest.mark.parametrize("how", further(["full", "selective"], ['full'], "another way to recompute, with the same noise"))
def test_hands_noise_is_the_same_when_computed_again(phase: str, how: str) -> None:
    found = []
    for recompute in ("none", how):
        given = workload("interprior-tiny", phase)
        step = Step(given, Recipe(precision="fp32", recompute=recompute), device_type="cpu")
        step.create_optimizer()
        if recompute != "none":  # the draw of the code, which stands in no list of blocks
            recompute_block((given.model.link or given.model.prior).code, recompute)
        torch.manual_seed(1)
        step.micro_batch()
        found.append(([p.grad for p in given.model.parameters() if p.requires_grad], torch.rand(3)))
    (plain, after), (again, after_again) = found
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert torch.equal(after, after_again)


@pytest.mark.slow(reason="gradients with recompute are compared above; its bytes, of other models, in test_capture.py")
def test_hands_recompute_holds_less() -> None:
    plain = compared("interprior-tiny", "link")[0]
    predicted, measured, _ = compare_on_cpu(source("interprior-tiny", "link"), Recipe(precision="fp32", recompute="full"))
    assert predicted == pytest.approx(measured, rel=0.05)
    assert predicted < plain


def test_hands_turn_as_a_whole_and_bones_keep_their_length() -> None:
    state = workload("interprior-tiny").batch["state"]
    joints = interprior.pair(state)
    assert joints.shape == (128, 42, 3)
    first = joints[:, : interprior.JOINTS]
    wrist, chain = first[:, :1], first[:, 1:].unflatten(1, (4, interprior.FINGERS))
    lengths = torch.cat([chain[:, :1] - wrist[:, None], chain.diff(dim=1)], dim=1).norm(dim=-1)
    torch.testing.assert_close(lengths.transpose(1, 2), interprior.bones(state[:, 96:106]))
    turn = interprior.rotations(torch.randn(6))
    turned = state.clone()
    turned[:, :6] = (turn @ interprior.rotations(state[:, :6]))[..., :2].transpose(1, 2).flatten(1)
    torch.testing.assert_close(interprior.pair(turned)[:, : interprior.JOINTS], first @ turn.T, atol=1e-5, rtol=1e-4)


def test_hands_heatmaps_show_joints_and_their_neighbours() -> None:
    places = workload("interprior-tiny", "link").batch["places"]
    heat = interprior.adjacency_heatmaps(places, 16)
    far = places.clone()
    far[:, interprior.JOINTS :] = 100.0
    alone = interprior.adjacency_heatmaps(far, 16)[:, : interprior.JOINTS]
    assert heat.shape == (2, 42, 16, 16) and (heat[:, : interprior.JOINTS] >= alone).all()
    assert heat[:, : interprior.JOINTS].sum() > 1.2 * alone.sum()
    shifted = places.clone()
    shifted[:, 0] += 0.3
    assert torch.equal(interprior.adjacency_heatmaps(shifted, 16)[:, 1 : interprior.JOINTS], heat[:, 1 : interprior.JOINTS])


# ---------------------------------------------------------------- lamarr


def test_lamarr_trees_are_walked_as_trees() -> None:
    torch.manual_seed(0)
    forest = lamarr.Forest(7, 3, trees=5, depth=4)
    x = torch.randn(2, 6, 7)

    def walk(row: Tensor, tree: int) -> Tensor:
        node = 0
        for _ in range(4):
            node = 2 * node + (2 if row[forest.feature[tree, node]] > forest.threshold[tree, node] else 1)
        return forest.leaf[tree, node - 15]

    wanted = torch.stack([torch.stack([walk(row, tree) for tree in range(5)]).sum(0) for row in x.flatten(0, 1)])
    torch.testing.assert_close(forest(x), wanted.view(2, 6, 3))


def test_lamarr_modules_swap_singly() -> None:
    given = workload("lamarr-tiny", "simulate")
    model, batch = given.model, given.batch

    def simulated() -> dict[str, Tensor]:
        torch.manual_seed(5)
        with torch.no_grad():
            return call_model(model, batch)

    before = simulated()
    names = [name for name, _ in lamarr.STAGES]
    model.generators[names.index("rich")] = lamarr.Stack(lamarr.CONDITIONS["rich"] + model.noise, 4, 24, 1)
    after = simulated()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"rich", "combined"}
    assert not before["weight"][~batch["mask"]].any() and 0 < before["weight"].mean() < 1
    assert {name: before[name].shape[-1] for name in names} == dict(lamarr.STAGES)


@pytest.mark.slow(reason="every phase twice; padding of another model has no influence either")
def test_lamarr_padding_has_no_influence() -> None:
    for phase in lamarr.PHASES:
        given = workload("lamarr-tiny", phase)
        other = {**given.batch, "kinematics": torch.where(given.batch["mask"][..., None], given.batch["kinematics"], 9.0)}
        losses = []
        for batch in (given.batch, other):
            torch.manual_seed(3)
            losses.append(lamarr.loss(call_model(given.model, batch), batch))
        torch.testing.assert_close(*losses)


@pytest.mark.slow(reason="two real runs of the chain that is predicted below")
def test_lamarr_chain_costs_follow_particles() -> None:
    found = {}
    for particles in (64, 128):
        predicted, measured, trace = compare_on_cpu(source("lamarr-tiny", "simulate", seq=particles), INFER)
        assert predicted == pytest.approx(measured, rel=0.05)
        assert trace.ops_without_flop_rule == ()
        resident = sum(storage.nbytes for storage in trace.storages.values() if storage.role in (PARAMETER, BUFFER))
        found[particles] = (flops(trace), predicted - resident)
    assert found[128][0] == 2 * found[64][0]
    assert found[128][1] == pytest.approx(2 * found[64][1], rel=0.01)


@pytest.mark.slow(reason="a step of the model runs above; bytes of the phases that are trained are held against real steps")
def test_lamarr_events_per_second_and_joules() -> None:
    recipe = Recipe(mode="infer")
    trace = capture(lambda: load(source("lamarr-tiny", "simulate", micro_batch=8)), recipe)
    said = predict(trace, recipe, parse("H200"), {"micro_batch": 8})
    assert said.throughput is not None and said.throughput.per_second > 0
    assert said.throughput.per_step == 8 * 128  # particles, told apart by their kinds: 128 an event
    assert said.energy is not None and said.energy.joules_per_step > 0
