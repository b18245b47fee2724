"""Does a module of yours fit? Asked from Python, of a model that is nowhere but in this file.

    python examples/fit_module.py

Prints the verdict and what uses most memory for two sizes of batch, and the one that fits. No GPU is needed, and nothing is trained.
"""

import torch
from torch import Tensor, nn

import foretell


class Encoder(nn.Module):
    def __init__(self, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=16, dim_feedforward=4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).squeeze(-1)


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["target"])


fitting = 0
for samples in (128, 256):
    with torch.device("meta"):  # takes no memory here; real tensors do as well
        model, batch = Encoder(), {"x": torch.empty(samples, 512, 1024), "target": torch.empty(samples, 512)}
    answer = foretell.fit(model, batch, loss=loss, hardware="RTX4090", advice_seconds=0)
    most, size = max(answer.memory.categories.items(), key=lambda item: item[1])
    print(f"{samples:3} samples: {answer.verdict:5} {answer.memory.device_bytes / 2**30:5.1f} GiB, {most} {size / 2**30:.1f} GiB")
    fitting = samples if answer.fits else fitting
print(f"fits: {fitting} samples")
