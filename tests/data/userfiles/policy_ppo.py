"""PPO's update on a rollout collected by the policy itself."""
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal


class Agent(nn.Module):
    def __init__(self, obs=24, actions=6):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs, 256), nn.Tanh(), nn.Linear(256, actions))
        self.critic = nn.Sequential(nn.Linear(obs, 256), nn.Tanh(), nn.Linear(256, 1))
        self.log_std = nn.Parameter(torch.zeros(2))
        self.steer = nn.Linear(obs, 2)

    def forward(self, obs):
        dist = Categorical(logits=self.actor(obs))
        with torch.no_grad():
            action = dist.sample()
            old = dist.log_prob(action)
        turn = Normal(self.steer(obs), self.log_std.exp().expand(obs.size(0), 2))
        extra = turn.log_prob(turn.sample()).sum(-1)
        values = self.critic(obs).squeeze(-1)
        rewards = np.random.randn(obs.size(0)).astype(np.float32)
        advantages, last = torch.zeros_like(values), 0.0
        for t in reversed(range(obs.size(0))):
            following = values[t + 1].item() if t + 1 < obs.size(0) else 0.0
            last = float(rewards[t]) + 0.99 * following - values[t].item() + 0.95 * last
            advantages[t] = last
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratio = (dist.log_prob(action) - old).exp()
        kl = ((ratio - 1) - ratio.log()).mean()
        if kl > 0.02:
            print("early stop")
        policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        return policy + 0.5 * (values - (advantages + values).detach()).pow(2).mean() - 0.01 * dist.entropy().mean() - 1e-3 * extra.mean()


def build():
    return Agent()


def batch(micro_batch):
    return torch.randn(16 * micro_batch, 24)
