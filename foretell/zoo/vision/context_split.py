"""[Re] Don't Judge an Object by Its Context (Kim et al., 2021, a reproduction of Singh et al., 2020, "Don't Judge an Object
by Its Context: Learning to Overcome Contextual Bias").

A residual network tells which of many categories an image shows, some of which nearly always occur with another. Kept: two
remedies, config `method`:

- `split`: features are cut in half, one for objects, one for context. Images that show a biased category without its context
  ("exclusive") teach only the object half: their context features are replaced by the mean over the last `memory`
  micro-batches, and neither these nor the context half of the classifier get a gradient from them; their loss counts more.
- `cam`: class activation maps of a biased category and of its context must not overlap where both occur, and must stay near
  the maps of the classifier trained before, which is frozen beside it.

Which images are exclusive depends on the data. Here they are the first of the micro-batch, a share of `exclusive`: a sampler
that sorts by it, and a hint of how many there are. If all are, the context half has no gradient. The pairs of categories are
(i, pairs + i). Left out: the baselines of the report, and the search for biased pairs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision import resnet

METHODS = ("split", "cam")
MORE_WEIGHT = 3.0
"""Of the loss of an exclusive image."""


class Trunk(nn.Module):
    """The convolutions of a residual network: (b, 3, h, w) to (b, dim, h / 32, w / 32)."""

    def __init__(self, depths: tuple[int, int, int, int], width: int) -> None:
        super().__init__()
        self.net = resnet.ResNet(depths, width, 1)
        self.net.head = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        x = self.net.stem(images)
        for stage in (self.net.stage1, self.net.stage2, self.net.stage3, self.net.stage4):
            for block in stage:
                x = block(x)
        return x


class Split(nn.Module):
    """Object and context features apart; `exclusive` of a micro-batch do not teach the context half."""

    def __init__(self, depths: tuple[int, int, int, int], width: int, classes: int, exclusive: float, memory: int) -> None:
        super().__init__()
        self.classes, self.exclusive = classes, exclusive
        self.trunk = Trunk(depths, width)
        half = 8 * width * resnet.Bottleneck.expansion // 2
        self.head_object = nn.Linear(half, classes)
        self.head_context = nn.Linear(half, classes, bias=False)
        self.recent: Tensor
        self.register_buffer("recent", torch.zeros(memory, half))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        alone = int(self.exclusive * len(images))
        thing, context = self.trunk(images).mean(dim=(2, 3)).chunk(2, dim=1)
        logits = self.head_object(thing)
        usual = self.recent.mean(dim=0, keepdim=True)
        shared = F.linear(usual, self.head_context.weight.detach()).expand(alone, -1)
        if alone < len(images):
            shared = torch.cat([shared, self.head_context(context[alone:])])
        if self.training:
            with torch.no_grad():
                self.recent.copy_(torch.cat([self.recent[1:], context.mean(dim=0, keepdim=True)]))
        weight = torch.ones_like(logits[:, :1].detach())
        weight[:alone] = MORE_WEIGHT
        return {"logits": logits + shared, "weight": weight}


class Overlap(nn.Module):
    """Class activation maps of `pairs` biased categories and their contexts, now and of the frozen classifier before."""

    def __init__(self, depths: tuple[int, int, int, int], width: int, classes: int, pairs: int) -> None:
        super().__init__()
        self.classes, self.pairs = classes, pairs
        dim = 8 * width * resnet.Bottleneck.expansion
        self.trunk = Trunk(depths, width)
        self.head = nn.Linear(dim, classes)
        self.before_trunk = Trunk(depths, width)
        self.before_head = nn.Linear(dim, classes)
        self.before_trunk.requires_grad_(False)
        self.before_head.requires_grad_(False)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.trunk(images)
        with torch.no_grad():
            before = self._maps(self.before_trunk(images), self.before_head)
        return {"logits": self.head(features.mean(dim=(2, 3))), "maps": self._maps(features, self.head), "before": before}

    def _maps(self, features: Tensor, head: nn.Linear) -> Tensor:
        """(b, 2, pairs, h, w): of the biased categories and of their contexts, each at most one."""
        maps = F.relu(F.conv2d(features, head.weight[: 2 * self.pairs, :, None, None]))
        return (maps / (maps.amax(dim=(2, 3), keepdim=True) + 1e-6)).unflatten(1, (2, self.pairs))


def build(
    *, method: str = "split", depth1: int = 3, depth2: int = 4, depth3: int = 6, depth4: int = 3, width: int = 64,
    classes: int = 171, pairs: int = 20, exclusive: float = 0.5, memory: int = 10,
) -> nn.Module:  # fmt: skip
    if method not in METHODS:
        raise ValueError(f"no method '{method}': {', '.join(METHODS)}")
    if not 0.0 <= exclusive <= 1.0:
        raise ValueError(f"a share of {exclusive} images cannot be exclusive")
    if 2 * pairs > classes:
        raise ValueError(f"{pairs} pairs are more than {classes} categories make")
    depths = (depth1, depth2, depth3, depth4)
    return Split(depths, width, classes, exclusive, memory) if method == "split" else Overlap(depths, width, classes, pairs)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with any number of categories."""
    side = 224 if image is None else image
    return {
        "images": torch.randn(micro_batch, 3, side, side),
        "targets": (torch.rand(micro_batch, model.classes) < 0.3).float(),
    }


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Of all categories; with maps also their overlap where both occur, and how far they went from those before."""
    targets = batch["targets"]
    if "weight" in output:
        return F.binary_cross_entropy_with_logits(output["logits"], targets, output["weight"])
    maps, before = output["maps"], output["before"]
    pairs = maps.shape[2]
    both = (targets[:, :pairs] * targets[:, pairs : 2 * pairs])[..., None, None]
    overlap = (maps[:, 0] * maps[:, 1] * both).sum(dim=(2, 3)).mean()
    moved = ((maps - before).abs() * both[:, None]).sum(dim=(3, 4)).mean()
    return F.binary_cross_entropy_with_logits(output["logits"], targets) + 0.1 * overlap + 0.01 * moved
