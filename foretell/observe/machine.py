"""Where a watched script runs. This machine is looked at in a process of its own: no torch, and nothing of the GPU, in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

from foretell.errors import UserError
from foretell.hardware.files import from_dict
from foretell.hardware.parse import parse
from foretell.hardware.types import Cluster
from foretell.trace.sandbox.process import package_parent

_LOOK = "import sys, json; sys.path.insert(0, sys.argv[2]); from foretell.errors import ForetellError\n" \
        "from foretell.hardware import parse\n" \
        "try: print(json.dumps({'cluster': parse(sys.argv[1]).to_dict()}))\n" \
        "except ForetellError as error: print(json.dumps({'problem': error.problem, 'remedy': error.remedy}))\n"  # fmt: skip
_SECONDS = 120.0


def cluster_of(on: str) -> Cluster:
    """All devices of it: how many of them a script has is known once it was followed."""
    if not on.strip().casefold().startswith("auto"):
        return parse("CPU" if on.strip().casefold() == "cpu" else on)
    done = subprocess.run([sys.executable, "-c", _LOOK, on, package_parent()], capture_output=True, text=True, timeout=_SECONDS, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise UserError("this machine's devices cannot be read", "name the device, such as --on H100", done.stderr[-2000:])
    found = json.loads(lines[-1])
    if "problem" in found:
        raise UserError(found["problem"], found["remedy"])
    return from_dict(found["cluster"], "auto")


def one_of(cluster: Cluster, on: str) -> Cluster:
    if cluster.count > 1 and on.strip().casefold().startswith("auto"):
        return replace(cluster, nodes=1, devices_per_node=1, groups=(), matrix=None)
    if cluster.count > 1:
        raise UserError(f"--on {on} is {cluster.count} devices, and one process is watched", "name one device")
    return cluster
