"""Models of the corpus that gather and scatter: graphs, points, retrieval, tables, fields; and losses with gradients inside.

Every function returns a model and one batch.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from model_parts import Built, WithLoss, feed, labelled, mlp
from torch import Tensor, nn


def _edges(nodes: int, degree: int) -> Tensor:
    return torch.randint(nodes, (2, degree * nodes))


def _summed(values: Tensor, where: Tensor, size: int) -> Tensor:
    return torch.zeros(size, *values.shape[1:], device=values.device, dtype=values.dtype).index_add(0, where, values)


# ---------------------------------------------------------------------- graphs and points


class _Near(nn.Module):
    """Every point looks at its nearest ones, found anew in every layer."""

    def __init__(self, widths: tuple[int, ...], near: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for a, b in pairs
        )
        self.head, self.near = mlp(sum(widths[1:]), 256, 40), near

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for conv in self.convs:
            flat = x.transpose(1, 2)
            size = (flat**2).sum(-1)
            apart = size.unsqueeze(2) + size.unsqueeze(1) - 2 * flat @ x
            where = apart.topk(self.near, dim=-1, largest=False)[1]
            beside = torch.gather(
                x.unsqueeze(2).expand(-1, -1, x.shape[2], -1), 3, where.unsqueeze(1).expand(-1, x.shape[1], -1, -1)
            )
            here = x.unsqueeze(3).expand_as(beside)
            x = conv(torch.cat([beside - here, here], 1)).amax(3)
            found.append(x)
        return self.head(torch.cat(found, 1).amax(2))


def dynamic_edges(micro_batch: int, seq: int = 512, near: int = 16) -> Built:
    """DGCNN."""
    return WithLoss(_Near((3, 64, 64, 128), near)), labelled(torch.randn(micro_batch, 3, seq), 40)


class _Grouped(nn.Module):
    def __init__(self, inner: int, outer: int, points: int, near: int) -> None:
        super().__init__()
        self.net, self.points, self.near = mlp(inner + 3, outer, outer, outer), points, near

    def forward(self, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        centre = at[:, :: at.shape[1] // self.points]
        where = torch.cdist(centre, at).topk(self.near, dim=-1, largest=False)[1]
        rows = torch.arange(at.shape[0], device=at.device).view(-1, 1, 1)
        local = at[rows, where] - centre.unsqueeze(2)
        return centre, self.net(torch.cat([local.to(x.dtype), x[rows, where]], -1)).amax(2)


class _Points(nn.Module):
    def __init__(self, near: int) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            _Grouped(3, 128, 256, near),
            _Grouped(128, 256, 64, near),
            mlp(256, 256, 40),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(*self.first(x, x))[1].amax(1))


def grouped_points(micro_batch: int, seq: int = 1024, near: int = 24) -> Built:
    """PointNet++ with centres taken in order."""
    return WithLoss(_Points(near)), labelled(torch.randn(micro_batch, seq, 3), 40)


class _Equivariant(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Embedding(20, dim)
        self.edge, self.node, self.move = (
            nn.ModuleList(mlp(*sizes, act=nn.SiLU) for _ in range(layers))
            for sizes in ((2 * dim + 1, dim, dim), (2 * dim, dim, dim), (dim, dim, 1))
        )
        self.head = mlp(dim, dim, 1, act=nn.SiLU)

    def forward(self, kind: Tensor, at: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h, (a, b) = self.first(kind), edges
        for edge, node, move in zip(self.edge, self.node, self.move, strict=True):
            apart = at[a] - at[b]
            told = edge(torch.cat([h[a], h[b], (apart**2).sum(1, keepdim=True)], 1))
            at = at + _summed(0.01 * apart * move(told).float(), a, at.shape[0])
            h = h + node(torch.cat([h, _summed(told, a, h.shape[0]).to(h.dtype)], 1))
        return F.mse_loss(self.head(h).float().flatten(), y)


def equivariant_graph(micro_batch: int, nodes: int = 2000, dim: int = 128, layers: int = 4) -> Built:
    nodes = nodes * micro_batch
    return _Equivariant(dim, layers), {
        "kind": torch.randint(20, (nodes,)),
        "at": torch.randn(nodes, 3),
        "edges": _edges(nodes, 12),
        "y": torch.randn(nodes),
    }


class _Filtered(nn.Module):
    """Filters over distances, as in SchNet."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Embedding(100, dim)
        self.filters = nn.ModuleList(mlp(50, dim, dim, act=nn.Softplus) for _ in range(layers))
        self.into, self.out = (
            nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers)),
            nn.ModuleList(mlp(dim, dim, dim, act=nn.Softplus) for _ in range(layers)),
        )
        self.register_buffer("grid", torch.linspace(0, 5, 50))
        self.head = mlp(dim, dim // 2, 1, act=nn.Softplus)

    def forward(self, kind: Tensor, at: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h, (a, b) = self.first(kind), edges
        far = (at[a] - at[b]).norm(dim=1)
        near = torch.exp(-10 * (far.unsqueeze(1) - self.grid) ** 2)
        for each, into, out in zip(self.filters, self.into, self.out, strict=True):
            told = into(h)[b] * each(near)
            h = h + out(_summed(told, a, h.shape[0]))
        return F.mse_loss(self.head(h).float().view(y.shape[0], -1).sum(1), y)


def continuous_filters(micro_batch: int, nodes: int = 32, dim: int = 128, layers: int = 4) -> Built:
    count = nodes * micro_batch
    return _Filtered(dim, layers), {
        "kind": torch.randint(100, (count,)),
        "at": torch.rand(count, 3),
        "edges": _edges(count, 16),
        "y": torch.randn(micro_batch),
    }


class _Passing(nn.Module):
    """Messages whose matrix depends on the edge, and a GRU that takes them in."""

    def __init__(self, dim: int, rounds: int) -> None:
        super().__init__()
        self.first, self.relation, self.cell = (
            nn.Linear(64, dim),
            nn.Parameter(torch.randn(4, dim, dim) * 0.05),
            nn.GRUCell(dim, dim),
        )
        self.head, self.rounds = nn.Linear(dim, 16), rounds

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        for _ in range(self.rounds):
            told = torch.einsum("ni,kij->knj", h, self.relation)
            sums = torch.stack([_summed(told[k][edges[k, 1]], edges[k, 0], h.shape[0]) for k in range(4)]).sum(0)
            h = self.cell(sums.to(x.dtype), h.to(x.dtype))
        return F.cross_entropy(self.head(h).float(), y)


def relation_graph(micro_batch: int, nodes: int = 4000, dim: int = 128, rounds: int = 4) -> Built:
    nodes = nodes * micro_batch
    edges = torch.stack([_edges(nodes, 3) for _ in range(4)])
    return _Passing(dim, rounds), {"x": torch.randn(nodes, 64), "edges": edges, "y": torch.randint(16, (nodes,))}


class _Mesh(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.node, self.edge = (
            nn.Sequential(*mlp(12, dim, dim), nn.LayerNorm(dim)),
            nn.Sequential(*mlp(7, dim, dim), nn.LayerNorm(dim)),
        )
        self.edges = nn.ModuleList(nn.Sequential(*mlp(3 * dim, dim, dim), nn.LayerNorm(dim)) for _ in range(layers))
        self.nodes = nn.ModuleList(nn.Sequential(*mlp(2 * dim, dim, dim), nn.LayerNorm(dim)) for _ in range(layers))
        self.head = mlp(dim, dim, 3)

    def forward(self, x: Tensor, links: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h, e, (a, b) = self.node(x), self.edge(links), edges
        for edge, node in zip(self.edges, self.nodes, strict=True):
            e = e + edge(torch.cat([e, h[a], h[b]], 1))
            h = h + node(torch.cat([h, _summed(e, a, h.shape[0])], 1))
        return F.mse_loss(self.head(h).float(), y)


def mesh_graph(micro_batch: int, nodes: int = 2000, dim: int = 128, layers: int = 6) -> Built:
    nodes = nodes * micro_batch
    return _Mesh(dim, layers), {
        "x": torch.randn(nodes, 12),
        "links": torch.randn(6 * nodes, 7),
        "edges": _edges(nodes, 6),
        "y": torch.randn(nodes, 3),
    }


class _Light(nn.Module):
    """Users and items, smoothed over their graph, ranked in pairs."""

    def __init__(self, nodes: int, dim: int, layers: int) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(nodes, dim), layers

    def forward(self, edges: Tensor, users: Tensor, good: Tensor, bad: Tensor) -> Tensor:
        x, (a, b) = self.table.weight, edges
        total = x
        for _ in range(self.layers):
            x = _summed(x[b], a, x.shape[0]) / 10
            total = total + x
        u, i, j = total[users], total[good], total[bad]
        return F.softplus((u * j).sum(1) - (u * i).sum(1)).mean()


def light_graph(micro_batch: int, nodes: int = 100_000, dim: int = 64, layers: int = 3) -> Built:
    ids = {name: torch.randint(nodes, (micro_batch,)) for name in ("users", "good", "bad")}
    return _Light(nodes, dim, layers), {"edges": _edges(nodes, 20), **ids}


class _Pooled(nn.Module):
    """Graphs as dense matrices; the nodes with the highest score stay."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.convs, self.scores = (
            nn.Linear(32, dim),
            nn.ModuleList(nn.Linear(dim, dim) for _ in range(3)),
            nn.ModuleList(nn.Linear(dim, 1) for _ in range(3)),
        )
        self.head = nn.Linear(2 * dim, 10)

    def forward(self, x: Tensor, links: Tensor, y: Tensor) -> Tensor:
        x, total = torch.relu(self.first(x)), 0.0
        for conv, score in zip(self.convs, self.scores, strict=True):
            x = torch.relu(conv(links @ x / links.shape[1]))
            kept, where = score(x).squeeze(2).topk(x.shape[1] // 2, dim=1)
            x = torch.gather(x, 1, where.unsqueeze(2).expand(-1, -1, x.shape[2])) * torch.tanh(kept).unsqueeze(2)
            links = torch.gather(links, 1, where.unsqueeze(2).expand(-1, -1, links.shape[2]))
            links = torch.gather(links, 2, where.unsqueeze(1).expand(-1, where.shape[1], -1))
            total = total + torch.cat([x.mean(1), x.amax(1)], 1)
        return F.cross_entropy(self.head(total).float(), y)


def pooled_graph(micro_batch: int, seq: int = 128, dim: int = 128) -> Built:
    batch = labelled(torch.randn(micro_batch, seq, 32), 10)
    return _Pooled(dim), {**batch, "links": (torch.rand(micro_batch, seq, seq) < 0.1).float()}


# ---------------------------------------------------------------------- comparisons and retrieval


class _Triplets(nn.Module):
    """The hardest positive and negative of every sample in a batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, width),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = F.normalize(self.net(x).float(), dim=1)
        apart = torch.cdist(found, found)
        same = y.unsqueeze(0) == y.unsqueeze(1)
        return F.relu(apart.masked_fill(~same, 0).amax(1) - apart.masked_fill(same, 9).amin(1) + 0.2).mean()


def triplet_mining(micro_batch: int, image: int = 64, width: int = 128) -> Built:
    return _Triplets(width), labelled(torch.randn(micro_batch, 3, image, image), 16)


class _Twins(nn.Module):
    """Two views, one loss over their correlations or over all pairs."""

    def __init__(self, width: int, pairs: bool) -> None:
        super().__init__()
        self.net, self.pairs = (
            nn.Sequential(mlp(768, 2048, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, width)),
            pairs,
        )

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        a, b = self.net(x).float(), self.net(z).float()
        if self.pairs:
            both = F.normalize(torch.cat([a, b]), dim=1)
            near = both @ both.T / 0.1
            near = near - 1e9 * torch.eye(near.shape[0], device=near.device)
            n = x.shape[0]
            goal = torch.cat([torch.arange(n, 2 * n, device=x.device), torch.arange(n, device=x.device)])
            return F.cross_entropy(near, goal)
        a, b = ((one - one.mean(0)) / (one.std(0) + 1e-5) for one in (a, b))
        cross = a.T @ b / x.shape[0]
        return (torch.diagonal(cross) - 1).pow(2).sum() + 5e-3 * (
            cross.pow(2).sum() - torch.diagonal(cross).pow(2).sum()
        )


def barlow_twins(micro_batch: int, width: int = 2048) -> Built:
    return _Twins(width, False), {"x": torch.randn(micro_batch, 768), "z": torch.randn(micro_batch, 768)}


def contrastive_pairs(micro_batch: int, width: int = 256) -> Built:
    return _Twins(width, True), {"x": torch.randn(micro_batch, 768), "z": torch.randn(micro_batch, 768)}


class _Neighbours(nn.Module):
    """A classifier over the nearest entries of a large memory."""

    def __init__(self, entries: int, dim: int, near: int) -> None:
        super().__init__()
        self.net, self.near = mlp(256, 512, dim), near
        self.register_buffer("keys", torch.randn(entries, dim))
        self.values = nn.Embedding(entries, 64)
        self.head = nn.Linear(64, 100)

    def forward(self, x: Tensor) -> Tensor:
        query = self.net(x).float()
        near, where = torch.cdist(query, self.keys.float()).topk(self.near, dim=1, largest=False)
        return self.head((torch.softmax(-near, 1).unsqueeze(2) * self.values(where)).sum(1))


def neighbour_memory(micro_batch: int, entries: int = 50_000, dim: int = 64, near: int = 32) -> Built:
    return WithLoss(_Neighbours(entries, dim, near)), labelled(torch.randn(micro_batch, 256), 100)


# ---------------------------------------------------------------------- tables


class _Bags(nn.Module):
    """Bags of ids in several tables, summed or averaged."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum" if n % 2 else "mean") for n in range(tables))
        self.dense, self.tower = mlp(13, 256, dim), mlp((tables + 1) * dim, 512, 256, 1)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        parts = [self.dense(x), *(bag(ids[n]) for n, bag in enumerate(self.bags))]
        return F.binary_cross_entropy_with_logits(self.tower(torch.cat(parts, 1)).float().flatten(), y.float())


def embedding_bags(micro_batch: int, tables: int = 8, rows: int = 200_000, dim: int = 64, most: int = 20) -> Built:
    ids = torch.randint(rows, (tables, micro_batch, most))
    return _Bags(tables, rows, dim), {"x": torch.randn(micro_batch, 13), "ids": ids, "y": torch.rand(micro_batch)}


class _Towers(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.users, self.items = (nn.EmbeddingBag(rows, dim, mode="mean") for _ in range(2))
        self.left, self.right = mlp(dim, 512, 128), mlp(dim, 512, 128)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        a, b = F.normalize(self.left(self.users(users)), dim=1), F.normalize(self.right(self.items(items)), dim=1)
        return F.cross_entropy((a @ b.T).float() / 0.05, torch.arange(a.shape[0], device=a.device))


def two_towers(micro_batch: int, rows: int = 500_000, dim: int = 64, most: int = 30) -> Built:
    return _Towers(rows, dim), {
        "users": torch.randint(rows, (micro_batch, most)),
        "items": torch.randint(rows, (micro_batch, most // 3)),
    }


class _History(nn.Module):
    """What a user did before is weighed by the candidate, as in DIN."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.items, self.look, self.tower = (
            nn.Embedding(rows, dim),
            mlp(4 * dim, 80, 40, 1, act=nn.PReLU),
            mlp(2 * dim, 200, 80, 1, act=nn.PReLU),
        )

    def forward(self, past: Tensor, item: Tensor, y: Tensor) -> Tensor:
        past, item = self.items(past), self.items(item)
        wide = item.unsqueeze(1).expand_as(past)
        share = self.look(torch.cat([past, wide, past - wide, past * wide], -1))
        return F.binary_cross_entropy_with_logits(
            self.tower(torch.cat([(share * past).sum(1), item], 1)).float().flatten(), y.float()
        )


def user_history(micro_batch: int, seq: int = 50, rows: int = 300_000, dim: int = 48) -> Built:
    return _History(rows, dim), {
        "past": torch.randint(rows, (micro_batch, seq)),
        "item": torch.randint(rows, (micro_batch,)),
        "y": torch.rand(micro_batch),
    }


class _Sequential(nn.Module):
    """The next item of a history against drawn ones."""

    def __init__(self, rows: int, dim: int, seq: int, layers: int) -> None:
        super().__init__()
        self.items, self.place = nn.Embedding(rows, dim), nn.Parameter(torch.zeros(seq, dim))
        self.norms, self.attend = (
            nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers)),
            nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(layers)),
        )
        self.feeds = nn.ModuleList(feed(dim, 2) for _ in range(layers))

    def forward(self, past: Tensor, good: Tensor, bad: Tensor) -> Tensor:
        x = self.items(past) + self.place
        for norm, attend, each in zip(self.norms, self.attend, self.feeds, strict=True):
            q, k, v = (part.unsqueeze(1) for part in attend(norm(x)).chunk(3, -1))
            x = each(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        a = (x * self.items(good)).sum(-1).float()
        b = torch.einsum("btd,btnd->btn", x, self.items(bad).to(x.dtype)).float()
        return (F.softplus(-a) + F.softplus(b).mean(-1)).mean()


def next_item(micro_batch: int, seq: int = 100, rows: int = 100_000, dim: int = 64, layers: int = 3) -> Built:
    batch = {
        "past": torch.randint(rows, (micro_batch, seq)),
        "good": torch.randint(rows, (micro_batch, seq)),
        "bad": torch.randint(rows, (micro_batch, seq, 8)),
    }
    return _Sequential(rows, dim, seq, layers), batch


class _Crossed(nn.Module):
    def __init__(self, fields: int, dim: int, layers: int) -> None:
        super().__init__()
        self.table, wide = nn.Embedding(400_000, dim), fields * dim
        self.low, self.high = (
            nn.ModuleList(nn.Linear(a, b) for _ in range(layers)) for a, b in ((wide, 128), (128, wide))
        )
        self.deep, self.head = mlp(wide, 768, 768), nn.Linear(wide + 768, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.table(x).flatten(1)
        for low, high in zip(self.low, self.high, strict=True):
            x = x + first * high(low(x))
        return self.head(torch.cat([x, self.deep(first)], 1))


def deep_and_cross(micro_batch: int, fields: int = 26, dim: int = 32, layers: int = 3) -> Built:
    return WithLoss(_Crossed(fields, dim, layers), "yes or no"), {
        "x": torch.randint(400_000, (micro_batch, fields)),
        "y": torch.rand(micro_batch),
    }


class _Triples(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.things, self.links = nn.Embedding(rows, dim), nn.Embedding(500, dim)

    def forward(self, head: Tensor, link: Tensor, tail: Tensor, wrong: Tensor) -> Tensor:
        start = self.things(head) + self.links(link)
        good = (start - self.things(tail)).norm(dim=-1)
        bad = (start.unsqueeze(1) - self.things(wrong)).norm(dim=-1)
        return F.relu(1 + good.unsqueeze(1) - bad).float().mean()


def knowledge_graph(micro_batch: int, rows: int = 200_000, dim: int = 128, wrong: int = 32) -> Built:
    ids = {name: torch.randint(rows, (micro_batch,)) for name in ("head", "tail")}
    return _Triples(rows, dim), {
        **ids,
        "link": torch.randint(500, (micro_batch,)),
        "wrong": torch.randint(rows, (micro_batch, wrong)),
    }


class _Skip(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.into, self.out = nn.Embedding(rows, dim), nn.Embedding(rows, dim)

    def forward(self, word: Tensor, near: Tensor, far: Tensor) -> Tensor:
        x = self.into(word).unsqueeze(2)
        return (
            F.softplus(-torch.bmm(self.out(near), x)).mean() + F.softplus(torch.bmm(self.out(far), x)).mean()
        ).float()


def skip_gram(micro_batch: int, rows: int = 300_000, dim: int = 128) -> Built:
    return _Skip(rows, dim), {
        "word": torch.randint(rows, (micro_batch,)),
        "near": torch.randint(rows, (micro_batch, 8)),
        "far": torch.randint(rows, (micro_batch, 40)),
    }
