"""Kubernetes: an indexed Job with a headless Service, and the plan as a ConfigMap. Needs no operator."""

from __future__ import annotations

from typing import Any

from foretell.export import launch
from foretell.export.text import yaml
from foretell.export.types import Exported, Machines, header, label, machines_of
from foretell.plan import file
from foretell.plan.types import Plan

NAME = "job.yaml"
IMAGE = "pytorch/pytorch:latest"
RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}


def write(plan: Plan) -> Exported:
    where, name = machines_of(plan), label(plan)
    lost = [
        *launch.lost(plan, where),
        f"image: {IMAGE} stands for one with torch; foretell is installed when a pod starts",
        "storage: the run folder is the pod's own; mount a shared volume at /train/run to keep it",
    ]
    parts = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-plan"}, "data": {launch.PLAN: file.text_of(plan)}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
         "spec": {"clusterIP": "None", "selector": {"job-name": name}, "ports": [{"name": "rendezvous", "port": launch.PORT}]}},
        _job(plan, where, name),
    ]  # fmt: skip
    text = header(plan, "k8s", lost) + "---\n".join(yaml(part) for part in parts)
    return Exported(files={NAME: text, launch.PLAN: file.text_of(plan)}, command=f"kubectl apply -f {NAME}", lost=tuple(lost))


def _job(plan: Plan, where: Machines, name: str) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "train", "image": IMAGE, "workingDir": "/train",
        "command": ["bash", "-c", f"pip install foretell && cp /plan/{launch.PLAN} . && {launch.command(plan, where, f'{name}-0.{name}')}"],
        "volumeMounts": [{"name": "plan", "mountPath": "/plan"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    if where.backend in RESOURCES:
        container["resources"] = {"limits": {RESOURCES[where.backend]: where.per_node}}
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name},
        "spec": {
            "completions": where.nodes, "parallelism": where.nodes, "completionMode": "Indexed", "backoffLimit": 0,
            "template": {"spec": {
                "subdomain": name, "restartPolicy": "Never", "containers": [container],
                "volumes": [
                    {"name": "plan", "configMap": {"name": f"{name}-plan"}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}},
                ],
            }},
        },
    }  # fmt: skip
