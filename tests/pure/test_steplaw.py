"""The Step Law against the runs that its authors published."""

from __future__ import annotations

import statistics
from math import log

import pytest

from foretell.errors import UserError
from foretell.plan.legal import micro_batches_allowed
from foretell.search.solve.step_law import Batch, non_embedding_parameters, round_batch, step_law

RUNS = (
    (214663680, 4.00e9, 2.762e-3, 262144), (214663680, 1.14e10, 2.762e-3, 393216), (214663680, 2.00e10, 3.910e-3, 524288),
    (214663680, 1.00e11, 7.812e-3, 2097152), (268304384, 5.00e9, 1.953e-3, 262144), (268304384, 1.42e10, 3.906e-3, 393216),
    (268304384, 2.50e10, 3.910e-3, 720896), (268304384, 8.00e10, 3.906e-3, 1048576), (429260800, 8.00e9, 1.953e-3, 262144),
    (429260800, 2.27e10, 1.950e-3, 393216), (429260800, 4.00e10, 2.760e-3, 524288), (429260800, 5.00e10, 1.953e-3, 524288),
    (536872960, 1.00e10, 9.766e-4, 262144), (536872960, 2.84e10, 1.950e-3, 393216), (536872960, 5.00e10, 2.760e-3, 720896),
    (1073741824, 2.00e10, 1.381e-3, 524288), (1073741824, 5.69e10, 1.381e-3, 524288),
)  # fmt: skip
"""N, D, and the learning rate and batch (tokens) with the least loss of each published grid of dense models. The
grids have two learning rates to a doubling and about two batches, and the loss hardly changes within a step."""


@pytest.mark.parametrize(("parameters", "tokens", "rate"), [(0.44e9, 10e9, 1.4e-3), (3.65e9, 10e9, 3.2e-4)])
def test_others_who_applied_the_law_got_the_same(parameters: float, tokens: float, rate: float) -> None:
    """Figures that another project's training scripts give, to two digits."""
    assert float(f"{step_law(parameters, tokens).learning_rate:.1e}") == rate


def test_the_best_published_runs_are_within_two_steps_of_the_law() -> None:
    for parameters, tokens, rate, batch in RUNS:
        law = step_law(parameters, tokens)
        assert 1 / 2 < rate / law.learning_rate < 2, (parameters, tokens)
        assert 1 / 2 < batch / law.batch_tokens < 2, (parameters, tokens)


def test_on_the_whole_the_law_is_within_one_step() -> None:
    pairs = [(step_law(size, tokens), rate, batch) for size, tokens, rate, batch in RUNS]
    rates = [abs(log(rate / law.learning_rate)) for law, rate, _ in pairs]
    batches = [abs(log(batch / law.batch_tokens)) for law, _, batch in pairs]
    assert max(statistics.median(rates), statistics.median(batches)) < log(2) / 2


def test_beyond_the_runs_behind_it_the_law_says_so() -> None:
    assert step_law(1e9, 100e9).notes == ()
    notes = step_law(70e9, 15e12).notes
    assert len(notes) == 2 and "parameters is above" in notes[0] and "tokens is above" in notes[1]
    assert "below" in step_law(1e6, 10e9).notes[0]


def brute(wanted: float, seq: int, ranks: int, micro: int, schedule: str, stages: int) -> int:
    counts = [n for n in range(1, 3000) if micro_batches_allowed(schedule, stages, n)]
    return min(counts, key=lambda n: abs(log(n * seq * ranks * micro / wanted)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("wanted", [3e3, 1.1e5, 297459.6, 4.1e6])
def test_the_rounded_batch_is_the_nearest_that_the_plan_makes(schedule: str, wanted: float) -> None:
    for ranks, micro, stages in ((1, 1, 1), (8, 2, 4), (12, 3, 8)):
        batch = round_batch(
            wanted, 2048, data_ranks=ranks, micro_batch=micro,
            allowed=lambda n, s=stages: micro_batches_allowed(schedule, s, n),
        )  # fmt: skip
        assert batch.accumulate == brute(wanted, 2048, ranks, micro, schedule, stages)
        assert batch.samples == batch.micro_batch * batch.accumulate * batch.data_ranks == batch.tokens // 2048


def test_a_batch_that_is_met_exactly_is_not_off() -> None:
    batch = round_batch(2**20, 4096, data_ranks=16, micro_batch=2)
    assert (batch.accumulate, batch.tokens, batch.off) == (8, 2**20, 0.0)
    assert isinstance(batch, Batch) and round_batch(1.0, 4096, data_ranks=16).off > 1000


def test_only_blocks_count_as_the_authors_count() -> None:
    """Their model of 268M: width 1024, 8 blocks of four square matrices and three of 9552."""
    block = {"q": (1024, 1024), "k": (1024, 1024), "v": (1024, 1024), "o": (1024, 1024),
             "up": (9552, 1024), "gate": (9552, 1024), "down": (1024, 9552)}  # fmt: skip
    shapes = {f"blocks.{i}.{name}": shape for i in range(8) for name, shape in block.items()}
    shapes |= {"embed.weight": (65536, 1024), "head.weight": (65536, 1024), "blocks_norm": (1024,)}
    assert non_embedding_parameters(shapes, [f"blocks.{i}" for i in range(8)]) == 268304384
    assert non_embedding_parameters({"a": (3, 4)}, []) == 12


@pytest.mark.parametrize("parameters", [0, -1, float("inf"), float("nan")])
def test_nonsense_is_refused(parameters: float) -> None:
    with pytest.raises(UserError, match="parameters"):
        step_law(parameters, 1e9)
    with pytest.raises(UserError, match="data_ranks"):
        round_batch(1e6, 1024, data_ranks=0)
    with pytest.raises(UserError, match="micro-batches"):
        round_batch(1e6, 1024, allowed=lambda _: False)
