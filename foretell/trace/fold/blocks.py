"""Find the repeated pieces of a module: the units of recompute, sharding and planning."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> list[str]:
    """Paths of the outermost repeated modules, in order of registration.

    A block is a child of a `ModuleList` or `Sequential` that has parameters and a sibling of its own
    class, where that class is not one of torch.nn's own leaves (a stack of `Linear` is no stack of blocks).
    """
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if isinstance(child, (nn.ModuleList, nn.Sequential)):
                members = list(child.named_children())
                classes = [type(member) for _, member in members]
                for member_name, member in members:
                    member_path = f"{child_path}.{member_name}"
                    repeated = classes.count(type(member)) > 1
                    if repeated and _is_composite(member) and any(True for _ in member.parameters()):
                        found.append(member_path)
                    else:
                        visit(member, member_path)
            else:
                visit(child, child_path)

    visit(model, "")
    return found


def _is_composite(module: nn.Module) -> bool:
    """Whether a module has parts of its own and is more than a plain container."""
    return any(True for _ in module.children()) and not isinstance(module, (nn.ModuleList, nn.Sequential))
