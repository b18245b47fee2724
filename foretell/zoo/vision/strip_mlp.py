"""Strip-MLP (Cao et al., 2023, "Strip-MLP: Efficient Token Interaction for Vision MLP").

Four levels of decreasing resolution, no attention. A strip layer mixes all tokens of a row, and takes in the rows beside it:
a token's new value is a sum over the whole row and over `reach` neighbours on either side, so that strips are not islands.
The same along columns. Cascade group strip mixing splits the channels into patches, mixes strips with weights of each
patch's own, then across patches. Local strip mixing does the same in windows by short depthwise strips. A channel MLP follows.

Kept: the three modules and their order. Simplified: the two global directions run one after the other and are joined with
the input by one 1x1 convolution; a patch embedding is one strided convolution. Left out: drop path. The weights of a strip layer
depend on the side of the image. The defaults have the depths of the smallest published model and 12.5M parameters, fewer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretell.zoo.vision.vit import Mlp


class StripLayer(nn.Module):
    """Mixes the tokens of every row of (b, dim, rows, side), each channel patch by its own weights, rows beside included."""

    def __init__(self, side: int, patches: int, reach: int) -> None:
        super().__init__()
        self.patches = patches
        self.mix = nn.Conv1d(patches * side, patches * side, 2 * reach + 1, padding=reach, groups=patches)

    def forward(self, x: Tensor) -> Tensor:
        b, dim, rows, side = x.shape
        y = x.view(b, self.patches, dim // self.patches, rows, side).permute(0, 2, 1, 4, 3)
        y = self.mix(y.reshape(-1, self.patches * side, rows)).view(b, dim // self.patches, self.patches, side, rows)
        return y.permute(0, 2, 1, 4, 3).reshape(b, dim, rows, side)


class CascadeGroupStripMixing(nn.Module):
    """Strips of rows, then of columns, inside every patch of channels; then across patches with the input beside."""

    def __init__(self, dim: int, side: int, patches: int, reach: int) -> None:
        super().__init__()
        self.rows = StripLayer(side, patches, reach)
        self.columns = StripLayer(side, patches, reach)
        self.across = nn.Conv2d(2 * dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.rows(x))
        y = self.columns(y.transpose(2, 3)).transpose(2, 3)
        return self.across(torch.cat([x, y], dim=1))


class LocalStripMixing(nn.Module):
    """Short strips of one channel, wide and high, joined by a 1x1 convolution."""

    def __init__(self, dim: int, window: int, reach: int) -> None:
        super().__init__()
        wide, high = (2 * reach + 1, window), (window, 2 * reach + 1)
        self.wide = nn.Conv2d(dim, dim, wide, padding=(reach, window // 2), groups=dim)
        self.high = nn.Conv2d(dim, dim, high, padding=(window // 2, reach), groups=dim)
        self.join = nn.Conv2d(2 * dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(torch.cat([self.wide(x), self.high(x)], dim=1))


class Block(nn.Module):
    """Global and local strips of half the channels each, then a channel MLP, over a (b, dim, h, w) map."""

    def __init__(self, dim: int, side: int, patches: int, reach: int, window: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(dim)
        self.strips = CascadeGroupStripMixing(dim // 2, side, patches, reach)
        self.local = LocalStripMixing(dim // 2, window, reach)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        far, near = self.norm1(x).chunk(2, dim=1)
        x = x + torch.cat([self.strips(far), self.local(near)], dim=1)
        return x + self.mlp(self.norm2(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


class StripMLP(nn.Module):
    def __init__(
        self, dim: int, depths: tuple[int, int, int, int], patches: int, reach: int, window: int, classes: int, image: int
    ) -> None:
        super().__init__()
        if image % 32:
            raise ValueError(f"image side {image} is not divisible by 32")
        if dim % (2 * patches):
            raise ValueError(f"half of dim {dim} is not divisible by {patches} patches")
        self.image, self.classes, self.reach = image, classes, reach
        dims, sides = [dim << level for level in range(4)], [image // 4 >> level for level in range(4)]
        self.embed1 = nn.Conv2d(3, dims[0], 4, stride=4)
        self.embed2, self.embed3, self.embed4 = (nn.Conv2d(a, 2 * a, 2, stride=2) for a in dims[:3])
        self.level1, self.level2, self.level3, self.level4 = (
            nn.ModuleList(Block(width, side, patches, reach, window) for _ in range(depth))
            for width, side, depth in zip(dims, sides, depths, strict=True)
        )
        self.norm = nn.LayerNorm(dims[3])
        self.head = nn.Linear(dims[3], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for embed, level in (
            (self.embed1, self.level1), (self.embed2, self.level2), (self.embed3, self.level3), (self.embed4, self.level4)
        ):  # fmt: skip
            x = embed(x)
            for block in level:
                x = block(x)
        return self.head(self.norm(x.mean(dim=(2, 3))))


def build(
    *, dim: int = 80, n1: int = 2, n2: int = 2, n3: int = 6, n4: int = 2, patches: int = 4, reach: int = 1, window: int = 7,
    classes: int = 1000, image: int = 224,
) -> nn.Module:  # fmt: skip
    return StripMLP(dim, (n1, n2, n3, n4), patches, reach, window, classes, image)


def batch(model: nn.Module, micro_batch: int, seq: int | None, image: int | None) -> dict[str, Tensor]:
    """Random images, each with a class."""
    if image is not None and image != model.image:
        raise ValueError(f"image side {image} was asked for, but the model was built with image={model.image}")
    return {
        "images": torch.randn(micro_batch, 3, model.image, model.image),
        "targets": torch.randint(model.classes, (micro_batch,)),
    }


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the class."""
    return F.cross_entropy(output, batch["targets"])
