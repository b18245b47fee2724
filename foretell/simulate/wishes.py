"""What a user may ask for besides model and hardware: a whole run, a region, a price. Plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foretell.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much a whole run processes."""

    number: float
    unit: str

    @classmethod
    def of(
        cls, *, tokens: float | None, samples: float | None, epochs: float | None, dataset_size: float | None
    ) -> Amount | None:
        given = [name for name, value in (("tokens", tokens), ("samples", samples), ("epochs", epochs)) if value is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are given together", "give one of tokens, samples or epochs")
        for name, value in (("tokens", tokens), ("samples", samples), ("epochs", epochs), ("dataset_size", dataset_size)):
            if value is not None and not 0 < value < float("inf"):
                raise UserError(f"{name} is {value}", f"give {name} a number above zero, such as 1e9")
        if epochs is not None and dataset_size is None:
            raise UserError("epochs are given without the size of the data set", "add --dataset-size, the samples of one epoch")
        if epochs is not None and dataset_size is not None:
            return cls(number=epochs * dataset_size, unit="samples")
        if tokens is not None:
            return cls(number=tokens, unit="tokens")
        return cls(number=samples, unit="samples") if samples is not None else None


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the user asked for besides the model and the hardware."""

    amount: Amount | None = None
    region: str | None = None
    price: float | None = None
    trace_out: str | None = None
    mtbf: float | None = None
    """Seconds between failures of the whole run, on average."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
