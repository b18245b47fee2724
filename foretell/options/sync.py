"""Options of replicas that step alone and are joined every so many steps, for `fit` and `plan`: described once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretell.errors import UserError
from foretell.options.describe import option
from foretell.trace.recipe import SYNC_FORMATS, Sync

NAMES = ("sync_every", "outer_lr", "outer_momentum", "sync_format", "sync_delay")
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
    )  # fmt: skip
    if found.format not in SYNC_FORMATS:
        raise UserError(f"--sync-format {found.format} is not known", f"known: {', '.join(SYNC_FORMATS)}")
    if not 0 < found.lr <= 100:
        raise UserError(f"--outer-lr is {found.lr:g}, not a learning rate", "--outer-lr 0.7")
    if not 0 <= found.momentum <= 1:
        raise UserError(f"--outer-momentum is {found.momentum:g}", "a number from 0 to 1, such as 0.9")
    if not 0 <= found.delay < every:
        raise UserError(f"--sync-delay is {found.delay}, and a round has {every} steps", f"from 0 to {every - 1}")
    return found
