"""A classifier of StarCraft II replays, for SC2EGSet (Białecki et al. 2023, "SC2EGSet: StarCraft II Esport Replay and Game-state
Dataset").

The paper brings data and no network; this is a transformer encoder that reads a game's events and says who won. Kept: ragged
sequences of events (kind, place in the game, numbers), read from many small archives with checksums. Replays are packed into
rows of `capacity` events, longest first and each into the fullest row that still takes it; events see only their own replay
(a mask by segment ids), and each replay's events are averaged by `index_add`. Padding is a segment of its own that nobody
reads. What is in an archive that is damaged is left out and told of. Left out: the game's own file format; replays are random,
their lengths log-normal from a fixed seed, so that all shapes are known. Sizes of the network are ours.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = 4
"""Numbers of an event besides its kind."""
Replay = tuple[Tensor, Tensor, int]
"""Kinds of its events, (events), their numbers, (events, FEATURES), and which player won."""


# ---------------------------------------------------------------- archives


def write_archive(replays: Mapping[str, Replay]) -> bytes:
    """An archive of replays by file name, with a list of their checksums."""
    whole, sums = io.BytesIO(), {}
    with zipfile.ZipFile(whole, "w") as archive:
        for name, replay in replays.items():
            content = io.BytesIO()
            torch.save(replay, content)
            sums[name] = hashlib.sha256(content.getvalue()).hexdigest()
            archive.writestr(name, content.getvalue())
        archive.writestr("checksums.json", json.dumps(sums))
    return whole.getvalue()


def read_archives(archives: Mapping[str, bytes]) -> tuple[list[Replay], list[str]]:
    """Every sound replay, and a line for each file that is not: unreadable, or other than its checksum says."""
    replays, report = list[Replay](), list[str]()
    for where, content in archives.items():
        try:
            archive = zipfile.ZipFile(io.BytesIO(content))
            sums = json.loads(archive.read("checksums.json"))
        except (zipfile.BadZipFile, KeyError, ValueError) as error:
            report.append(f"{where}: no archive ({error})")
            continue
        for name, expected in sums.items():
            try:
                found = archive.read(name)
            except (zipfile.BadZipFile, KeyError) as error:
                report.append(f"{where}/{name}: cannot be read ({error})")
                continue
            if hashlib.sha256(found).hexdigest() != expected:
                report.append(f"{where}/{name}: checksum differs")
                continue
            kinds, values, winner = torch.load(io.BytesIO(found), weights_only=True)
            replays.append((kinds, values, winner))
    return replays, report


# ---------------------------------------------------------------- packing


def pack(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    """Rows of replay numbers: longest first, each into the fullest row that still takes it."""
    rows, room = list[list[int]](), list[int]()
    for number, length in sorted(enumerate(lengths), key=lambda item: -item[1]):
        if length > capacity:
            raise ValueError(f"a replay of {length} events is longer than a row of {capacity}")
        fitting = [row for row, left in enumerate(room) if left >= length]
        row = min(fitting, key=lambda row: room[row], default=len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(number)
        room[row] -= length
    return rows


def collate(replays: list[Replay], capacity: int) -> dict[str, Tensor]:
    """A packed batch; padding is kind 0 in the segment after the last replay."""
    kinds, values, segment, place = [], [], [], []
    for row in pack([len(kind) for kind, _, _ in replays], capacity):
        lengths = [len(replays[number][0]) for number in row]
        left = capacity - sum(lengths)
        kinds.append(torch.cat([*(replays[number][0] for number in row), torch.zeros(left, dtype=torch.long)]))
        values.append(torch.cat([*(replays[number][1] for number in row), torch.zeros(left, FEATURES)]))
        for number, length in zip((*row, len(replays)), (*lengths, left), strict=True):
            segment += [number] * length
        place += [n for length in (*lengths, left) for n in range(length)]
    return {
        "kinds": torch.stack(kinds),
        "values": torch.stack(values),
        "segment": torch.tensor(segment).view(-1, capacity),
        "place": torch.tensor(place).view(-1, capacity),
        "winner": torch.tensor([winner for _, _, winner in replays]),
    }


# ---------------------------------------------------------------- the network


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(self.norm1(x)).split(c, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ReplayClassifier(nn.Module):
    def __init__(
        self, kinds: int, capacity: int, replays: int, typical: int, layers: int, dim: int, heads: int, players: int
    ) -> None:
        super().__init__()
        self.num_kinds, self.players, self.dim = kinds, players, dim
        self.capacity, self.replays, self.typical = capacity, replays, typical
        self.kinds = nn.Embedding(kinds, dim)
        self.values = nn.Linear(FEATURES, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, players)
        nn.init.normal_(self.kinds.weight, std=0.02)

    def forward(self, kinds: Tensor, values: Tensor, segment: Tensor, place: Tensor, winner: Tensor) -> Tensor:
        """Logits, (replays, players)."""
        x = self.kinds(kinds) + self.values(values) + self.waves(place)
        mask = (segment[:, :, None] == segment[:, None, :])[:, None]
        for block in self.blocks:
            x = block(x, mask)
        x, owner = self.norm(x).flatten(0, 1).float(), segment.flatten()
        count = torch.zeros(len(winner) + 1, 1, device=x.device).index_add(0, owner, torch.ones_like(x[:, :1]))
        total = torch.zeros(len(winner) + 1, self.dim, device=x.device).index_add(0, owner, x)
        return self.head((total / count.clamp(min=1))[:-1])

    def waves(self, place: Tensor) -> Tensor:
        """Where in its replay an event stands, as sines and cosines."""
        exponent = torch.arange(0, self.dim, 2, device=place.device, dtype=torch.float32) / self.dim
        angle = place[..., None] * 10_000.0**-exponent
        return torch.cat((angle.sin(), angle.cos()), dim=-1)


def build(
    *,
    kinds: int = 512,
    capacity: int = 8192,
    replays: int = 16,
    typical: int = 2000,
    layers: int = 8,
    dim: int = 512,
    heads: int = 8,
    players: int = 2,
) -> ReplayClassifier:
    return ReplayClassifier(kinds, capacity, replays, typical, layers, dim, heads, players)


def batch(
    model: ReplayClassifier, micro_batch: int, seq: int | None = None, image: int | None = None
) -> dict[str, Tensor]:
    """`replays` replays for each of the micro-batch, packed; how many rows that makes follows from their lengths."""
    dice = random.Random(0)
    lengths = [
        max(1, min(model.capacity, int(model.typical * dice.lognormvariate(0, 0.6))))
        for _ in range(micro_batch * model.replays)
    ]
    replays = [
        (torch.randint(1, model.num_kinds, (length,)), torch.randn(length, FEATURES), dice.randrange(model.players))
        for length in lengths
    ]
    return collate(replays, model.capacity)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of who won."""
    return F.cross_entropy(output.float(), batch["winner"])
