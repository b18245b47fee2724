"""NeuroBack (Wang et al., 2024, "NeuroBack: Improving CDCL SAT Solving using Graph Neural Networks").

A formula in conjunctive normal form as a graph: a node for each variable and clause, an edge for each literal, of one kind
if it is negated and another if not, and a meta node joined to all clauses by a third kind, which keeps every path short.
The network predicts once, before the solver starts, which phase a variable has in the backbone (its value in all
solutions); the solver then tries that value first.

    gin    message passing with an MLP for each kind of edge
    graph  attention over the edges of each kind (GATv2), several heads
    local  attention inside a node, among patches of its features

None looks at all pairs of nodes: work and memory are linear in nodes and edges, as graphs of a million nodes need. Kept:
those blocks (4, 3 and 3 of them, width 48, 8 heads, patches of 16, as in the published code; how many of each is from
memory), the loss on backbone variables alone. The MLP of a message depends on its source only, so it is applied once to
a node and not to every edge: the same numbers. What the last two attentions over meta edges learn reaches no variable any
more (their gradients are zero, in the paper too). Left out: dropout, the solver; formulas are random with three literals a
clause, half of them negated, all of one size in a batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RELATIONS = ("negative", "meta", "positive")
BACKBONE_SHARE = 4
"""Every fourth variable is in the backbone: the paper finds 27 % on average."""


def mlp(width_in: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width_in, width), nn.GELU(), nn.Linear(width, width), nn.GELU())


class RelationalGIN(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width_in) if width_in > 1 else nn.Identity()
        self.messages = nn.ModuleDict({name: mlp(width_in, width) for name in RELATIONS})
        self.scale = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in RELATIONS})

    def forward(self, x: Tensor, edges: dict[str, Tensor]) -> Tensor:
        inside, total = self.norm(x), x
        for name, message in self.messages.items():
            source, target = edges[name]
            sent = message(inside) * (1 + self.scale[name])
            total = total + torch.zeros_like(sent).index_add_(0, target, sent.index_select(0, source))
        return total


class EdgeAttention(nn.Module):
    """Of each node over the edges of one kind that come in: scores, a softmax of segments, a weighted sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.key, self.query = nn.Linear(width, width), nn.Linear(width, width)
        self.score = nn.Parameter(torch.randn(heads, width // heads) * width**-0.5)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        sent = self.key(x).index_select(0, source).unflatten(-1, (self.heads, -1))
        asked = self.query(x).index_select(0, target).unflatten(-1, (self.heads, -1))
        scores = (F.leaky_relu(sent + asked, 0.2) * self.score).sum(dim=-1).float()
        highest = scores.new_full((x.shape[0], self.heads), float("-inf"))
        where = target[:, None].expand_as(scores)
        highest = highest.scatter_reduce_(0, where, scores.detach(), "amax")
        shares = (scores - highest.index_select(0, target)).exp()
        total = torch.zeros_like(highest).index_add_(0, target, shares)
        shares = shares / total.index_select(0, target)
        weighted = (sent * shares[..., None].to(sent.dtype)).flatten(1)
        return torch.zeros(x.shape, dtype=weighted.dtype, device=x.device).index_add_(0, target, weighted)


class GraphAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.ModuleDict({name: EdgeAttention(width, heads) for name in RELATIONS})
        self.mlp = mlp(width, width)

    def forward(self, x: Tensor, edges: dict[str, Tensor]) -> Tensor:
        inside = self.norm(x)
        found = [attention(inside, *edges[name]) for name, attention in self.attention.items()]
        return x + sum(found[1:], found[0]) + self.mlp(inside)


class LocalAttention(nn.Module):
    """Patches of a node's features attend to one another."""

    def __init__(self, width: int, heads: int, patch: int) -> None:
        super().__init__()
        self.heads, self.patch = heads, patch
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(patch, 3 * patch), nn.Linear(patch, patch)
        self.mlp = mlp(width, width)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm(x)
        patches = inside.unflatten(-1, (-1, self.patch))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(patches).chunk(3, dim=-1))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(seen).flatten(1) + self.mlp(inside)


class NeuroBack(nn.Module):
    def __init__(
        self, variables: int, clauses: int, width: int, heads: int, patch: int, gin: int, graph: int, local: int
    ) -> None:
        super().__init__()
        if width % patch or width % heads or patch % heads:
            raise ValueError(f"width {width} must be whole patches of {patch} and heads, {heads}, must share both")
        self.variables, self.clauses = variables, clauses
        self.gin = nn.ModuleList(RelationalGIN(width if index else 1, width) for index in range(gin))
        self.graph = nn.ModuleList(GraphAttention(width, heads) for _ in range(graph))
        self.local = nn.ModuleList(LocalAttention(width, heads, patch) for _ in range(local))
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, width // 4), nn.GELU())
        self.phase = nn.Linear(width // 4, 1)

    def forward(self, kind: Tensor, negative: Tensor, meta: Tensor, positive: Tensor) -> Tensor:
        """Kinds of all nodes, (formulas, nodes, 1), and three lists of edges to a logit of each variable's phase."""
        edges = {"negative": negative, "meta": meta, "positive": positive}
        x = kind.flatten(0, 1)
        for block in self.gin:
            x = block(x, edges)
        for block in self.graph:
            x = block(x, edges)
        for block in self.local:
            x = block(x)
        of_variables = x.view(kind.shape[0], kind.shape[1], -1)[:, : self.variables]
        return self.phase(self.head(of_variables)).squeeze(-1)


def build(
    *, variables: int = 200_000, clauses: int = 800_000, width: int = 48, heads: int = 8, patch: int = 16, gin: int = 4,
    graph: int = 3, local: int = 3,
) -> nn.Module:  # fmt: skip
    return NeuroBack(variables, clauses, width, heads, patch, gin, graph, local)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Nodes of a formula: its variables, its clauses, the meta node. Edges go both ways; every second literal is negated."""
    variables, clauses = model.variables, model.clauses
    nodes = variables + clauses + 1
    first = torch.arange(micro_batch)[:, None] * nodes
    clause = torch.arange(3 * clauses) // 3 + variables
    literals = torch.stack([torch.randint(variables, (micro_batch, 3 * clauses)) + first, (clause + first)])
    to_meta = torch.stack([torch.arange(variables, nodes - 1) + first, (nodes - 1 + first).expand(-1, clauses)])
    lists = {"negative": literals[:, :, ::2], "meta": to_meta, "positive": literals[:, :, 1::2]}
    kind = torch.cat([torch.ones(variables), torch.zeros(clauses), -torch.ones(1)])
    return {
        "kind": kind.expand(micro_batch, -1)[..., None].contiguous(),
        **{name: torch.cat([one.flatten(1), one.flip(0).flatten(1)], dim=1) for name, one in lists.items()},
        "backbone": (torch.arange(variables) % BACKBONE_SHARE == 0).expand(micro_batch, -1).contiguous(),
        "targets": torch.randint(2, (micro_batch, variables)).float(),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the phases of backbone variables."""
    each = F.binary_cross_entropy_with_logits(output.float(), batch["targets"], reduction="none")
    known = batch["backbone"].float()
    return (each * known).sum() / known.sum()


def phase_lines(logits: Tensor) -> list[str]:
    """The predicted phases of one formula as literals, a line each: what a solver reads as first values."""
    return [f"{number if likely else -number}" for number, likely in enumerate((logits > 0).tolist(), start=1)]
