"""`prove`: configurations nobody chose, predicted, sealed and run here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.errors import UserError
from foretell.notebook import Displayable
from foretell.options import ProveOptions

if TYPE_CHECKING:
    from foretell.prove.forecast import ForecastRequest

MOST_COUNT = 1000


@dataclass(frozen=True, kw_only=True, repr=False)
class Proof(Displayable):
    """Every row that was predicted and sealed, beside what was measured of it."""

    file: Path
    sha256: str
    summary: Mapping[str, Any]
    rows_measured: tuple[Mapping[str, Any], ...]

    @property
    def good(self) -> bool:
        """Nothing that was said to fit ran out of memory."""
        return not self.summary["limits"]["wrong_fits"]

    def to_json(self) -> dict[str, Any]:
        return {"file": str(self.file), "sha256": self.sha256, "summary": dict(self.summary), "rows": list(self.rows_measured)}

    def headline(self) -> str:
        return f"{len(self.rows_measured)} configurations of {self.file}: {self.summary['limits']['wrong_fits']} wrong fits"

    def rows(self) -> Sequence[tuple[str, str]]:
        return [(str(name), str(value)) for name, value in self.summary.items()]


def prove(**given: Any) -> Proof:
    """Draw configurations from a public seed, predict and seal them, run them on this machine, and judge every row.

    Takes `seed`, `count` and `seconds` as `foretell compare prove` does; what was stopped goes on when it is asked again.
    """
    options = ProveOptions(**given)
    seed = options.seed or f"foretell-{time.strftime('%Y-%m-%d')}"
    path = Path("runs") / f"prove-{seed.replace('/', '-')}-auto-{options.count}.json"
    if not path.exists():
        seal(seed, options.count, "auto", path)
    measure(path, options.seconds)
    return judged(path)


def seal(seed: str, count: int, on: str, path: Path, progress: Callable[[str], None] = lambda text: None) -> str:
    """Predict and write the sealed file; a journal beside it lets a stopped one go on."""
    from foretell.prove import seal as sealing
    from foretell.prove.forecast import forecast
    from foretell.trace.store.cache import versions

    if not 1 <= count <= MOST_COUNT:
        raise UserError(f"-n {count} is no number of configurations", f"ask for 1 to {MOST_COUNT}, such as -n 20")
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    journal = path.with_name(f".{path.name}.partial")
    sealed = forecast(asked(seed, count, on), versions(), made, journal=journal, progress=progress)
    found: str = sealing.write(sealed, path)
    journal.unlink(missing_ok=True)
    return found


def asked(seed: str, count: int, on: str) -> ForecastRequest:
    """The device that is predicted for."""
    from foretell.hardware import parse
    from foretell.prove.forecast import ForecastRequest
    from foretell.prove.run import this_device

    if on != "auto":
        cluster = parse(on)
        if cluster.count > 1:
            raise UserError(f"{on} is {cluster.count} devices, and rows are run on one", "name one device, such as H200")
        if cluster.device.backend == "cpu":
            raise UserError(f"{on} is a CPU, and CPUs differ too much to be predicted unseen", "leave --on away, on that machine")
        return ForecastRequest(seed=seed, count=count, cluster=cluster)
    here = this_device()
    cluster = parse(here["device"] if here["backend"] != "cpu" else "auto")
    cluster = replace(cluster, device=cluster.device.with_memory(int(here["memory_bytes"]), "reported by torch on this machine"))
    reported = here["reported_as"] if here["backend"] == "cpu" else None
    return ForecastRequest(seed=seed, count=count, cluster=cluster, reported_as=reported)


def measure(path: Path, seconds: float, progress: Callable[[str], None] = lambda text: None) -> None:
    """Run what was sealed on this machine; rows that are there stay."""
    from foretell.prove import run
    from foretell.prove import seal as sealing

    sealed, found = sealing.read(path)
    here = run.this_device()
    run.check_device(sealed, here)
    about = {"date": time.strftime("%Y-%m-%d"), "device": here["reported_as"], "torch": here["torch"]}
    run.measure(sealed, found, run.rows_path(path), about, seconds=seconds, progress=progress)


def judged(path: Path) -> Proof:
    """What was measured of a sealed file, row by row."""
    from foretell.prove import run, tell
    from foretell.prove import seal as sealing

    sealed, found = sealing.read(path)
    rows = tell.judged(sealed, run.read_rows(run.rows_path(path), found))
    return Proof(file=path, sha256=found, summary=tell.summary(sealed, rows), rows_measured=tuple(one.to_json() for one in rows))
