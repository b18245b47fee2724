"""Ways of training: without a global backward, each beside its twin under backpropagation; and with nodes that grow."""

from __future__ import annotations

from typing import Any

from foretell.zoo.entry import Entry

_LOCAL = (
    "kept activations do not grow with depth, since each layer is run backward before the next is computed; a summed loss "
    "keeps them all. All gradients wait for one update. Joules of an epoch by the device's own counter come out at −10 to +26 % on an H200"
)


def _local(name: str, config: dict[str, Any], summary: str, tail: str = "", **more: Any) -> tuple[Entry, ...]:
    """A method and its twin."""
    return tuple(
        Entry(
            f"{name}{'-twin' if twin else ''}{tail}", name, {**config, "twin": twin}, "image",
            f"{summary}, {'by backpropagation' if twin else 'layer by layer'}", paper="Beyond Backpropagation", task="cls",
            motif="no global backward", trap=_LOCAL, **more,
        )
        for twin in (False, True)
    )  # fmt: skip


_SMALL_MLP = {"pixels": 196, "dim": 256, "layers": 8, "group": 512}
_GROWTH = (
    "a frozen phase loses gradients and optimizer states, and a grown model is another graph with other parameters: it has to "
    "be traced and planned again, and a plan of the old one is refused; `run --replan` notices growth by itself"
)
_PERFORATED: dict[str, Any] = {
    "domain": "image", "paper": "Perforated Backpropagation", "task": "cls", "motif": "graph growth, frozen phases",
    "trap": _GROWTH,
}  # fmt: skip
_SMALL_RESNET = {"depth1": 1, "depth2": 2, "depth3": 0, "depth4": 0, "width": 16, "classes": 10, "dendrites": 2}
ENTRIES = (
    *_local("ff", _SMALL_MLP, "Forward-Forward MLP, 8 x 256", small=True, tail="-tiny"),
    *_local("ff", {}, "Forward-Forward MLP, 4 x 2000, MNIST"),
    *_local("cafo", {"width1": 32, "factor": 2, "image": 64}, "Cascaded-Forward, 3 blocks", small=True, image=64, tail="-tiny"),
    *_local("cafo", {}, "Cascaded-Forward, blocks of 32, 128, 512, CIFAR-10", image=32),
    *_local("mf", _SMALL_MLP, "Mono-Forward MLP, 8 x 256", small=True, tail="-tiny"),
    *_local("mf", {}, "Mono-Forward MLP, 3 x 2000, CIFAR-10"),
    Entry(
        "perforated-tiny", "perforated", _SMALL_RESNET, summary="ResNet with two dendrites a neuron", image=64, small=True,
        **_PERFORATED,
    ),
    Entry("perforated", "perforated", {}, summary="ResNet-50 with one dendrite a neuron", image=224, **_PERFORATED),
)
