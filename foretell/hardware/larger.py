"""The same hardware with more devices, in the words that a user would write after `--on`."""

from __future__ import annotations

import re

from foretell.errors import UserError
from foretell.hardware.parse import parse
from foretell.hardware.types import Cluster

_COUNTED = re.compile(r"(?:(?P<nodes>\d+)\s*[xX*]\s*)?(?P<each>\d+)\s*[xX*]\s*(?P<name>\S.*)")


def larger(text: str, times: int) -> str | None:
    """`H100,memory=60GiB` → `H100:4,memory=60GiB` for four times the devices; None where it cannot be written so.

    Nodes that were spelled out stay as they are, and there are more of them. A file and unlike groups are not touched.
    """
    head, comma, options = text.strip().partition(",")
    if head.casefold().endswith((".toml", ".json")):
        return None
    if head.casefold() == "auto":
        here = parse("auto")
        head = f"{here.device.name}:{here.count}"
    body, at, link = head.partition("@")
    match = _COUNTED.fullmatch(body.strip())
    if match is None:
        name, _, count = (part.strip() for part in body.partition(":"))
        wide = f"{name}:{int(count or 1) * times}" if (count or "1").isdecimal() else ""
    elif match["nodes"]:
        wide = f"{int(match['nodes']) * times}x{match['each']}x{match['name']}"
    else:
        wide = f"{int(match['each']) * times}x{match['name']}"
    found = f"{wide}{at}{link}{comma}{options}"
    try:
        return found if _same(parse(found), parse(text), times) else None
    except UserError:
        return None


def _same(found: Cluster, before: Cluster, times: int) -> bool:
    return not before.groups and found.count == before.count * times and found.device.name == before.device.name
