"""SkyPilot: a task for `sky launch`."""

from __future__ import annotations

from typing import Any

from foretell.export import launch
from foretell.export.text import yaml
from foretell.export.types import Exported, header, label, machines_of, refuse
from foretell.plan import file
from foretell.plan.types import Plan

NAME = "task.yaml"
ACCELERATORS = {
    "H100-SXM-80GB": "H100", "H200-SXM-141GB": "H200", "B200": "B200", "A100-SXM-40GB": "A100", "A100-PCIe-40GB": "A100",
    "A100-SXM-80GB": "A100-80GB", "A100-PCIe-80GB": "A100-80GB", "L4": "L4", "L40S": "L40S", "A10": "A10", "T4": "T4",
    "V100-SXM-16GB": "V100", "V100-SXM-32GB": "V100-32GB", "RTX-5090": "RTX5090",
}  # fmt: skip
"""Names of the catalogue → SkyPilot's."""


def write(plan: Plan) -> Exported:
    where = machines_of(plan)
    if where.device not in ACCELERATORS and where.backend != "cpu":
        told = where.device or plan.hardware
        rents = ", ".join(dict.fromkeys(ACCELERATORS.values()))
        raise refuse("skypilot", f"the hardware {told}", f"it rents {rents}", "plan for hardware that it rents")
    if where.backend == "cpu":
        resources = {"cpus": f"{max(2, where.per_node)}+"}
    else:
        resources = {"accelerators": f"{ACCELERATORS[where.device]}:{where.per_node}"}
    lost = [*launch.lost(plan, where), "cloud, region, disk, spot: SkyPilot chooses the cheapest; add them to resources"]
    find = ['HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'] if where.nodes > 1 else []
    values: dict[str, Any] = {
        "name": label(plan), "num_nodes": where.nodes, "workdir": ".", "resources": resources,
        "setup": "pip install foretell\n", "run": "\n".join([*find, launch.command(plan, where, launch.HEAD)]) + "\n",
    }  # fmt: skip
    files = {NAME: header(plan, "skypilot", lost) + yaml(values), launch.PLAN: file.text_of(plan)}
    return Exported(files=files, command=f"sky launch {NAME}", lost=tuple(lost))
