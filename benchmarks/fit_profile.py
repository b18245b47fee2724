"""Fit the shipped profiles anew to the rows measured for them.

    python benchmarks/fit_profile.py                     every journal beside a shipped profile
    python benchmarks/fit_profile.py H200-SXM-141GB      one of them
    python benchmarks/fit_profile.py path/to/X.rows.jsonl.gz
    python benchmarks/fit_profile.py H200-SXM-141GB --families stream convolution   these families of ops alone; the rest stays

Reads `X.rows.jsonl.gz`, traces its reference steps, fits ops, host and watts, and writes `X.json` beside it. To the rows of the H200 those
of the ops of whole models are added (`model_ops.py`).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from foretell.api import fit_profile  # noqa: E402
from foretell.errors import UserError  # noqa: E402
from foretell.hardware import Device  # noqa: E402
from foretell.hardware.catalog import find  # noqa: E402
from foretell.hardware.probe.journal import gather  # noqa: E402
from foretell.hardware.profile import Measured, OpRow, Profile, load, save  # noqa: E402
from foretell.price.kernels.features import Shape, describe  # noqa: E402
from foretell.price.kernels.ops import learn  # noqa: E402

FOLDER = ROOT / "foretell" / "hardware" / "profiles"
END = ".rows.jsonl.gz"
MODELS_OF = "H200-SXM-141GB"
"""The device that ops of whole models were timed on."""


def device_of(measured: Measured) -> Device:
    """The device as the catalogue has it now; a CPU as it was found where it was measured."""
    if measured.about.backend != "cpu":
        return find(measured.about.device)
    figures = dict(measured.about.figures)
    capability = figures["compute_capability"]
    return Device(**{**figures, "compute_capability": tuple(capability) if capability else None})


def with_models(measured: Measured, journal: Path) -> Measured:
    """With the ops of whole models, where they were timed on that device, in the order of a journal."""
    if journal.name.removesuffix(END) != MODELS_OF:
        return measured
    import model_ops

    return replace(measured, cases=tuple(sorted((*measured.cases, *model_ops.cases()), key=lambda case: case.family)))


def report(profile: Profile) -> None:
    for family, found in profile.accuracy["ops"].items():
        print(f"  {family:<14}" + "  ".join(f"{name} {value:.4g}" for name, value in found.items()))
    print(f"  host {profile.accuracy['host']}  power {profile.accuracy['power']}  {profile.fitted}")


def of_families(measured: Measured, old: Profile, families: list[str]) -> Profile:
    """The profile with the ops of some families fitted anew."""
    device = device_of(measured)
    kept = [(row, group) for row, group in zip(measured.rows, measured.groups, strict=True) if _family(row, device) in families]
    fitted = learn([row for row, _ in kept], device, groups=[group for _, group in kept])
    ops = {**old.ops, **fitted.to_dict()}
    accuracy = {**old.accuracy["ops"], **{name: dict(family.accuracy) for name, family in fitted.families.items()}}
    return replace(old, ops=ops, accuracy={**old.accuracy, "ops": accuracy})


def _family(row: OpRow, device: Device) -> str:
    described = describe(Shape(row.name, row.inputs, row.outputs, row.attrs), device)
    return described.family if described is not None else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="names of shipped profiles, or paths of journals; all shipped by default")
    parser.add_argument("--families", nargs="+", help="fit the ops of these families alone")
    options = parser.parse_args()
    given = options.names
    journals = [Path(name) if name.endswith(END) else FOLDER / f"{name}{END}" for name in given]
    for journal in journals or sorted(FOLDER.glob(f"*{END}")):
        target = journal.with_name(journal.name.removesuffix(END) + ".json")
        began = time.perf_counter()
        try:
            measured = with_models(gather(journal), journal)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        profile = of_families(measured, load(target), options.families) if options.families else fit_profile(measured, device_of(measured))
        save(profile, target)
        print(f"{target.name}: {len(measured.rows):,} rows, {time.perf_counter() - began:.0f} s, {target.stat().st_size / 1e6:.1f} MB")
        report(profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
