"""Checkpoints in the memory of hosts, beside those on disk: written often, verified alike, looked at first by a restart.

    every --memory-every steps   each rank's file ─► memory of its host ─► memory of the next host (where there are several)
    a restart                    what hosts have of each, every byte verified ─► files that a host lacks come from one that has them
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from foretell.checkpoint import memory
from foretell.checkpoint.format import MANIFEST, file_name
from foretell.checkpoint.store import PARTIAL
from foretell.runtime.parallel.ranks import Ranks
from foretell.runtime.process.control import Control
from foretell.runtime.train import save

PREFIX = "memory/"
"""Of a checkpoint's name, where it is not on disk."""
_PIECE = 2**24
"""Bytes that are sent at a time."""


class Hosts:
    """Which ranks are on which host; sends files between them. A `HostCopies` of the saver."""

    def __init__(self, control: Control) -> None:
        self.control, self.rank = control, control.ranks.rank
        self.names: list[str] = control.gather(memory.host())
        self.firsts = [self.names.index(name) for name in dict.fromkeys(self.names)]
        """The first rank of each host, host by host."""

    @property
    def several(self) -> bool:
        return len(self.firsts) > 1

    @property
    def leads(self) -> bool:
        return self.rank in self.firsts

    def peer(self, rank: int) -> int:
        """Who keeps a copy of a rank's file: on the next host, the rank at the same place."""
        here = [one for one, name in enumerate(self.names) if name == self.names[rank]]
        hosts = [self.names[first] for first in self.firsts]
        name = hosts[(hosts.index(self.names[rank]) + 1) % len(hosts)]
        there = [one for one, other in enumerate(self.names) if other == name]
        return there[here.index(rank) % len(there)]

    def copy(self, folder: Path) -> None:
        """Every rank's file of a checkpoint to its peer; all ranks call it, in the thread that saves."""
        wrong = ""
        for rank in range(len(self.names)):
            wrong = self.send(folder / file_name(rank), rank, self.peer(rank)) or wrong
        if wrong:
            raise OSError(0, wrong)

    def send(self, path: Path, source: int, target: int) -> str:
        """A file from one rank to another; others do nothing. What was wrong, after which both go on."""
        group, wrong = self.control.group, ""
        if self.rank == source:
            with path.open("rb") as stream:
                left = os.fstat(stream.fileno()).st_size
                dist.send(torch.tensor([left]), target, group=group)
                while left:
                    piece = torch.frombuffer(bytearray(stream.read(min(left, _PIECE))), dtype=torch.uint8)
                    dist.send(piece, target, group=group)
                    left -= piece.numel()
        elif self.rank == target:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, source, group=group)
            left, handle = int(size), -1
            try:
                path.unlink(missing_ok=True)
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except OSError as error:
                wrong = f"{path} cannot be written: {error.strerror or error}"
            while left:
                piece = torch.empty(min(left, _PIECE), dtype=torch.uint8)
                dist.recv(piece, source, group=group)
                left -= piece.numel()
                try:
                    if not wrong:
                        os.write(handle, piece.numpy())
                except OSError as error:
                    wrong = f"{path} cannot be written: {error.strerror or error}"
            if handle >= 0:
                os.close(handle)
        return wrong


class MemoryCheckpoints:
    """Those of one run, on this rank. All ranks make it, and call its methods, together."""

    def __init__(self, run: Path, every: int, ranks: Ranks, control: Control, *, fresh: bool) -> None:
        """`fresh`: the run begins, and what is there is not its own."""
        self.every, self.control, self.folder = every, control, memory.folder_of(run)
        self.hosts = Hosts(control)
        control.together(lambda: memory.make(self.folder) if self.hosts.leads else None)
        if fresh and self.hosts.leads:
            memory.forget(self.folder)
        spare = save.room(ranks)
        back = Control(ranks)
        team, behind = save.Members(control), save.Members(back)
        copies = 2 if self.hosts.several else 1
        peers = Hosts(back) if self.hosts.several else None
        self.saver = save.Saver(
            self.folder, team, behind, keep=1, reads_back=False, pin=ranks.device.type == "cuda", spare=spare, peers=peers,
            room=lambda nbytes: memory.check_room(self.folder, copies * nbytes, spare()),
        )  # fmt: skip
        self._parts: list[dict[str, dict[str, Any]]] = []
        self._told = ""

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def path(self, name: str) -> Path:
        return self.folder / name.removeprefix(PREFIX)

    # ------------------------------------------------------------ a restart

    def names(self, say: Any) -> list[str]:
        """Checkpoints that all hosts together have every file of, in full and as written, the newest first."""
        own = {name: asdict(part) for name, part in memory.parts(self.folder).items()} if self.hosts.leads else {}
        self._parts = self.control.gather(own)
        if self.control.ranks.is_first:
            for found in self._parts:
                for part in found.values():
                    for damage in part["damage"]:
                        say(f"damaged in memory: {damage}")
        names = dict.fromkeys(name for found in self._parts for name in found)
        return [PREFIX + name for name in sorted(names, reverse=True) if self._whole(name)]

    def _whole(self, name: str) -> bool:
        held = [found[name] for found in self._parts if name in found]
        same = len({(part["generation"], part["all_ranks"]) for part in held}) == 1
        return same and {rank for part in held for rank in part["ranks"]} == set(range(held[0]["all_ranks"]))

    def complete(self, name: str) -> str:
        """See that every host has all files of it; from where some came, in words."""
        name = name.removeprefix(PREFIX)
        has = {first: set(self._parts[first].get(name, {}).get("ranks", ())) for first in self.hosts.firsts}
        everything = next(found[name]["all_ranks"] for found in self._parts if name in found)
        sources: list[str] = []
        if self.hosts.leads:
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        for first in self.hosts.firsts:
            lacking = sorted(set(range(everything)) - has[first])
            wanted = [(file_name(rank), next(one for one in self.hosts.firsts if rank in has[one])) for rank in lacking]
            if name not in self._parts[first]:
                wanted.append((MANIFEST, next(one for one in self.hosts.firsts if name in self._parts[one])))
            for file, source in wanted:
                self.hosts.send(self.folder / name / file, source, first)
                if self.hosts.names[source] not in sources:
                    sources.append(self.hosts.names[source])
        return f", from memory of the peer {' and '.join(sources)}" if sources else ", from memory"

    # ------------------------------------------------------------ while it runs

    def tell(self, run: Any) -> None:
        """How the last one went, once that is known."""
        done = self.saver.poll()
        if done is None or run.log is None:
            return
        why = done.result.why if isinstance(done.result, save.NotSaved) else None
        size = done.result.bytes if isinstance(done.result, save.SavedCheckpoint) else None
        run.log.write("save", done.result.step, where="memory", seconds=done.seconds, stall_seconds=done.stall_seconds, bytes=size, problem=why)
        if why is not None and why != self._told:
            self._told = why
            run.screen.say(f"step {done.result.step}: no checkpoint in memory: {why}")

    def save(self, run: Any) -> None:
        """One of this moment, written while the next steps run."""
        self.saver.wait()
        self.tell(run)
        if self.hosts.leads:
            for left in self.folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)
        self.saver.begin(run.step, save.pieces(run.job), save.own_state(run.job), run.about(), extra=save.extra(run.job))

    def forget(self) -> None:
        """The run left the course that they are of."""
        self.saver.wait()
        if self.hosts.leads:
            memory.forget(self.folder)

    def close(self) -> None:
        """The run has ended, and what it saved last is on disk."""
        self.saver.wait()
        if self.hosts.leads:
            memory.remove(self.folder)


def order(on_disk: Sequence[str], in_memory: Sequence[str]) -> list[str]:
    """Names of checkpoints, the newest first; of one step that in memory before that on disk."""
    def key(name: str) -> tuple[int, bool]:
        return -int(name.removeprefix(PREFIX).split("-")[1]), not name.startswith(PREFIX)

    return sorted([*in_memory, *on_disk], key=key)


