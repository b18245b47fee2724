"""What a run learns from: the order, the text, the user's own samples."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foretell.errors import ModelError, UserError
from foretell.runtime.data import text as corpora
from foretell.runtime.data.samples import Example, Feed, Own, RankSamples, Stream, own_samples, shuffled
from foretell.runtime.data.text import Corpus, Windows, read_corpus, text_form

CPU = torch.device("cpu")


# ---------------------------------------------------------------- the order


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 1023, 1024, 1025, 5000])
def test_every_epoch_is_a_permutation(count: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        found = shuffled(count, seed, epoch, np.arange(count))
        assert sorted(found.tolist()) == list(range(count))


def test_seeds_and_epochs_give_other_orders_and_nothing_else_does() -> None:
    place = np.arange(1000)
    first = shuffled(1000, 3, 0, place)
    assert (first == shuffled(1000, 3, 0, place)).all()
    assert (first[500:] == shuffled(1000, 3, 0, place[500:])).all()
    for other in (shuffled(1000, 4, 0, place), shuffled(1000, 3, 1, place), place):
        assert (first == other).mean() < 0.02


def test_every_sample_comes_first_about_equally_often() -> None:
    """5,000 seeds over 10 places: chi-square of 9 degrees of freedom, beyond 33.7 once in 10,000."""
    firsts = Counter(int(shuffled(10, seed, 0, np.zeros(1, dtype=np.int64))[0]) for seed in range(5_000))
    assert sum((firsts[place] - 500) ** 2 / 500 for place in range(10)) < 33.7


def test_neighbours_do_not_stay_neighbours() -> None:
    found = shuffled(100_000, 0, 0, np.arange(100_000))
    steps = np.abs(np.diff(found))
    assert steps.mean() == pytest.approx(100_000 / 3, rel=0.02)  # of two random numbers below n


class Numbers:
    """Samples that are their own index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def run(count: int, *, ranks: int, micro_batch: int, accumulate: int, steps: int) -> list[list[int]]:
    """Samples of every step, in the order of the step's global batch, put together from the ranks' micro-batches."""
    made = Own(Numbers(count), seed=5, owner="numbers")
    shares = [RankSamples(micro_batch=micro_batch, accumulate=accumulate, ranks=ranks, rank=rank) for rank in range(ranks)]
    feeds = [Feed(made, share, seed=5, device=CPU) for share in shares]
    found = []
    for _ in range(steps):
        given = [feed.next() for feed in feeds]
        found.append([n for micro in range(accumulate) for rank in range(ranks) for n in given[rank][micro].tolist()])
    return found


def test_the_global_batch_is_the_same_however_many_ranks_share_it() -> None:
    alone = run(50, ranks=1, micro_batch=12, accumulate=1, steps=10)
    assert run(50, ranks=1, micro_batch=3, accumulate=4, steps=10) == alone
    assert run(50, ranks=2, micro_batch=3, accumulate=2, steps=10) == alone
    assert run(50, ranks=4, micro_batch=3, accumulate=1, steps=10) == alone
    flat = [n for step in alone for n in step]
    assert sorted(flat[:50]) == sorted(flat[50:100]) == list(range(50))  # over the end of an epoch, none twice, none lost
    assert flat[:50] != flat[50:100]


@pytest.mark.parametrize(("count", "first"), [(5000, 4000), (5000, 0), (3, 1), (20_000, 3000), (4096, 4090), (9000, 8000)])
def test_a_step_over_any_boundary_has_the_samples_of_the_order(count: int, first: int) -> None:
    feed = Feed(Own(Numbers(count), seed=1, owner="n"), RankSamples(micro_batch=500, accumulate=9), seed=1, device=CPU)
    wanted = [int(shuffled(count, 1, n // count, np.array([n % count]))[0]) for n in range(first, first + 4500, 7)]
    assert feed.places(first)[0].reshape(-1)[::7].tolist() == wanted


def test_where_it_is_can_be_said_and_gone_back_to_with_other_ranks() -> None:
    share = RankSamples(micro_batch=4, accumulate=2)
    feed = Feed(Own(Numbers(21), seed=1, owner="n"), share, seed=1, device=CPU)
    for _ in range(7):
        feed.next()
    state = feed.state()
    assert state == {"seed": 1, "epoch": 2, "position": 14}
    wanted = torch.cat(feed.next())
    again = Feed(Own(Numbers(21), seed=1, owner="n"), RankSamples(micro_batch=8), seed=1, device=CPU)
    again.seek(state)
    assert torch.equal(torch.cat(again.next()), wanted)
    assert torch.equal(torch.cat(again.at(7 * 8)), wanted)


# ---------------------------------------------------------------- text


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_is_read_in_the_order_of_its_paths_without_what_is_no_text(tmp_path: Path) -> None:
    write(tmp_path, {
        "b.txt": b"bb", "a/z.md": "zé".encode(), "a/.hidden": b"no", ".git/x": b"no", "c.bin": b"a\0b", "d.latin": b"\xff\xe9",
        "empty.txt": b"",
    })  # fmt: skip
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    found = read_corpus(tmp_path)
    assert found.tokens.tobytes() == "zé\0bb\0".encode()
    assert found.files == 2 and found.skipped == 2 and "2 that are no text skipped" in found.note


def test_a_character_cut_by_the_look_at_the_start_is_no_damage(tmp_path: Path) -> None:
    write(tmp_path, {"long.txt": b"x" + "é".encode() * 10_000})
    assert read_corpus(tmp_path).tokens.size == 20_002


def test_more_text_than_allowed_is_cut_and_said(tmp_path: Path) -> None:
    write(tmp_path, {"a": b"a" * 10, "b": b"b" * 10, "c": b"c" * 10})
    found = read_corpus(tmp_path, most=15)
    assert found.tokens.tobytes() == b"a" * 10 + b"\0bbbb" and found.left_out_bytes == 18
    assert "18 B more were left out" in found.note


@pytest.mark.parametrize("place", ["nowhere", "empty", "only.bin"])
def test_no_folder_or_no_text_is_said(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "only.bin").write_bytes(b"\0\1")
    with pytest.raises(UserError, match="no data folder" if place == "nowhere" else "holds no text"):
        read_corpus(tmp_path / place)


def text(size: int) -> Corpus:
    return Corpus(tokens=(np.arange(size) % 251).astype(np.uint8), files=1, skipped=0, left_out_bytes=0)


@pytest.mark.parametrize("windows", [2, 3, 19, 20, 21, 41, 100])
def test_windows_cover_the_text_once_and_hold_some_out(windows: int) -> None:
    made = text(windows * 8 + 1)
    train, held = (Windows(made, 8, lambda rows: rows, split=split) for split in ("train", "eval"))
    assert train.count and held.count and train.count + held.count == windows
    both = [*train.windows(np.arange(train.count)), *held.windows(np.arange(held.count))]
    assert sorted(both) == list(range(windows))
    assert held.count == max(1, windows // corpora.HELD_OUT_EVERY)


def test_targets_are_the_inputs_one_further(tmp_path: Path) -> None:
    model = nn.Embedding(256, 4)
    example = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "targets": torch.zeros(2, 8, dtype=torch.int64)}
    seq, form = text_form(model, example, "m")
    batch = Windows(text(1000), seq, form).take(np.array([0, 3]), np.zeros(2))
    assert batch["input_ids"][1].tolist() == list(range(24, 32)) and batch["targets"][1].tolist() == list(range(25, 33))
    assert batch["input_ids"].dtype == torch.int64 and batch["input_ids"].is_contiguous()


class TinyForCausalLM(nn.Module):
    """Hugging Face's models shift the labels themselves."""


def test_a_batch_takes_the_form_the_model_has_it_in() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    rows = torch.arange(18).view(2, 9)
    _, form = text_form(nn.Embedding(256, 4), (ids, ids), "m")
    assert [part.tolist() for part in form(rows)] == [rows[:, :-1].tolist(), rows[:, 1:].tolist()]
    _, form = text_form(nn.Embedding(256, 4), ids, "m")
    assert form(rows).tolist() == rows[:, :-1].tolist()
    _, form = text_form(TinyForCausalLM(), {"input_ids": ids, "labels": ids, "attention_mask": ids}, "m")
    made = form(rows)
    assert torch.equal(made["labels"], made["input_ids"]) and made["attention_mask"].tolist() == [[1] * 8] * 2


@pytest.mark.parametrize(
    "example",
    [
        {"images": torch.zeros(2, 3, 8, 8)},
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "decoder_input_ids": torch.zeros(2, 8, dtype=torch.int64)},
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "targets": torch.zeros(2, 4, dtype=torch.int64)},
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "weights": torch.zeros(2, 8)},
        torch.zeros(2, 8),
    ],
)
def test_a_model_that_takes_more_than_text_is_refused(example: Any) -> None:
    with pytest.raises(UserError, match=r"text alone does not give.*FILE\.py"):
        text_form(nn.Embedding(256, 4), example, "m")


def test_too_few_tokens_and_too_little_text_are_refused() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(UserError, match="knows 100 tokens"):
        text_form(nn.Embedding(100, 4), {"input_ids": ids, "targets": ids}, "m")
    with pytest.raises(UserError, match="too few for two sequences"):
        Windows(text(16), 8, lambda rows: rows)


# ---------------------------------------------------------------- the user's own


class Noisy(Numbers):
    """Draws from every generator there is, as augmentation does."""

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": float(index), "noise": torch.rand(()).item() + random.random() + np.random.rand()}


def test_what_a_sample_draws_depends_on_seed_epoch_and_index_alone() -> None:
    def taken(seed: int, indices: list[int], epoch: int = 0) -> list[float]:
        epochs = np.full(len(indices), epoch)
        return Own(Noisy(10), seed=seed, owner="n").take(np.array(indices), epochs)["noise"].tolist()

    assert taken(1, [4, 5, 6])[1:] == taken(1, [5, 6])
    assert taken(1, [4]) != taken(2, [4]) and taken(1, [4]) != taken(1, [4], epoch=1) and taken(1, [4]) != taken(1, [5])


def test_samples_leave_the_runs_random_numbers_alone() -> None:
    def drawn(between: bool) -> tuple[float, float, float]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        if between:
            Own(Noisy(10), seed=1, owner="n").take(np.arange(4), np.zeros(4))
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    assert drawn(True) == drawn(False)


def test_worker_processes_give_the_same_samples() -> None:
    share = RankSamples(micro_batch=3, accumulate=2)
    torch.manual_seed(0)
    inline, ahead = (
        Feed(Own(Noisy(20), seed=2, owner="n"), share, seed=2, device=CPU, workers=workers) for workers in (0, 1)
    )
    for _ in range(3):
        for left, right in zip(inline.next(), ahead.next(), strict=True):
            assert torch.equal(left["x"], right["x"]) and torch.equal(left["noise"], right["noise"])
    after = torch.rand(())
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(()))


def test_a_stream_is_read_on_and_found_again() -> None:
    def begin() -> Iterator[int]:
        yield from range(100, 130)

    made = own_samples(begin, seed=0, owner="s")
    assert isinstance(made, Stream)
    feeds = [Feed(made, RankSamples(micro_batch=2, ranks=2, rank=rank), seed=0, device=CPU) for rank in (0, 1)]
    assert [feed.next()[0].tolist() for feed in feeds] == [[100, 101], [102, 103]]
    assert [feed.next()[0].tolist() for feed in feeds] == [[104, 105], [106, 107]]
    later = Feed(own_samples(begin, seed=0, owner="s"), RankSamples(micro_batch=4), seed=0, device=CPU)
    later.seek(feeds[0].state())
    assert later.next()[0].tolist() == [108, 109, 110, 111]
    later.first = 28
    with pytest.raises(UserError, match="ended after 30 samples, and sample 30 is next"):
        later.next()


def test_what_data_returns_is_taken_as_it_is_or_refused() -> None:
    assert own_samples(lambda: None, seed=0, owner="d") is None
    with pytest.raises(UserError, match="returned int"):
        own_samples(lambda: 3, seed=0, owner="d")
    with pytest.raises(UserError, match="no samples"):
        own_samples(list, seed=0, owner="d")
    pairs = own_samples(lambda: [(torch.zeros(3), 1), (torch.ones(3), 2)], seed=0, owner="d")
    assert pairs is not None
    batch = pairs.take(np.array([0, 1, 0]), np.zeros(3, dtype=np.int64))
    assert isinstance(batch, tuple) and batch[0].shape == (3, 3) and batch[1].tolist() == [1, 2, 1]
    with pytest.raises(ModelError, match=r"do not stack into a batch.*same shape"):
        own_samples(lambda: [torch.zeros(2), torch.zeros(3)], seed=0, owner="d").take(np.arange(2), np.zeros(2, dtype=np.int64))


def test_the_example_comes_again_and_says_so() -> None:
    example = Example({"x": torch.ones(2)})
    feed = Feed(example, RankSamples(micro_batch=2), seed=0, device=CPU)
    assert torch.equal(feed.next()[0]["x"], feed.next()[0]["x"]) and "not for learning" in example.note
