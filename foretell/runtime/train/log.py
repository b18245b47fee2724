"""What a run writes down while it goes: one JSON object a line, and TensorBoard or W&B where asked for."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foretell.decode import Mismatch, value_of
from foretell.errors import FileFormatError, MissingPackage, UnknownName, UserError
from foretell.files import write_atomically
from foretell.units import gib, human_bytes, relative_error, signed_percent

if TYPE_CHECKING:
    from foretell.checkpoint.saver import SaveResult
    from foretell.runtime.observe.measure import StepReading

ADAPTERS = ("tensorboard", "wandb")
LOG = "log.jsonl"
SLOW_WRITER, SLOW_SECONDS = 2.0, 1.0
"""A rank that writes its part of a checkpoint so many times as long as the others, and so many seconds longer, is named."""


class Adapter(Protocol):
    """Another place that figures go to."""

    def write(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """`log.jsonl` of a run folder and whatever adapters were asked for. Rows after `last_step` are of a run that was
    cut short and will be written again, so they go.

    No row is worth a run: one that cannot be written (a full disk, a logging service that is gone) is counted, the user is
    told once, and training goes on."""

    def __init__(
        self, folder: Path, adapters: Sequence[Adapter] = (), *, last_step: int | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.path, self.tell = folder / LOG, tell
        self.adapters = list(adapters)
        self.lost = 0
        """Rows that could not be written."""
        self._torn = False
        """The last row was written in part."""
        self._stream: Any = None
        try:
            if last_step is not None:
                _cut(self.path, last_step)
            self._stream = self.path.open("ab", buffering=0)
        except OSError as error:
            self._lose(error)

    def write(self, event: str, step: int, **values: Any) -> None:
        """One row: what it is about, the step, and what is known."""
        row = {"event": event, "step": step, **{key: _sayable(value) for key, value in values.items() if value is not None}}
        try:
            self._append(json.dumps(row).encode() + b"\n")
        except OSError as error:
            self._lose(error)
        figures = {f"{event}/{key}": float(value) for key, value in values.items() if isinstance(value, int | float)}
        for adapter in list(self.adapters):
            try:
                adapter.write(step, figures)
            except Exception as error:  # whatever a logging service raises
                self.adapters.remove(adapter)
                self.tell(f"step {step}: {type(adapter).__name__} gets no more rows: {type(error).__name__}: {error}")

    def _append(self, row: bytes) -> None:
        if self._stream is None:
            self._stream = self.path.open("ab", buffering=0)
        left = memoryview(b"\n" + row if self._torn else row)  # what was written of the row before is a line of its own
        while left:
            written = self._stream.write(left) or 0
            left, self._torn = left[written:], self._torn or written > 0
        self._torn = False

    def back_to(self, step: int) -> None:
        """Steps after that one are trained anew, and written again."""
        try:
            if self._stream is not None:
                self._stream.close()
            self._stream = None
            _cut(self.path, step)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        if self.lost == 1:
            self.tell(f"{self.path} cannot be written: {error.strerror or error}; training continues, its log rows are lost meanwhile")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._stream is not None:
                self._stream.close()
        if self.lost:
            self.tell(f"{self.lost} rows of {self.path} could not be written")
        for adapter in self.adapters:
            with contextlib.suppress(Exception):
                adapter.close()


def _sayable(value: Any) -> Any:
    """JSON has no word for what is no number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cut(path: Path, last_step: int) -> None:
    rows = _lines(path)
    kept = [row for _, row in rows if _fault(row) is None and row["step"] <= last_step]
    if len(kept) < len(rows) or (path.exists() and not path.read_bytes().endswith(b"\n")):
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a log; lines that were cut in the writing are left out, a row of other types than a log's is an error."""
    rows: list[dict[str, Any]] = []
    for number, row in _lines(path):
        fault = _fault(row)
        if fault is not None:
            raise FileFormatError(f"{path}, line {number}: {fault}", "delete that line")
        rows.append(row)
    return rows


def _lines(path: Path) -> list[tuple[int, Any]]:
    """Number and content of every line that is whole."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from None
    found = []
    for number, line in enumerate(lines, 1):
        with contextlib.suppress(ValueError, RecursionError):
            found.append((number, json.loads(line)))
    return found


def _fault(row: Any) -> str | None:
    """What is wrong with the types of a row."""
    try:
        value_of(_Row, row)
    except Mismatch as error:
        return str(error)
    return None


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What rows have that readers of a log rely on; figures may be texts such as nan."""

    event: str
    step: int
    command: str | None
    loss: float | str | None
    seconds: float | str | None
    lr: float | str | None
    grad_norm: float | str | None


# --- a line for people -----------------------------------------------------------------------------------------------


def line(
    reading: StepReading, total: int, *, rate: float, unit: str, mfu: float | None = None, memory_bytes: int | None = None,
    predicted_seconds: float | None = None, measured_seconds: float | None = None, busy: bool = False,
) -> str:  # fmt: skip
    """`step 12/100  loss 3.2145  86.1 ms  380,000 tokens/s  MFU 31.5 %  30.4 GiB  predicted 84.3 ms (-2.1 %)`; `busy`: so is the machine."""
    parts = [
        f"step {reading.step:>{len(str(total))}}/{total}", f"loss {reading.loss:.4f}", seconds(reading.seconds),
        f"{_rounded(rate)} {unit}/s",
    ]  # fmt: skip
    if mfu is not None:
        parts.append(f"MFU {100 * mfu:.1f} %")
    if memory_bytes is not None:
        parts.append(gib(memory_bytes))
    error = relative_error(predicted_seconds, measured_seconds if measured_seconds is not None else reading.seconds)
    if predicted_seconds is not None and error is not None:
        parts.append(f"predicted {seconds(predicted_seconds)} ({signed_percent(error)}{', this machine is busy' if busy else ''})")
    return "  ".join(parts)


def seconds(value: float) -> str:
    """Three digits, in the unit that reads best."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _rounded(value: float) -> str:
    """Three digits are real, the rest is noise."""
    if value < 100:
        return f"{value:.3g}"
    digits = len(str(int(value))) - 3
    return f"{round(value, -digits):,.0f}"


# --- adapters --------------------------------------------------------------------------------------------------------


def adapters(names: Sequence[str], folder: Path, settings: Mapping[str, Any], *, last_step: int | None) -> list[Adapter]:
    """The adapters of that name, made; a package that is missing is said before the run."""
    makers: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB}
    for name in names:
        if name not in makers:
            raise UnknownName("log", name, ADAPTERS, f"known: {', '.join(ADAPTERS)}")
    return [makers[name](folder, settings, last_step) for name in names]


class TensorBoard:
    """Event files under `tensorboard/` of the run folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], last_step: int | None) -> None:
        _wanted("tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        purge = None if last_step is None else last_step + 1
        self.writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases, named after the run folder; a resumed run goes on in it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], last_step: int | None) -> None:
        module = _wanted("wandb")
        self.run = module.init(
            project="foretell", name=folder.name, id=folder.name, dir=str(folder), config=dict(settings),
            resume="allow" if last_step is not None else None,
        )  # fmt: skip

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log(dict(figures), step=step)

    def close(self) -> None:
        self.run.finish()


def disk_words(file: Any, predicted: Mapping[str, Any], *, last: bool) -> str | None:
    """That the disk is slower than the plan took it to be; at the end how fast it was. None where there is nothing to say."""
    if file is None:
        return None
    read, write = (predicted.get(f"disk_{way}_bytes_per_second") for way in ("read", "write"))
    said = file.slower(read, write) if read and write else None
    moved, seconds = file.measured()
    if said is None and last and seconds:
        return f"disk: {human_bytes(moved)} moved to and from {file.folder} at {human_bytes(moved / seconds)}/s"
    return said


def _wanted(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackage(package, f"--log {package}", package) from error


def slowest_rank(done: SaveResult) -> dict[str, float]:
    """Of a row about a save: who wrote longest, and how long the others took. Nothing of one process."""
    if done.slowest is None:
        return {}
    rank, seconds, others = done.slowest
    return {"slowest_rank": rank, "slowest_seconds": seconds, "others_seconds": others}


class SaveWords:
    """What a person should know of saves, each once in a run; of slow ranks, once for each."""

    def __init__(self) -> None:
        self._told: set[int | None] = set()

    def of(self, done: SaveResult) -> list[str]:
        lines = []
        if done.direct_bytes and None not in self._told:
            self._told.add(None)
            size = human_bytes(done.direct_bytes)
            waited = f"training waited {done.stall_seconds:.1f} s while they were written"
            lines.append(f"host memory has no room for a copy of {size} that are in it: {waited}")
        if done.slowest is not None:
            rank, seconds, others = done.slowest
            if rank not in self._told and seconds > SLOW_WRITER * others and seconds - others > SLOW_SECONDS:
                self._told.add(rank)
                took = f"rank {rank} took {seconds:.1f} s to write its part of the checkpoint, the others {others:.1f} s"
                lines.append(f"{took}: look at its disk or network")
        return lines
