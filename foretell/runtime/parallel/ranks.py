"""Who this process is among the ranks of a plan, and the mesh they form."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from foretell.errors import UserError
from foretell.plan.legal import launch
from foretell.plan.types import AXES, Mesh, Plan
from foretell.runtime.process.blame import TIMEOUT_SECONDS
from foretell.runtime.process.launch import launcher_lives
from foretell.runtime.process.replica import ReplicaRole, role
from foretell.runtime.process.secure import served_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

APART = "dp_shard_apart"
"""dp_shard is this axis and ep: along it ranks hold the same experts, along ep others."""
SPREAD = "dp_shard_cp"
"""The axes dp_shard and cp as one, which parameters are sharded over."""
BOX = "box"
"""The backend of a process group in which other ranks are stand-ins (`runtime.box`)."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place. Axes of size 1 are not in the mesh, but for dp_shard beside dp_replicate, which PyTorch's
    `fully_shard` wants; a world of one has no mesh."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh | None
    sizes: Mesh
    apart: bool = False
    """Replicas step alone: parameters are spread, and gradients summed, over the ranks of one of them."""
    alone: bool = False
    """Other ranks are stand-ins: there is nobody to agree with."""
    replica: ReplicaRole | None = None
    """Where a hub joins replicas that come and go: each of them, and the hub, is a world of its own."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def size(self, axis: str) -> int:
        return int(getattr(self.sizes, axis))

    def coordinate(self, axis: str) -> int:
        """Where this rank lies along an axis."""
        if axis == "dp_shard" and self.sizes.ep > 1:
            return self.coordinate(APART) * self.sizes.ep + self.coordinate("ep")
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return 0
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup | None:
        """The ranks that differ from this one along that axis alone; None where there are no others."""
        if axis == "dp_shard" and self.sizes.ep > 1:
            return self._sliced(axis).get_group()
        if self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return None
        return self.mesh.get_group(axis)

    def submesh(self, axes: tuple[str, ...] | list[str]) -> DeviceMesh | None:
        """The mesh over those of the axes that are larger than 1; None where none is."""
        names = tuple(axis for axis in AXES if axis in axes and self.size(axis) > 1)
        if self.mesh is None or not names:
            return None
        return self.mesh[names if len(names) > 1 else names[0]]

    @property
    def data_mesh(self) -> DeviceMesh | None:
        """What `fully_shard` takes: (dp_replicate, dp_shard), or dp_shard alone, where dp_shard stands for dp_shard and
        cp together; None where parameters are spread over no axis."""
        if self.mesh is None or self.sizes.spread == 1:
            return None
        if self.apart:
            return self._sliced("dp_shard") if self.sizes.dp_shard > 1 else None
        inner = "dp_shard"
        if self.sizes.cp > 1:
            inner = SPREAD if "dp_shard" in (self.mesh.mesh_dim_names or ()) else "cp"
        return self._sliced("dp_replicate", inner) if self.sizes.dp_replicate > 1 else self._sliced(inner)

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The same for parameters of experts: over the ranks that hold the same experts, be it one; None without ep."""
        if self.sizes.ep == 1:
            return None
        return self._sliced("dp_replicate", APART) if self.sizes.dp_replicate > 1 else self._sliced(APART)

    def _sliced(self, *axes: str) -> DeviceMesh:
        assert self.mesh is not None
        with warnings.catch_warnings():  # torch 2.13 wants flattened axes kept apart, and knows no other way for two
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            return self.mesh[axes if len(axes) > 1 else axes[0]]

    @property
    def data_size(self) -> int:
        """Ranks that see different samples."""
        return self.sizes.data if self.replica is None else self.replica.count

    @property
    def data_rank(self) -> int:
        """Which of them this rank is: dp_shard runs fastest."""
        if self.replica is not None:
            return max(0, self.replica.slot)
        return self.coordinate("dp_replicate") * self.sizes.dp_shard + self.coordinate("dp_shard")


def start(plan: Plan, *, device: str = "auto", timeout_s: float = TIMEOUT_SECONDS) -> Ranks:
    """Join the other ranks, as torchrun's environment says, and form the plan's mesh.

    One process without torchrun is a world of one and needs no process group. A process group that is
    already there is used as it is. With a placement, the process that torchrun started as device d becomes the rank
    that the plan puts there, and RANK says so from then on.
    """
    if (replica := role()) is not None:
        return _one_replica(plan, replica, device)
    rank, world, local_rank = _place()
    if world != plan.mesh.world:
        raise UserError(
            f"the plan is for {_count(plan.mesh.world)} ({_shape(plan.mesh)}) and {_count(world)} started",
            f"start it with `{launch(plan)}`",
        )
    chosen = _device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world == 1:
        return Ranks(rank=0, world=1, local_rank=local_rank, device=chosen, mesh=None, sizes=plan.mesh)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        limit = timedelta(seconds=timeout_s)
        store = _own_store(rank, limit) if launcher_lives() else None
        if plan.placement:  # whoever holds the store is the process that was started first, whatever its rank
            store = store or next(dist.rendezvous("env://", timeout=limit))[0]
            rank = plan.placement.index(rank)
            os.environ["RANK"] = str(rank)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
            device_id=chosen if chosen.type == "cuda" else None,
        )
    return Ranks(
        rank=rank, world=world, local_rank=local_rank, device=chosen, mesh=form(plan.mesh, chosen.type), sizes=plan.mesh,
        apart=plan.sync is not None, alone=dist.get_backend() == BOX,
    )  # fmt: skip


def _one_replica(plan: Plan, replica: ReplicaRole, device: str) -> Ranks:
    """A world of its own; the hub, which speaks and saves, is on the host."""
    if replica.count != plan.mesh.dp_replicate:
        raise UserError(f"the plan has {plan.mesh.dp_replicate} replicas and {replica.count} were started", "start it with `foretell run`")
    chosen = torch.device("cpu") if replica.is_hub else _device(device, replica.slot)
    return Ranks(rank=0, world=1, local_rank=max(0, replica.slot), device=chosen, mesh=None, sizes=Mesh(), replica=replica)


def form(mesh: Mesh, device_type: str) -> DeviceMesh | None:
    """The device mesh of a plan over the whole world, in the order of `AXES`."""
    kept = {"dp_shard"} if mesh.dp_replicate > 1 else set()
    sizes = {axis: getattr(mesh, axis) for axis in AXES if axis in kept or (axis != "ep" and getattr(mesh, axis) > 1)}
    if mesh.ep > 1:
        apart = {APART: mesh.dp_shard // mesh.ep, "ep": mesh.ep}
        sizes = {name: size for axis in sizes for name, size in (apart if axis == "dp_shard" else {axis: sizes[axis]}).items()}
    if not sizes:
        return None
    found = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if mesh.ep > 1:
        found[APART, "ep"]._flatten("dp_shard")
    elif {"dp_shard", "cp"} <= set(sizes):
        found["dp_shard", "cp"]._flatten(SPREAD)
    return found


def _own_store(rank: int, limit: timedelta) -> dist.Store:
    """Where ranks that foretell started meet: at the address they were told and at no other of this machine's."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    found: dist.Store = served_store(host, port, limit) if rank == 0 else dist.TCPStore(host, port, is_master=False, timeout=limit)
    return found


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _place() -> tuple[int, int, int]:
    """Rank, world and local rank, from the process group or the environment."""
    try:
        local_rank = int(os.environ.get("LOCAL_RANK") or 0)
        if dist.is_initialized():
            return dist.get_rank(), dist.get_world_size(), local_rank
        world = int(os.environ.get("WORLD_SIZE") or 1)
        rank = int(os.environ.get("RANK") or 0)
    except ValueError as error:
        raise UserError(
            f"RANK, LOCAL_RANK and WORLD_SIZE must be whole numbers: {error}", "start it with torchrun"
        ) from None
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if world > 1 and missing:
        raise UserError(f"{', '.join(missing)} is not set beside WORLD_SIZE={world}", "start it with torchrun")
    return rank, world, local_rank


def device_of(name: str) -> torch.device:
    """The device that a process without others would take."""
    return _device(name, 0)


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise UserError("device cuda was asked for and there is none", "use device cpu, or see `foretell doctor`")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()} here",
            f"start at most {torch.cuda.device_count()} processes on this machine, or use device cpu",
        )
    return torch.device("cuda", local_rank)


def _count(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} processes"


def _shape(mesh: Mesh) -> str:
    axes = [f"{axis} {getattr(mesh, axis)}" for axis in AXES if axis != "ep" and getattr(mesh, axis) > 1]
    return " × ".join(axes) or "one rank"
