"""How a stage ends early."""

from __future__ import annotations

from foretell.tune.verify.compare import Problem


class Refused(Exception):
    """The kernel is refused by a check."""

    def __init__(self, check: str, text: str) -> None:
        self.check, self.text = check, text
        super().__init__(f"{check}: {text}")


class Skipped(Exception):
    """A stage that does not apply here, and why."""


def refuse(problem: Problem | None) -> None:
    if problem is not None:
        raise Refused(problem.check, problem.text)
