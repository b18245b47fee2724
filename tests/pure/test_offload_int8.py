"""Moments in 8 bits: how far codes are from what they stand for, that where they are changes no bit, and what training with them loses."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretell.errors import UserError
from foretell.plan.states import ALIGN, BLOCK, bytes_of, count_of
from foretell.runtime.offload import convert, forms, layout
from foretell.runtime.offload.adamw import Offloaded
from foretell.runtime.offload.forms import CODE, FIRST, SCALE, SECOND
from foretell.trace.moments import codes
from tests.further import further
from tests.pure.test_offload import CPU, PATHS, STEPS, Model, factor, loss_of, offloaded, trained

FORMS = ["int8", "split-int8"]
MOMENTS = [FIRST, SECOND]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(24)  # parameters of 24 to 2304 elements: less than a block, and several with one begun


@pytest.fixture(scope="module")
def samples() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(12, 8, generator=draw) for _ in range(STEPS)]


def there_and_back(moment: str, value: Tensor) -> Tensor:
    return convert._decoded(moment, *convert._encoded(moment, value)).view_as(value)


# ---------------------------------------------------------------- codes


@pytest.mark.parametrize("largest", [1e-30, 1e-12, 1e-4, 1.0, 1e6, 1e30])
def test_codes_are_within_a_step_at_every_magnitude(largest: float) -> None:
    """Beside roots in double precision, over eighteen powers of ten below a block's largest value."""
    parts = torch.cat([torch.ones(1, dtype=torch.float64), torch.logspace(-18, 0, 64 * (BLOCK - 1), dtype=torch.float64)])
    exact = (parts * largest).float()
    rows = torch.cat([exact[:1].expand(64, 1), exact[1:].view(64, BLOCK - 1)], 1).reshape(-1)
    part = rows.double() / rows[0].double()
    signs = torch.where(torch.arange(len(rows)) % 2 == 0, 1.0, -1.0)
    first, second = there_and_back(FIRST, rows * signs), there_and_back(SECOND, rows)
    assert bool((first * signs >= 0).all()) and bool((second > 0).logical_or(rows < 1e-37).all())
    off = (first.double().abs() / rows[0].double()).pow(1 / 2) - part.pow(1 / 2)
    assert off.abs().max() <= 0.5001 / codes.SIGNED
    roots = (second.double() / rows[0].double()).pow(1 / 4)
    normal = second > 1e-36  # below, fp32 itself loses digits
    step = (roots - part.pow(1 / 4))[normal].abs().max() * codes.UNSIGNED
    assert 0.5 < step <= 1.0001
    for least, errors in ((1e-2, (0.085, 0.055)), (1e-1, (0.03, 0.03))):  # the largest relative ones of what matters most
        big = rows > least * rows[0]
        assert (first.abs() / rows - 1)[big].abs().max() < errors[0] and (second / rows - 1)[big].abs().max() < errors[1]


def test_what_adam_divides_by_does_not_vanish() -> None:
    """The quotient of the moments of gradients that are alike in all but size, which is exactly 1."""
    sizes = torch.logspace(-12, 0, BLOCK, dtype=torch.float64)
    first, second = there_and_back(FIRST, sizes.float()), there_and_back(SECOND, sizes.square().float())
    quotient = first.double() / second.double().sqrt()
    linear = _rounded(sizes.square().float(), 1, codes.UNSIGNED)
    assert bool((second > 0).all()) and bool((linear[sizes < 0.04] == 0).all())
    for above, low, high in ((1e-12, 0.0, 4.1), (1e-4, 0.4, 2.0), (1e-3, 0.7, 1.4), (0.1, 0.95, 1.05)):
        seen = quotient[sizes >= above]
        assert low <= seen.min() and seen.max() < high, above


def test_chance_prefers_no_side() -> None:
    """A value between two codes becomes either, on average itself: a thousandth more would move moments that change by so much."""
    draw = torch.Generator().manual_seed(3)
    value = torch.rand(2000, BLOCK, generator=draw) * 1e-3
    value[:, 0] = 1.0
    steps = value.double().pow(1 / 4) * codes.UNSIGNED
    found = convert._encoded(SECOND, value)[0].view_as(value)
    assert set((found - steps.floor())[:, 1:].unique().tolist()) == {0.0, 1.0}
    assert abs(float((found - steps)[:, 1:].mean())) < 0.002
    assert bool((found[:, 0] == codes.UNSIGNED).all())


def test_a_small_change_is_not_lost_over_many_steps() -> None:
    """Second moments under gradients of which a third become smaller: roots rounded to the nearest code stay too large."""
    draw = torch.Generator().manual_seed(2)
    sizes = torch.exp(torch.randn(16 * BLOCK, generator=draw))
    exact, ours, nearest = (torch.zeros(len(sizes)) for _ in range(3))
    for step in range(600):
        now = sizes * torch.where(torch.arange(len(sizes)) % 3 == 0, 10 ** (-step / 400), 1.0)
        grad = torch.randn(len(sizes), generator=draw) * now
        exact, ours, nearest = (value.lerp(grad * grad, 1e-3) for value in (exact, ours, nearest))
        ours, nearest = there_and_back(SECOND, ours), _rounded(nearest, 4, codes.UNSIGNED)
    drift = {name: float((value / exact).sqrt().log().mean()) for name, value in (("ours", ours), ("nearest", nearest))}
    assert abs(drift["ours"]) < 0.02 and drift["nearest"] > 0.1


def _rounded(value: Tensor, power: int, steps: int) -> Tensor:
    """Block-wise to the nearest of equal steps of a root; the first is the plain linear code."""
    whole = torch.zeros(codes.padded(value.numel()))
    whole[: value.numel()] = value.reshape(-1)
    blocks = whole.view(-1, BLOCK)
    roots = blocks.abs().pow(1 / power)
    scale = roots.amax(1, keepdim=True) / steps
    found = torch.copysign((roots / scale.clamp_min(1e-30)).round() * scale, blocks)
    return torch.copysign(found.abs().pow(power), found).view(-1)[: value.numel()].view_as(value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_lost(bad: float) -> None:
    value = torch.ones(3 * BLOCK)
    value[BLOCK + 5] = bad
    for moment in MOMENTS:
        found = there_and_back(moment, value)
        assert bool(found[BLOCK : 2 * BLOCK].isfinite().logical_not().all())
        assert torch.allclose(found[:BLOCK], value[:BLOCK]) and torch.allclose(found[2 * BLOCK :], value[2 * BLOCK :])


def test_nothing_stays_nothing() -> None:
    for moment in MOMENTS:
        assert not there_and_back(moment, torch.zeros(BLOCK + 3)).any()


def test_bytes_are_those_of_the_arrays() -> None:
    for name, each in (("int8", 6.03125), ("split-int8", 4.03125), ("master", 12)):
        form = forms.form(name, torch.float32)
        arrays = {key: torch.empty(count_of(key, 4 * ALIGN), dtype=dtype) for key, dtype in form.kept.items()}
        assert bytes_of(name, 2) == each == form.nbytes
        assert sum(array.nbytes for array in arrays.values()) == each * 4 * ALIGN


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("clip", further([None, 0.5], [0.5], "without a clip one pass less"))
@pytest.mark.parametrize("form", FORMS)
def test_where_codes_are_changes_no_bit(model: Model, samples: list[Tensor], form: str, clip: float | None) -> None:
    samples = samples[:4]
    expected, kept, states = offloaded(model, samples, form, layout.DEVICE, clip=clip)
    ways = [(layout.HOST, {}), (layout.HOST, {"share": 0.5, "early": clip is None}), (layout.HOST, {"streamed": True, "share": 0.5}),
            (layout.DISK, {})]  # fmt: skip
    for tier, more in ways:
        found, moved, other = offloaded(model, samples, form, tier, clip=clip, **more)
        assert found == expected, more
        assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), moved.parameters(), strict=True)), more
        assert all(torch.equal(other[i][key], value) for i, state in states.items() for key, value in state.items()), more


def test_where_a_run_is_cut_changes_no_bit() -> None:
    draw = torch.Generator().manual_seed(5)
    elements = 5 * BLOCK + 77
    grads = [torch.randn(elements, generator=draw).bfloat16() for _ in range(4)]
    for name in FORMS:
        form, ends = forms.form(name, torch.float32), []
        for cuts in ([0, elements], [0, BLOCK, 4 * BLOCK, elements]):
            unit = layout.unit("b", {"p": elements})
            kept = {key: torch.zeros(count_of(key, unit.elements), dtype=dtype) for key, dtype in form.kept.items()}
            weight = torch.zeros(elements, dtype=torch.bfloat16)
            wide = torch.empty(form.scratch * unit.elements)
            for number, grad in enumerate(grads):
                runs = [
                    forms.ElementRun(weight[low:high], grad[low:high], {k: a[form.run(k, low, high - low)] for k, a in kept.items()},
                              torch.tensor(number + 1.0))
                    for low, high in itertools.pairwise(cuts)
                ]  # fmt: skip
                forms.update(form, runs, wide, forms.StepSettings(lr=1e-2), scale=torch.tensor([0.7]), skip=None)
            ends.append([weight, *(kept[key][form.part(key, 0, elements)] for key in kept)])
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        assert bool((ends[0][0] != 0).all())


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_step_changes_no_code(model: Model, samples: list[Tensor], form: str, share: float) -> None:
    engines: list[Offloaded] = []
    _, moved, before = offloaded(model, samples[:2], form, layout.HOST, clip=0.5, share=share, optimizer=engines)
    kept, weights = copy.deepcopy(before), [p.detach().clone() for p in moved.parameters()]
    for bad in (1.0, math.nan):
        loss_of(moved, samples[2], torch.bfloat16).backward()
        engines[0].begin(torch.tensor(bad), torch.tensor(1.0))
        after = engines[0].state_dict()["state"]
        assert all(torch.equal(after[i][key], value) for i, state in kept.items() for key, value in state.items())
        assert all(torch.equal(a, b) for a, b in zip(weights, moved.parameters(), strict=True))
    engines[0].close()


@pytest.mark.parametrize("form", FORMS)
def test_going_on_from_a_state_dict_gives_the_same(model: Model, samples: list[Tensor], form: str) -> None:
    expected, _, _ = offloaded(model, samples, form, layout.HOST, clip=0.5)
    saved, weights = _half(model, samples, form)
    assert _gone_on(model, samples, form, saved, weights)[0] == expected[4:]


def _half(model: Model, samples: list[Tensor], form: str) -> tuple[dict, dict]:
    engines: list[Offloaded] = []
    _, half, _ = offloaded(model, samples[:4], form, layout.HOST, clip=0.5, share=0.4, optimizer=engines)
    found = copy.deepcopy(engines[0].state_dict()), copy.deepcopy(half.state_dict())
    engines[0].close()
    return found


def _gone_on(model: Model, samples: list[Tensor], form: str, saved: dict, weights: dict) -> tuple[list[float], dict]:
    """Losses after a resume, and the states right after it."""
    engines: list[Offloaded] = []
    _, other, _ = offloaded(model, [], form, layout.HOST, clip=0.5, optimizer=engines)
    other.load_state_dict(weights)
    engines[0].load_state_dict(saved)
    states, losses = copy.deepcopy(engines[0].state_dict()["state"]), []
    for x in samples[4:]:
        loss = loss_of(other, x, torch.bfloat16)
        loss.backward()
        engines[0].begin(factor(trained(other), 0.5, engines[0].norms()))
        losses.append(loss.item())
    engines[0].close()
    return losses, states


@pytest.mark.parametrize(("before", "after"), [("master", "int8"), ("int8", "master"), ("split-int8", "split"), ("half", "split-int8"),
                                               ("int8", "split-int8"), ("plain", "int8")])  # fmt: skip
def test_a_run_goes_on_in_another_format(model: Model, samples: list[Tensor], before: str, after: str) -> None:
    saved, weights = _half(model, samples, before)
    if before == "plain":
        weights = {name: value.bfloat16() for name, value in weights.items()}
    losses, states = _gone_on(model, samples, after, saved, weights)
    reached = 0
    for index, old in saved["state"].items():
        for moment in MOMENTS:
            was, now = (_moment(state, moment) for state in (old, states[index]))
            same = CODE not in "".join({*old, *states[index]} - ({*old} & {*states[index]}))
            reached += bool(was.any())
            if same:
                assert torch.equal(was, now)
            else:
                assert torch.equal(there_and_back(moment, was), now) or torch.equal(was, now)
    assert reached > 20
    expected, _, _ = offloaded(model, samples, "master", layout.HOST, clip=0.5)
    assert losses == pytest.approx(expected[4:], rel=0.05)


def _moment(state: dict[str, Tensor], moment: str) -> Tensor:
    return state[moment].float() if moment in state else convert._decoded(moment, state[moment + CODE], state[moment + SCALE]).view_as(
        state[moment + CODE])  # fmt: skip


def test_states_without_moments_are_refused(model: Model, samples: list[Tensor]) -> None:
    saved, weights = _half(model, samples, "int8")
    for state in saved["state"].values():
        del state[SECOND + CODE]
    with pytest.raises(UserError, match="no exp_avg_sq"):
        _gone_on(model, samples, "int8", saved, weights)


# ---------------------------------------------------------------- training


class Attends(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms, self.qkv, self.out = nn.ModuleList(nn.LayerNorm(width) for _ in range(2)), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Small(nn.Module):
    def __init__(self, width: int = 32, length: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.ModuleList(Attends(width) for _ in range(2)), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.t()


def _text() -> Tensor:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        import this
    return torch.tensor([ord(letter) for letter in said.getvalue() or "".join(this.d.get(c, c) for c in this.s)])


def _learn(form: str, steps: int = 200, worse: Callable[[str, Tensor], Tensor] | None = None) -> float:
    """Mean loss of the last 20 steps; `worse` is done to fp32 moments after every step."""
    torch.manual_seed(0)
    net, text, draw = Small(), _text(), torch.Generator().manual_seed(1)
    named = dict(net.named_parameters())
    groups = layout.group(list(named), PATHS[:2])
    units = [layout.unit(path, {n: named[n].numel() for n in held}, layout.HOST) for path, held in groups.items()]
    engine = Offloaded(named, units, forms.form(form, torch.float32), device=CPU, lr=5e-3)
    engine.attach(net)
    losses = []
    for _ in range(steps):
        rows = torch.stack([text[at : at + 33] for at in torch.randint(len(text) - 33, (8,), generator=draw)])
        loss = functional.cross_entropy(net(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        engine.begin(factor(named, 1.0))
        losses.append(loss.item())
        if worse is not None:
            engine.settle()
            for state in engine.state.values():
                for moment in MOMENTS:
                    state[moment].copy_(worse(moment, state[moment]))
    engine.close()
    return sum(losses[-20:]) / 20


@pytest.mark.slow(reason="three trainings of hundreds of steps")
def test_training_loses_little_and_less_than_with_plain_rounding() -> None:
    exact = _learn("master")
    found = {form: _learn(form) for form in FORMS}
    linear = _learn("master", worse=lambda moment, value: _rounded(value, 1, codes.SIGNED if moment == FIRST else codes.UNSIGNED))
    assert exact < 2.2  # of 4.85, the logarithm of 128
    assert all(abs(loss - exact) < 0.1 for loss in found.values()), (exact, found)
    assert linear - exact > 1
