"""Models of the corpus that are loops of small ops, driven by the host: what benchmarks/corpus.py draws besides libraries' models.

Every function returns a model and one batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from model_parts import Built, WithLoss, feed, labelled, mlp, tokens
from torch import Tensor, nn

# ---------------------------------------------------------------------- loops that the host drives


class _Cell(nn.Module):
    """An LSTM whose every gate is written out."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.embed, self.into, self.again, self.head = (
            nn.Embedding(vocab, dim),
            nn.Linear(dim, 4 * dim),
            nn.Linear(dim, 4 * dim),
            nn.Linear(dim, vocab),
        )

    def forward(self, x: Tensor) -> Tensor:
        given = self.into(self.embed(x))
        h = c = torch.zeros_like(given[:, 0, : given.shape[-1] // 4])
        found = []
        for t in range(x.shape[1]):
            i, f, g, o = (given[:, t] + self.again(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            found.append(h)
        return self.head(torch.stack(found, 1))


def python_lstm(micro_batch: int, seq: int = 32, dim: int = 256) -> Built:
    return WithLoss(_Cell(dim, 5000)), tokens(5000, micro_batch, seq)


class _Independent(nn.Module):
    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(40, dim), nn.Linear(dim, 12)
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(dim)) for _ in range(layers))
        self.mixes = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for weight, mix in zip(self.weights, self.mixes, strict=True):
            state, found = torch.zeros_like(x[:, 0]), []
            for part in x.unbind(1):
                state = torch.relu(part + weight * state)
                found.append(state)
            x = x + mix(torch.stack(found, 1))
        return self.head(x[:, -1])


def independent_rnn(micro_batch: int, seq: int = 48, dim: int = 256, layers: int = 3) -> Built:
    return WithLoss(_Independent(dim, layers)), labelled(torch.randn(micro_batch, seq, 40), 12)


class _Sampler(nn.Module):
    """A short chain of denoising steps whose end is what the loss sees."""

    def __init__(self, dim: int, width: int, steps: int) -> None:
        super().__init__()
        self.net, self.time, self.steps = (
            mlp(dim + 64, width, width, width, dim, act=nn.SiLU),
            nn.Embedding(steps, 64),
            steps,
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for t in reversed(range(self.steps)):
            when = self.time.weight[t].expand(x.shape[0], -1)
            noise = self.net(torch.cat([x, when], 1)).float()
            alpha = 1 - 0.5 * (t + 1) / self.steps
            x = (x - (1 - alpha) * noise) / alpha**0.5 + 0.01 * torch.randn_like(x)
        return F.mse_loss(x, y)


def diffusion_sampler(micro_batch: int, dim: int = 128, width: int = 512, steps: int = 16) -> Built:
    return _Sampler(dim, width, steps), {"x": torch.randn(micro_batch, dim), "y": torch.randn(micro_batch, dim)}


class _Ode(nn.Module):
    """A field that is followed by Runge-Kutta steps of fixed length."""

    def __init__(self, dim: int, width: int, steps: int) -> None:
        super().__init__()
        self.first, self.field, self.head, self.steps = (
            nn.Linear(64, dim),
            mlp(dim, width, width, dim, act=nn.Tanh),
            nn.Linear(dim, 10),
            steps,
        )

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.first(x), 1.0 / self.steps
        for _ in range(self.steps):
            a = self.field(x)
            b = self.field(x + 0.5 * h * a)
            c = self.field(x + 0.5 * h * b)
            d = self.field(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return self.head(x)


def neural_ode(micro_batch: int, dim: int = 256, width: int = 512, steps: int = 10) -> Built:
    return WithLoss(_Ode(dim, width, steps)), labelled(torch.randn(micro_batch, 64), 10)


class _Equilibrium(nn.Module):
    """The fixed point is found without gradients, one more step is differentiated."""

    def __init__(self, channels: int, rounds: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, 2, 1)
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.norm, self.head, self.rounds = nn.GroupNorm(8, channels), nn.Linear(channels, 10), rounds

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(self.norm(z + x + self.body(z)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(self.rounds):
                new = self.step(z, x)
                z = z + 0.8 * (new - z)
        return self.head(self.step(z, x).mean((2, 3)))


def equilibrium(micro_batch: int, image: int = 64, channels: int = 64, rounds: int = 20) -> Built:
    return WithLoss(_Equilibrium(channels, rounds)), labelled(torch.randn(micro_batch, 3, image, image), 10)


class _Sinkhorn(nn.Module):
    """Two clouds of points, embedded and moved onto each other."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.net, self.rounds = mlp(16, width, width, 64), rounds

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(self.net(x).float(), self.net(y).float())
        f, g = torch.zeros_like(cost[..., 0]), torch.zeros_like(cost[:, 0])
        for _ in range(self.rounds):
            f = -0.1 * torch.logsumexp((g.unsqueeze(1) - cost) / 0.1, 2)
            g = -0.1 * torch.logsumexp((f.unsqueeze(2) - cost) / 0.1, 1)
        return (torch.exp((f.unsqueeze(2) + g.unsqueeze(1) - cost) / 0.1) * cost).sum((1, 2)).mean()


def sinkhorn(micro_batch: int, seq: int = 256, width: int = 256, rounds: int = 20) -> Built:
    return _Sinkhorn(width, rounds), {"x": torch.randn(micro_batch, seq, 16), "y": torch.randn(micro_batch, seq, 16)}


class _Crf(nn.Module):
    """A tagger whose loss sums over all paths, word by word."""

    def __init__(self, dim: int, tags: int) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = (
            nn.Embedding(20_000, dim),
            nn.LSTM(dim, dim, batch_first=True, bidirectional=True),
            nn.Linear(2 * dim, tags),
        )
        self.moves = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.head(self.lstm(self.embed(x))[0]).float()
        total = scores[:, 0]
        for t in range(1, x.shape[1]):
            total = torch.logsumexp(total.unsqueeze(2) + self.moves, 1) + scores[:, t]
        path = scores.gather(2, y.unsqueeze(2)).sum((1, 2)) + self.moves[y[:, :-1], y[:, 1:]].sum(1)
        return (torch.logsumexp(total, 1) - path).mean()


def chain_crf(micro_batch: int, seq: int = 48, dim: int = 256, tags: int = 20) -> Built:
    return _Crf(dim, tags), {
        "x": torch.randint(20_000, (micro_batch, seq)),
        "y": torch.randint(tags, (micro_batch, seq)),
    }


class _Turing(nn.Module):
    """A controller that reads and writes a memory by content."""

    def __init__(self, dim: int, slots: int) -> None:
        super().__init__()
        self.cell, self.slots = nn.GRUCell(32 + dim, 2 * dim), slots
        self.key, self.erase, self.add, self.head = (nn.Linear(2 * dim, size) for size in (dim, dim, dim, 32))
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.full((x.shape[0], self.slots, self.dim), 1e-2, device=x.device)
        state, read, found = torch.zeros(x.shape[0], 2 * self.dim, device=x.device), memory[:, 0], []
        for part in x.unbind(1):
            state = self.cell(torch.cat([part, read], 1), state).float()
            near = F.cosine_similarity(memory, self.key(state).float().unsqueeze(1), dim=2)
            share = torch.softmax(5 * near, 1).unsqueeze(2)
            memory = memory * (1 - share * torch.sigmoid(self.erase(state)).unsqueeze(1)) + share * self.add(
                state
            ).unsqueeze(1)
            read = (share * memory).sum(1)
            found.append(self.head(state))
        return torch.stack(found, 1)


def turing_machine(micro_batch: int, seq: int = 24, dim: int = 64, slots: int = 128) -> Built:
    return WithLoss(_Turing(dim, slots), "numbers"), {
        "x": torch.randn(micro_batch, seq, 32),
        "y": torch.randn(micro_batch, seq, 32),
    }


class _Springs(nn.Module):
    """Masses on springs of learned stiffness, followed by small steps."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        self.force, self.steps = mlp(7, width, width, 3, act=nn.Tanh), steps

    def forward(self, x: Tensor, v: Tensor, y: Tensor) -> Tensor:
        for _ in range(self.steps):
            apart = x.unsqueeze(2) - x.unsqueeze(1)
            far = (apart**2).sum(-1, keepdim=True).add(1e-3).sqrt()
            push = (apart / far**2).sum(2) - 0.1 * x
            v = v + 0.01 * (push + self.force(torch.cat([x, v, (v * v).sum(-1, keepdim=True)], -1)).float())
            x = x + 0.01 * v
        return F.mse_loss(x, y)


def spring_simulation(micro_batch: int, seq: int = 32, width: int = 128, steps: int = 20) -> Built:
    return _Springs(width, steps), {name: torch.randn(micro_batch, seq, 3) for name in "xvy"}


class _Kalman(nn.Module):
    """Filters whose noise is learned: products and solutions of small matrices, step by step."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.move, self.see = nn.Parameter(torch.eye(dim)), nn.Linear(16, dim)
        self.noise = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        seen, dim = self.see(x).float(), self.move.shape[0]
        one = torch.eye(dim, device=x.device).expand(x.shape[0], dim, dim)
        state, spread, loss = torch.zeros_like(seen[:, 0]), one, x.new_zeros((), dtype=torch.float32)
        for part in seen.unbind(1):
            state = state @ self.move.T
            spread = self.move @ spread @ self.move.T + 0.1 * one
            gain = torch.linalg.solve(spread + torch.diag_embed(F.softplus(self.noise)), spread)
            off = part - state
            state = state + torch.einsum("bij,bj->bi", gain, off)
            spread = spread - gain @ spread
            loss = loss + (off**2).mean()
        return loss


def kalman_filter(micro_batch: int, seq: int = 16, dim: int = 16) -> Built:
    return _Kalman(dim), {"x": torch.randn(micro_batch, seq, 16)}


class _Spelled(nn.Module):
    """Encoder and decoder of GRU cells; the decoder looks at the source with a small network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(8000, dim), nn.Embedding(8000, dim)
        self.encode, self.cell = nn.GRU(dim, dim, batch_first=True), nn.GRUCell(2 * dim, dim)
        self.key, self.query, self.score, self.head = (
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, 1),
            nn.Linear(2 * dim, 8000),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, last = self.encode(self.source(x))
        keys, state, found = self.key(memory), last[0], []
        for word in self.target(y).unbind(1):
            share = torch.softmax(self.score(torch.tanh(keys + self.query(state).unsqueeze(1))), 1)
            context = (share * memory).sum(1)
            state = self.cell(torch.cat([word, context.to(word.dtype)], 1), state.to(word.dtype))
            found.append(torch.cat([state, context.to(state.dtype)], 1))
        return F.cross_entropy(self.head(torch.stack(found[:-1], 1)).float().flatten(0, 1), y[:, 1:].flatten())


def attention_seq2seq(micro_batch: int, seq: int = 24, dim: int = 256) -> Built:
    return _Spelled(dim), tokens(8000, micro_batch, seq)


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return given / (1 + 10 * x.abs()) ** 2


class _Spiking(nn.Module):
    def __init__(self, channels: int, steps: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.head, self.steps = nn.Linear(2 * channels, 10), steps

    def forward(self, x: Tensor) -> Tensor:
        given = self.first(x)
        a, b, total = torch.zeros_like(given), 0.0, 0.0
        for _ in range(self.steps):
            a = 0.9 * a + given
            spikes = _Spike.apply(a - 1)
            a = a - spikes
            b = 0.9 * b + self.second(F.avg_pool2d(spikes, 2))
            out = _Spike.apply(b - 1)
            b = b - out
            total = total + out.mean((2, 3))
        return self.head(total / self.steps)


def spiking_net(micro_batch: int, image: int = 32, channels: int = 64, steps: int = 8) -> Built:
    return WithLoss(_Spiking(channels, steps)), labelled(torch.rand(micro_batch, 3, image, image), 10)


class _Lista(nn.Module):
    def __init__(self, dim: int, code: int, rounds: int) -> None:
        super().__init__()
        self.into, self.again = (
            nn.Linear(dim, code, bias=False),
            nn.ModuleList(nn.Linear(code, code, bias=False) for _ in range(rounds)),
        )
        self.limit, self.back = nn.Parameter(torch.full((rounds, code), 0.1)), nn.Linear(code, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given = self.into(x)
        code = given
        for limit, again in zip(self.limit, self.again, strict=True):
            code = given + again(code)
            code = torch.sign(code) * torch.relu(code.abs() - limit)
        return self.back(code)


def sparse_coding(micro_batch: int, dim: int = 256, code: int = 1024, rounds: int = 12) -> Built:
    given = torch.randn(micro_batch, dim)
    return WithLoss(_Lista(dim, code, rounds), "numbers"), {"x": given, "y": torch.randn(micro_batch, dim)}


class _World(nn.Module):
    """A latent state that is drawn at every step from what is seen, and from what was expected."""

    def __init__(self, dim: int, latent: int) -> None:
        super().__init__()
        self.see, self.cell = mlp(64, dim, dim, act=nn.ELU), nn.GRUCell(latent + 6, dim)
        self.prior, self.post, self.back = (
            mlp(dim, dim, 2 * latent, act=nn.ELU),
            mlp(2 * dim, dim, 2 * latent, act=nn.ELU),
            mlp(dim + latent, dim, 64, act=nn.ELU),
        )
        self.dim, self.latent = dim, latent

    def forward(self, x: Tensor, act: Tensor) -> Tensor:
        seen = self.see(x)
        state, drawn = torch.zeros_like(seen[:, 0]), torch.zeros_like(seen[:, 0, : self.latent])
        apart, found = x.new_zeros((), dtype=torch.float32), []
        for t in range(x.shape[1]):
            state = self.cell(torch.cat([drawn.to(act.dtype), act[:, t]], 1), state.to(act.dtype))
            a, b = self.prior(state).float().chunk(2, 1)
            c, d = self.post(torch.cat([state, seen[:, t].to(state.dtype)], 1)).float().chunk(2, 1)
            sa, sd = F.softplus(b) + 0.1, F.softplus(d) + 0.1
            drawn = c + sd * torch.randn_like(c)
            apart = apart + (torch.log(sa / sd) + (sd**2 + (c - a) ** 2) / (2 * sa**2)).sum(1).mean()
            found.append(torch.cat([state.float(), drawn], 1))
        return F.mse_loss(self.back(torch.stack(found, 1)).float(), x) + 0.1 * apart


def world_model(micro_batch: int, seq: int = 16, dim: int = 256, latent: int = 32) -> Built:
    return _World(dim, latent), {"x": torch.randn(micro_batch, seq, 64), "act": torch.randn(micro_batch, seq, 6)}


class _Maml(nn.Module):
    """Inner steps of gradient descent, written by hand and differentiated through."""

    def __init__(self, width: int, steps: int) -> None:
        super().__init__()
        sizes = ((width, 32), (width, width), (1, width))
        self.weights = nn.ParameterList(nn.Parameter(0.05 * torch.randn(size)) for size in sizes)
        self.steps = steps

    @staticmethod
    def run(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights[:-1]:
            x = torch.tanh(F.linear(x, weight))
        return F.linear(x, weights[-1])

    def forward(self, x: Tensor, y: Tensor, more: Tensor, goal: Tensor) -> Tensor:
        fast: list[Tensor] = list(self.weights)
        for _ in range(self.steps):
            loss = F.mse_loss(self.run(x, fast).float(), y)
            slopes = torch.autograd.grad(loss, fast, create_graph=True)
            fast = [weight - 0.01 * slope for weight, slope in zip(fast, slopes, strict=True)]
        return F.mse_loss(self.run(more, fast).float(), goal)


def maml(micro_batch: int, width: int = 256, steps: int = 5) -> Built:
    batch = {
        "x": torch.randn(micro_batch, 32),
        "y": torch.randn(micro_batch, 1),
        "more": torch.randn(micro_batch, 32),
        "goal": torch.randn(micro_batch, 1),
    }
    return _Maml(width, steps), batch


class _Adam(nn.Module):
    """The loss holds Adam's own steps on a small problem, element by element."""

    def __init__(self, dim: int, steps: int) -> None:
        super().__init__()
        self.start, self.rates, self.steps = (
            nn.Parameter(torch.zeros(dim)),
            nn.Parameter(torch.full((dim,), -2.0)),
            steps,
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.start.expand(x.shape[0], -1)
        m, v, rate = torch.zeros_like(found), torch.zeros_like(found), torch.exp(self.rates)
        for t in range(1, self.steps + 1):
            off = (x * found).sum(1, keepdim=True) - y
            slope = off * x
            m, v = 0.9 * m + 0.1 * slope, 0.99 * v + 0.01 * slope**2
            found = found - rate * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
        return ((x * found).sum(1, keepdim=True) - y).pow(2).mean()


def adam_inside(micro_batch: int, dim: int = 256, steps: int = 30) -> Built:
    return _Adam(dim, steps), {"x": torch.randn(micro_batch, dim), "y": torch.randn(micro_batch, 1)}


class _Universal(nn.Module):
    """One block used again and again."""

    def __init__(self, dim: int, rounds: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(dim), nn.MultiheadAttention(dim, dim // 64, batch_first=True)
        self.feed, self.rounds, self.place = feed(dim), rounds, nn.Parameter(torch.zeros(rounds, dim))
        self.embed, self.head = nn.Embedding(8000, dim), nn.Linear(dim, 8000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for place in self.place:
            h = self.norm(x + place)
            x = self.feed(x + self.attend(h, h, h, need_weights=False)[0])
        return self.head(x)


def universal_transformer(micro_batch: int, seq: int = 128, dim: int = 256, rounds: int = 12) -> Built:
    return WithLoss(_Universal(dim, rounds)), tokens(8000, micro_batch, seq)
