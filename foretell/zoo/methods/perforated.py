"""Perforated Backpropagation (Brenner and Itti, 2025, "Perforated Backpropagation: A Neuroscience Inspired Extension to
Artificial Neural Networks") around a residual network.

Kept: `perforate` wraps every linear and convolutional layer of any module. A wrapped layer adds to its output what its
dendrites say: each is a layer of the same shape with a tanh, which also sees the dendrites before it, and has one weight
for every neuron. Errors pass the dendrites by: they read a detached input, and no gradient of the loss goes through them.
Two phases take turns. `neuron`: layers and the weights from dendrites are trained, the dendrites are frozen. `dendrite`:
all of the network is frozen but the newest dendrites, which are trained to correlate with the error of their neurons, as
in Cascade-Correlation (Fahlman and Lebiere, 1989): their gradient is made where the error comes by, in backward.
`grow` adds a dendrite everywhere; the graph and the parameters are others then.

Left out: when to switch (the loop's business), the dendrites' own learning rates, and the running averages of error and
output over the data: means are of the batch. The network is the zoo's bottleneck ResNet; the paper adds to several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foretell.zoo.vision import resnet

PHASES = ("neuron", "dendrite")
WRAPPED = (nn.Linear, nn.Conv2d)


class Correlate(torch.autograd.Function):
    """Hands the layer's output on; in backward, the error that comes by trains the candidate to follow it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, candidate: Tensor, channel: int) -> Tensor:
        ctx.save_for_backward(candidate)
        ctx.others = [dim for dim in range(candidate.dim()) if dim != channel % candidate.dim()]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (candidate,) = ctx.saved_tensors
        apart = error - error.mean(ctx.others, keepdim=True)
        covariance = (apart * (candidate - candidate.mean(ctx.others, keepdim=True))).sum(ctx.others, keepdim=True)
        return error, -covariance.sign() * apart, None


class Perforated(nn.Module):
    """A layer and its dendrites."""

    def __init__(self, layer: nn.Module, dendrites: int) -> None:
        super().__init__()
        self.layer = layer
        convolves = isinstance(layer, nn.Conv2d)
        self.outputs = layer.out_channels if convolves else layer.out_features
        self.channel = 1 if convolves else -1
        self.shape = (-1, 1, 1) if convolves else (-1,)
        self.phase = PHASES[0]
        self.dendrites = nn.ModuleList()
        self.cascade = nn.ParameterList()
        """How much the second dendrite and later ones see of those before."""
        self.weights = nn.ParameterList()
        for _ in range(dendrites):
            self.grow()

    def grow(self) -> None:
        own = self.layer
        if isinstance(own, nn.Conv2d):
            twin: nn.Module = nn.Conv2d(
                own.in_channels, own.out_channels, own.kernel_size, own.stride, own.padding, own.dilation, own.groups,
                own.bias is not None,
            )  # fmt: skip
        else:
            twin = nn.Linear(own.in_features, own.out_features, own.bias is not None)
        if len(self.dendrites):
            self.cascade.append(nn.Parameter(torch.zeros(len(self.dendrites), self.outputs)))
        self.dendrites.append(twin)
        self.weights.append(nn.Parameter(torch.zeros(self.outputs)))

    def set_phase(self, phase: str) -> None:
        self.phase = phase
        self.requires_grad_(phase == "neuron")
        self.dendrites.requires_grad_(False)
        self.cascade.requires_grad_(False)
        if phase == "dendrite":
            self.dendrites[-1].requires_grad_(True)
            self.cascade[-1:].requires_grad_(True)

    def dendrites_say(self, x: Tensor) -> list[Tensor]:
        said: list[Tensor] = []
        for place, dendrite in enumerate(self.dendrites):
            y = dendrite(x)
            if place:
                for weight, other in zip(self.cascade[place - 1], said, strict=True):
                    y = y + weight.view(self.shape) * other
            said.append(torch.tanh(y))
        return said

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        said = self.dendrites_say(x.detach())
        learning = self.phase == "dendrite"
        for weight, one in zip(self.weights, said[:-1] if learning else said, strict=False):
            y = y + weight.view(self.shape) * one
        return Correlate.apply(y, said[-1], self.channel) if learning else y


def perforate(module: nn.Module, dendrites: int) -> None:
    """Wrap every linear and convolutional layer inside."""
    for name, child in list(module.named_children()):
        if isinstance(child, WRAPPED):
            setattr(module, name, Perforated(child, dendrites))
        else:
            perforate(child, dendrites)


def set_phase(model: nn.Module, phase: str) -> None:
    """Freeze what this phase does not train."""
    if phase not in PHASES:
        raise ValueError(f"phase {phase} is none of {', '.join(PHASES)}")
    wrapped = [module for module in model.modules() if isinstance(module, Perforated)]
    if phase == "dendrite" and not all(len(module.dendrites) for module in wrapped):
        raise ValueError("there is no dendrite to train: build with dendrites=1 or more, or grow the model")
    model.requires_grad_(phase == "neuron")
    for module in wrapped:
        module.set_phase(phase)


def grow(model: nn.Module) -> None:
    """One more dendrite everywhere, then the phase that trains it."""
    for module in list(model.modules()):
        if isinstance(module, Perforated):
            module.grow()
    set_phase(model, "dendrite")


def build(
    *, depth1: int = 3, depth2: int = 4, depth3: int = 6, depth4: int = 3, width: int = 64, classes: int = 1000,
    dendrites: int = 1, phase: str = "neuron",
) -> nn.Module:  # fmt: skip
    model = resnet.build(depth1=depth1, depth2=depth2, depth3=depth3, depth4=depth4, width=width, classes=classes)
    perforate(model, dendrites)
    set_phase(model, phase)
    return model


def grown(model: nn.Module) -> dict[str, Any]:
    """The settings that build a model as this one is now."""
    one = next(module for module in model.modules() if isinstance(module, Perforated))
    return {"dendrites": len(one.dendrites), "phase": one.phase}


batch = resnet.batch
loss = resnet.loss
