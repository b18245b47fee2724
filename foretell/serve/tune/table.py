"""What was measured of settings, a row each as it comes: whoever is interrupted goes on where he was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell.decode import json_of
from foretell.errors import FileFormatError, UserError
from foretell.plan.types import ServeLayout
from foretell.search.serving.settings import ServeFigures, key_of


@dataclass(frozen=True, kw_only=True)
class MeasuredSettings:
    """One row."""

    settings: Mapping[str, Any]
    figures: ServeFigures | None
    """None: the server did not start, or did not answer."""
    failed: str = ""
    start_seconds: float = 0.0
    busy: float = 0.0
    """What other programs kept of the machine before: its load average."""
    date: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings), "figures": None if self.figures is None else self.figures.to_json(), "failed": self.failed,
            "start_seconds": round(self.start_seconds, 2), "busy": round(self.busy, 2), "date": self.date,
        }  # fmt: skip


class TuneTable:
    """Rows of one question in a file that may have those of others."""

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.path, self.asked = path, dict(asked)
        self.digest = hashlib.sha256(json.dumps(self.asked, sort_keys=True).encode()).hexdigest()[:12]
        self.rows: dict[str, MeasuredSettings] = {}
        self.resumed = 0
        """Rows that were there."""
        self.law: Any = None
        """Seconds of steps, where they were measured."""
        if path.exists():
            self._read()

    def known(self, layout: ServeLayout) -> MeasuredSettings | None:
        return self.rows.get(_key(key_of(layout)))

    def add(self, row: MeasuredSettings) -> None:
        self._write({**row.to_json(), "question": self.digest})
        self.rows[_key(row.settings)] = row

    def add_law(self, law: Any) -> None:
        self._write({"law": law, "question": self.digest})
        self.law = law

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                if not self.rows and self.law is None:
                    file.write(json.dumps({"asked": self.asked, "question": self.digest}) + "\n")
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror or error}", "another --table") from error

    def _read(self) -> None:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path} cannot be read: {error}", "another --table") from error
        for number, line in enumerate(lines, 1):
            try:
                row = json_of(line)
                if row["question"] != self.digest:
                    continue
                if "law" in row:
                    self.law = row["law"]
                elif "settings" in row:
                    figures = None if row["figures"] is None else ServeFigures.from_json(row["figures"])
                    kept = {name: row[name] for name in ("settings", "failed", "start_seconds", "busy", "date")}
                    self.rows[_key(row["settings"])] = MeasuredSettings(figures=figures, **kept)
                    self.resumed += 1
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                if number == len(lines):
                    continue  # cut off as it was written
                raise FileFormatError(f"{self.path}, line {number}, is no row of measured settings", "another --table, or delete it") from error


def _key(settings: Mapping[str, Any]) -> str:
    return json.dumps(dict(settings), sort_keys=True)
