"""How an answer shows itself: one line where Python prints it, a table where a notebook does. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Displayable:
    """An answer with a headline and a few rows; a class of it gives both."""

    def headline(self) -> str:
        """One line: the verdict, of what, on what."""
        raise NotImplementedError

    def rows(self) -> Sequence[tuple[str, str]]:
        """What there is to know first, and how it is known."""
        return ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline()}>"

    def _repr_html_(self) -> str:
        lines = "".join(
            f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(value)}</td></tr>' for name, value in self.rows()
        )
        return f"<div><b>{escape(self.headline())}</b><table>{lines}</table></div>"
