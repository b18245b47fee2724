"""States on disk beside the same in host memory, bit for bit; and what is said and left when the disk does not play along."""

from __future__ import annotations

import copy
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.errors import UserError
from foretell.runtime.offload import forms, layout
from foretell.runtime.offload.adamw import Offloaded
from foretell.runtime.offload.memory import store
from foretell.runtime.offload.pump import Pump
from tests.further import further
from tests.pure.test_offload import CPU, PATHS, Model, factor, loss_of, model, offloaded, samples, trained

__all__ = ["model", "samples"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where states are kept if nobody names a folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for index, state in one.items():
        assert state.keys() == other[index].keys()
        for name, value in state.items():
            assert value.dtype == other[index][name].dtype and torch.equal(value, other[index][name]), (index, name)


@pytest.mark.parametrize(
    ("form", "clip", "early", "micro", "streamed"),
    [
        ("plain", 0.5, False, 1, False),
        ("plain", None, True, 3, False),
        ("master", 0.5, False, 3, False),
        ("master", None, True, 1, False),
        ("split", 0.5, False, 1, False),
        ("split", None, True, 3, True),
        ("half", 0.5, False, 1, True),
        ("int8", 0.5, False, 1, False),
        ("split-int8", None, True, 1, False),
        ("master", 0.5, False, 3, True),
    ],
)
def test_states_on_disk_are_updated_as_in_host_memory(
    model: Model, samples: list[Tensor], form: str, clip: float | None, early: bool, micro: int, streamed: bool, folder: Path
) -> None:
    how: dict[str, Any] = {"clip": clip, "early": early, "micro": micro, "streamed": streamed}
    expected, kept, states = offloaded(model, samples, form, layout.HOST, **how)
    found, moved, others = offloaded(model, samples, form, layout.DISK, **how)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), moved.parameters(), strict=True))
    same(states, others)
    assert not [path for path in folder.iterdir() if path.is_file()]


def engine_on(model: Model, form: str, tiers: dict[str, str], share: float = 0.0) -> tuple[Model, Offloaded]:
    """A copy of the model and its optimizer, whose units are where `tiers` says."""
    model = copy.deepcopy(model)
    if form != "plain":
        model.frozen.to(torch.bfloat16)
    named = trained(model)
    units = [
        layout.unit(path, {name: named[name].numel() for name in held}, tiers.get(path, layout.DEVICE), chunk=700, cpu_share=share)
        for path, held in layout.group(list(named), PATHS).items()
    ]
    engine = Offloaded(named, units, forms.form(form, torch.float32), device=CPU, lr=1e-2, threads=2)
    engine.attach(model)
    return model, engine


def go_on(model: Model, engine: Offloaded, samples: list[Tensor], form: str) -> list[float]:
    losses = []
    for x in samples:
        loss = loss_of(model, x, torch.float32 if form == "plain" else torch.bfloat16)
        loss.backward()
        engine.begin(factor(trained(model), 0.5, engine.norms()))
        losses.append(loss.item())
    engine.settle()
    return losses


@pytest.mark.parametrize("form", further(["plain", "master", "split", "int8"], ["master", "int8"], "copied as the other forms are"))
@pytest.mark.parametrize(("first", "second"), [("host", "disk"), ("disk", "host"), ("disk", "disk")])
def test_states_go_on_where_others_are_kept(model: Model, samples: list[Tensor], form: str, first: str, second: str) -> None:
    everywhere = ["", *PATHS]
    expected, last = engine_on(model, form, dict.fromkeys(everywhere, "device"))
    samples = samples[:6]
    losses = go_on(expected, last, samples, form)
    one, engine = engine_on(model, form, dict.fromkeys(everywhere, first))
    assert go_on(one, engine, samples[:4], form) == losses[:4]
    saved, weights = copy.deepcopy(engine.state_dict()), copy.deepcopy(one.state_dict())
    engine.close()
    other, engine = engine_on(model, form, dict.fromkeys(everywhere, second))
    go_on(other, engine, samples[:1], form)  # whatever was there is overwritten, and what was read ahead is read again
    other.load_state_dict(weights)
    engine.load_state_dict(saved)
    same(engine.state_dict()["state"], saved["state"])
    assert go_on(other, engine, samples[4:], form) == losses[4:]
    same(engine.state_dict()["state"], last.state_dict()["state"])
    engine.close()
    last.close()


def test_an_exact_weight_is_what_it_was_in_another_form(model: Model, samples: list[Tensor]) -> None:
    everywhere = dict.fromkeys(["", *PATHS], "disk")
    one, engine = engine_on(model, "split", everywhere)
    go_on(one, engine, samples[:3], "split")
    saved, weights = copy.deepcopy(engine.state_dict()), copy.deepcopy(one.state_dict())
    engine.close()
    found = {}
    for tier in ("device", "disk"):
        other, engine = engine_on(model, "master", dict.fromkeys(everywhere, tier))
        other.load_state_dict(weights)
        engine.load_state_dict(saved)
        found[tier] = copy.deepcopy(engine.state_dict()["state"])
        engine.close()
    same(found["disk"], found["device"])
    assert all(bool(state["master"].any()) for state in found["disk"].values())


def test_a_thread_of_its_own_and_all_three_places(model: Model, samples: list[Tensor]) -> None:
    """The order in which units come is another one every time; some are updated by the CPU."""
    plain, last = engine_on(model, "master", {}, share=0.0)
    losses = go_on(plain, last, samples, "master")
    moved, engine = engine_on(model, "master", {"": "disk", "blocks.0": "host", "blocks.1": "disk", "blocks.2": "disk"})
    order = {unit.path: number for number, unit in enumerate(engine.units)}
    engine.pump = Pump(lambda unit: engine.updater.start(unit, engine.pending[unit.path]), order, threaded=True)
    assert go_on(moved, engine, samples, "master") == losses
    same(engine.state_dict()["state"], last.state_dict()["state"])
    engine.close()
    last.close()


# ---------------------------------------------------------------- a disk that does not play along


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_too_small_a_disk_and_no_folder_are_said_before_anything_starts(model: Model, tmp_path: Path) -> None:
    unit = layout.unit("blocks.0", {"p": 100}, layout.DISK)
    form = forms.form("master", torch.float32)
    with pytest.raises(UserError, match=r"nothing can be kept on disk in .*gone: No such file"):
        store.Store([unit], form, CPU, slots=2, folder=tmp_path / "gone")
    large = layout.unit("blocks.0", {"p": 10**14}, layout.DISK, chunk=10**13)
    with pytest.raises(UserError, match=r"keeps .* on disk in .*, and .* are free there"):
        store.Store([large], form, CPU, slots=2, folder=tmp_path)
    with files_no_larger_than(1000), pytest.raises(UserError, match=r"on disk in .*File too large"):
        store.Store([unit], form, CPU, slots=2, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_host_memory_counts_as_such(tmp_path: Path) -> None:
    place = Path("/dev/shm")
    if not place.is_dir() or not store.in_memory(place) or not os.access(place, os.W_OK):
        pytest.skip("no folder in memory here")
    with pytest.raises(UserError, match="which is in host memory"):
        store.shelf(10**14, place)


@pytest.mark.parametrize("threaded", [False, True])
def test_a_write_that_fails_ends_training_with_what_failed(model: Model, samples: list[Tensor], threaded: bool) -> None:
    moved, engine = engine_on(model, "master", dict.fromkeys(["", *PATHS], "disk"))
    if threaded:
        order = {unit.path: number for number, unit in enumerate(engine.units)}
        engine.pump = Pump(lambda unit: engine.updater.start(unit, engine.pending[unit.path]), order, threaded=True)
    go_on(moved, engine, samples[:2], "master")
    with files_no_larger_than(4096), pytest.raises(UserError, match=r"writing .* on disk in .* failed: File too large"):
        go_on(moved, engine, samples[2:], "master")
    engine.close()
