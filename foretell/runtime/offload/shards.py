"""States beside parameters that are spread over ranks: every rank keeps and updates those of its own piece.

`fully_shard` gives a rank a piece of every parameter and of its gradient. The engine works on these pieces; what others see
in the optimizer (checkpoints, `state_dict`) are parts of whole tensors, as the parameters themselves are.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from foretell.errors import UserError
from foretell.runtime.offload.cpu import SPARE
from foretell.runtime.offload.memory.arena import KEEP_FREE, available
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.process.control import Control
from foretell.runtime.train.numbers.clip import local
from foretell.units import human_bytes


def part(piece: Tensor, parameter: Tensor) -> Tensor:
    """A rank's piece as a part of the whole, where the parameter is one. It stays where it is: the public way to make one
    would bring it to the device of the mesh."""
    if not isinstance(parameter, DTensor):
        return piece
    meta = TensorMeta(parameter.shape, parameter.stride(), piece.dtype)
    return DTensor(piece, DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta), requires_grad=False)


@torch.no_grad()
def narrow(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Callable[[str], Tensor]:
    """Make a sharded model's weights bf16. Gives the pieces as they were, each once.

    They wait in host memory: on the device both would be there at once. `fully_shard` takes a change of format until the
    model has been called."""
    first = {name: local(parameter.detach()).to("cpu", copy=True) for name, parameter in parameters.items()}
    model.to(torch.bfloat16)
    return first.pop


def threads(ranks: Ranks) -> int | None:
    """Cores for updates by the CPU: the ranks of a machine share them; None where a rank is alone."""
    if ranks.world == 1:
        return None
    return max(1, ((os.cpu_count() or 1) - SPARE) // int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)))


def agreed(ranks: Ranks) -> Callable[[int], None]:
    """Asks whether a machine has the host memory that all its ranks want together, before any of them takes its own.

    All ranks must ask; where it is too little for those of any machine, all raise."""
    control = Control(ranks)

    def ask(nbytes: int) -> None:
        here = _machine()
        wanted = [size for where, size in control.gather([here, nbytes]) if where == here]
        there = available()
        control.together(lambda: enough(wanted, there))

    return ask


def enough(wanted: list[int], there: int | None) -> None:
    """Raise where ranks of one machine want more host memory than it has."""
    if there is not None and sum(wanted) > there - KEEP_FREE:
        raise UserError(
            f"the plan keeps up to {human_bytes(max(wanted))} of each rank in host memory, {human_bytes(sum(wanted))} of the "
            f"{len(wanted)} ranks of this machine, and {human_bytes(there)} can be had",
            "move the states of fewer blocks, use fewer ranks on a machine, or end what else uses memory on it",
        )


def _machine() -> str:
    """The same for processes that share their memory's limit, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
