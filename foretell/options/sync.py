"""Options of replicas that step alone and are joined every so many steps, for `fit` and `plan`: described once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import UserError
from foretell.options import words
from foretell.options.describe import option
from foretell.trace.recipe import SYNC_FORMATS, Sync

NAMES = ("sync_every", "outer_lr", "outer_momentum", "sync_format", "sync_delay", "sync_quorum", "sync_grace")
_DESCRIBED: Mapping[str, Mapping[str, Any]] = {
    "sync_every": {
        "default": None, "metavar": "H",
        "help": "Replicas step alone and an outer optimizer joins them every H steps (DiLoCo); changes training; default: every step.",
    },
    "outer_lr": {"default": 0.7, "help": "Learning rate of the outer optimizer; needs --sync-every.", "metavar": "X"},
    "outer_momentum": {"default": 0.9, "help": "Nesterov momentum of the outer optimizer; needs --sync-every.", "metavar": "X"},
    "sync_format": {
        "default": "fp32", "metavar": "NAME",
        "help": "What replicas send: fp32, or int8 with error feedback; needs --sync-every.",
    },
    "sync_delay": {
        "default": 0, "metavar": "N",
        "help": "Steps of the next round that go on while a round's exchange is under way; needs --sync-every.",
    },
    "sync_quorum": {
        "default": 0, "metavar": "N",
        "help": "Replicas may come and go: N of them or more finish a round without the others; needs --sync-every; default: all, always.",
    },
    "sync_grace": {
        "default": 10.0, "metavar": "TIME", "typed": str, "read": words.duration("--sync-grace", "5s, 30s or 2m"), "shown": "10s",
        "help": "How long a round waits for the other replicas once a quorum has finished; needs --sync-quorum.",
    },
}  # fmt: skip


def of_sync(name: str) -> Any:
    """One of these options, as a field of an options class."""
    return option(**_DESCRIBED[name])


def sync_of(given: Mapping[str, Any]) -> Sync | None:
    """What the options ask for; None: replicas sum their gradients in every step."""
    every = given.get("sync_every")
    if every is None:
        for name in NAMES[1:]:
            if given.get(name, _DESCRIBED[name]["default"]) != _DESCRIBED[name]["default"]:
                raise UserError(f"--{name.replace('_', '-')} is given without --sync-every", "add --sync-every H, for example --sync-every 100")
        return None
    if type(every) is not int or every < 2:
        raise UserError(f"--sync-every is {every}, not a number of steps above 1", "--sync-every 100, or leave it out for every step")
    found = Sync(
        every=every, lr=float(given.get("outer_lr", 0.7)), momentum=float(given.get("outer_momentum", 0.9)),
        format=str(given.get("sync_format") or "fp32"), delay=int(given.get("sync_delay") or 0),
        quorum=int(given.get("sync_quorum") or 0), grace=float(given.get("sync_grace", 10.0)),
    )  # fmt: skip
    if found.format not in SYNC_FORMATS:
        raise UserError(f"--sync-format {found.format} is not known", f"known: {', '.join(SYNC_FORMATS)}")
    if not 0 < found.lr <= 100:
        raise UserError(f"--outer-lr is {found.lr:g}, not a learning rate", "--outer-lr 0.7")
    if not 0 <= found.momentum <= 1:
        raise UserError(f"--outer-momentum is {found.momentum:g}", "a number from 0 to 1, such as 0.9")
    if not 0 <= found.delay < every:
        raise UserError(f"--sync-delay is {found.delay}, and a round has {every} steps", f"from 0 to {every - 1}")
    if found.quorum < 0:
        raise UserError(f"--sync-quorum is {found.quorum}, not a number of replicas", "--sync-quorum 2, or leave it out for always all of them")
    if found.grace != Sync(every=every).grace and not found.quorum:
        raise UserError("--sync-grace is given without --sync-quorum", "add --sync-quorum N, for example --sync-quorum 2")
    if found.quorum and found.delay:
        raise UserError("--sync-delay is given beside --sync-quorum, whose replicas wait for the end of a round", "give one of the two")
    return found
