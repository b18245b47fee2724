"""kMaX-DeepLab (Yu et al., 2022, "k-means Mask Transformer", panoptic segmentation).

Kept: a residual encoder, a pixel decoder (axial attention at strides 32 and 16, bottlenecks at 8 and 4, skips from the encoder),
and decoder blocks in which `clusters` queries meet the pixels of strides 32, 16 and 8 in turn. Cross-attention is one step
of k-means: every pixel goes to the cluster that scores highest (an argmax, through which no gradient flows) and the cluster
takes up the sum of its pixels' values; self-attention and a feed-forward layer follow. Scores of every block are supervised.

Left out: Hungarian matching, replaced by a greedy one-to-one choice in tensor code, made once from the last scores; the
auxiliary semantic and instance discrimination losses; drop path. Images of 1280 instead of 1281 pixels, an even grid. The
widths of the pixel decoder are near the published ones, not equal. Objects beyond `objects` per image are not there: the
number is a bound on what an image holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision import resnet
from foretell.zoo.vision.vit import Attention, Mlp

STRIDES = (32, 16, 8)


class AxialBlock(nn.Module):
    """Self-attention along every column, then along every row, then a channel MLP, over a (b, dim, h, w) map."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.columns = Attention(dim, heads)
        self.rows = Attention(dim, heads)
        self.mlp = Mlp(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        b, dim, h, w = x.shape
        y = x.permute(0, 3, 2, 1).reshape(b * w, h, dim)
        y = y + self.columns(self.norm1(y))
        y = y.view(b, w, h, dim).transpose(1, 2).reshape(b * h, w, dim)
        y = y + self.rows(self.norm2(y))
        y = y + self.mlp(self.norm3(y))
        return y.view(b, h, w, dim).permute(0, 3, 1, 2)


class PixelDecoder(nn.Module):
    """From the coarsest map up: features of strides 32, 16, 8 and 4, each with the encoder's own added."""

    def __init__(self, channels: tuple[int, int, int, int], dim: int, heads: int, axial: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, dim, 1) for width in reversed(channels))
        self.coarse = AxialBlock(dim, heads)
        self.axial = nn.ModuleList(AxialBlock(dim, heads) for _ in range(axial))
        self.fine8 = resnet.Bottleneck(dim, dim // 4, 1)
        self.fine4 = resnet.Bottleneck(dim, dim // 4, 1)

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        at32, at16, at8, at4 = (conv(x) for conv, x in zip(self.lateral, reversed(maps), strict=True))
        x32 = self.coarse(at32)
        x16 = at16 + F.interpolate(x32, scale_factor=2.0, mode="bilinear")
        for block in self.axial:
            x16 = block(x16)
        x8 = self.fine8(at8 + F.interpolate(x16, scale_factor=2.0, mode="bilinear"))
        x4 = self.fine4(at4 + F.interpolate(x8, scale_factor=2.0, mode="bilinear"))
        return [x32, x16, x8], x4


def assign(scores: Tensor) -> Tensor:
    """One-hot choice of a cluster for every pixel of (b, clusters, pixels); no gradient flows through it."""
    with torch.no_grad():
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=1, keepdim=True), 1.0)


class KMeansBlock(nn.Module):
    """A step of k-means between clusters (b, k, dim) and pixels (b, dim, h, w), then self-attention and an MLP."""

    def __init__(self, dim: int, heads: int, classes: int) -> None:
        super().__init__()
        self.space = nn.Sequential(nn.Conv2d(dim, dim, 1, bias=False), nn.BatchNorm2d(dim))
        self.value = nn.Sequential(nn.Conv2d(dim, dim, 1, bias=False), nn.BatchNorm2d(dim))
        self.kernel = nn.Linear(dim, dim)
        self.classify = nn.Linear(dim, classes)
        self.update = nn.Linear(dim, dim)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, clusters: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The clusters moved, the scores of every pixel (b, k, h, w), and the classes of the clusters (b, k, classes)."""
        space = F.normalize(self.space(pixels).flatten(2), dim=1)
        scores = self.kernel(clusters) @ space
        moved = assign(scores) @ self.value(pixels).flatten(2).transpose(1, 2)
        classes = self.classify(clusters)
        clusters = self.norm1(clusters + self.update(moved))
        clusters = self.norm2(clusters + self.attn(clusters))
        return self.norm3(clusters + self.mlp(clusters)), scores.unflatten(2, pixels.shape[-2:]), classes


class KMaX(nn.Module):
    def __init__(
        self, depths: tuple[int, int, int, int], width: int, dim: int, heads: int, axial: int, per_stride: int,
        clusters: int, classes: int, objects: int, image: int,
    ) -> None:  # fmt: skip
        super().__init__()
        if image % 32:
            raise ValueError(f"image side {image} is not divisible by 32")
        if objects > clusters:
            raise ValueError(f"{objects} objects need at least as many clusters, not {clusters}")
        self.image, self.classes, self.objects, self.per_stride = image, classes, objects, per_stride
        self.encoder = resnet.ResNet(depths, width, classes)
        self.encoder.head = nn.Identity()
        widths = tuple((width << level) * resnet.Bottleneck.expansion for level in range(4))
        self.pixels = PixelDecoder((widths[0], widths[1], widths[2], widths[3]), dim, heads, axial)
        self.queries = nn.Parameter(torch.empty(clusters, dim))
        nn.init.normal_(self.queries)
        self.blocks = nn.ModuleList(KMeansBlock(dim, heads, classes) for _ in range(len(STRIDES) * per_stride))
        self.kernel = nn.Linear(dim, dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Scores (b, clusters, h, w) and classes (b, clusters, classes) of every block and, last, at stride 4."""
        x, maps = self.encoder.stem(images), []
        for stage in (self.encoder.stage1, self.encoder.stage2, self.encoder.stage3, self.encoder.stage4):
            for block in stage:
                x = block(x)
            maps.append(x)
        coarse, fine = self.pixels(maps)
        clusters = self.queries.expand(len(images), -1, -1)
        scores, classes = [], []
        for index, block in enumerate(self.blocks):
            clusters, score, label = block(clusters, coarse[index // self.per_stride])
            scores.append(score)
            classes.append(label)
        final = self.kernel(clusters) @ F.normalize(fine.flatten(2), dim=1)
        return [*scores, final.unflatten(2, fine.shape[-2:])], [*classes, self.classify(clusters)]


def build(
    *, depth1: int = 3, depth2: int = 4, depth3: int = 6, depth4: int = 3, width: int = 64, dim: int = 256, heads: int = 8,
    axial: int = 5, per_stride: int = 2, clusters: int = 128, classes: int = 134, objects: int = 40, image: int = 1280,
) -> nn.Module:  # fmt: skip
    return KMaX(
        (depth1, depth2, depth3, depth4), width, dim, heads, axial, per_stride, clusters, classes, objects, image
    )


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images; for each position of a quarter of the side its object, and the class of every object."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    side = model.image // 4
    return {
        "images": torch.randn(micro_batch, 3, model.image, model.image),
        "masks": torch.randint(model.objects, (micro_batch, side, side)),
        "labels": torch.randint(model.classes - 1, (micro_batch, model.objects)),
    }


def _matched(likeness: Tensor) -> Tensor:
    """For every object the cluster it is matched with, best pair first, none taken twice: (b, objects)."""
    b, _, objects = likeness.shape
    found = torch.zeros(b, objects, dtype=torch.long, device=likeness.device)
    rows = torch.arange(b, device=likeness.device)
    for _ in range(objects):
        best = likeness.flatten(1).argmax(dim=1)
        cluster, thing = best // objects, best % objects
        found[rows, thing] = cluster
        likeness[rows, cluster] = -1.0
        likeness[rows, :, thing] = -1.0
    return found


def loss(output: tuple[list[Tensor], list[Tensor]], batch: dict[str, Tensor]) -> Tensor:
    """Of every block: cross-entropy of pixels over clusters, dice of the matched masks, cross-entropy of classes."""
    scores, classes = output
    masks, labels = batch["masks"], batch["labels"]
    truth = F.one_hot(masks, labels.shape[1]).permute(0, 3, 1, 2).float()
    with torch.no_grad():
        share = scores[-1].float().softmax(dim=1).flatten(2)
        likeness = share @ truth.flatten(2).transpose(1, 2) / (truth.flatten(2).sum(dim=2)[:, None] + 1.0)
        likeness *= classes[-1].float().softmax(dim=2).gather(2, labels[:, None].expand(-1, share.shape[1], -1))
        match = _matched(likeness)
    wanted = torch.full_like(classes[-1][..., 0], classes[-1].shape[2] - 1, dtype=torch.long).scatter_(1, match, labels)
    total = scores[-1].new_zeros(())
    for score, label in zip(scores, classes, strict=True):
        step = masks.shape[-1] // score.shape[-1]
        owner = match.gather(1, masks[:, ::step, ::step].flatten(1)).view(-1, *score.shape[-2:])
        kept = score.softmax(dim=1).flatten(2).gather(1, match[..., None].expand(-1, -1, score[0, 0].numel()))
        both = truth[:, :, ::step, ::step].flatten(2)
        dice = 1.0 - (2.0 * (kept * both).sum(dim=2) + 1.0) / (kept.sum(dim=2) + both.sum(dim=2) + 1.0)
        total = total + F.cross_entropy(score, owner) + dice.mean() + F.cross_entropy(label.flatten(0, 1), wanted.flatten())
    return total
