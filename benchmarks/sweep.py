"""How wide the door is: `foretell fit` over every model type, model and layer of the libraries that people use.

    python benchmarks/sweep.py --list                          write data/sweep.json: every name of the installed packages
    python benchmarks/sweep.py hf --out rows.jsonl             ask for all of them; rows that OUT has are passed over
    python benchmarks/sweep.py hf --open | --sealed            two thirds, or the third that nobody looks at while mending
    python benchmarks/sweep.py hf --failed rows.jsonl          once more, only what failed there
    python benchmarks/sweep.py hf --really --out really.jsonl  one real CPU step of each with the same batch, by PyTorch itself
    python benchmarks/sweep.py --tell rows.jsonl [really.jsonl]

Types of transformers are shrunken first (`sweep_shrink.py`), so that a real step can be run beside them. A row is an answer where the
command ends with 0 or 1; what it is refused with is kept. A type that transformers itself cannot build or run is left out of the
count, under its own error. Which third is sealed follows from a public seed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from sweep_shrink import ladder  # noqa: E402

LIST = HERE / "data" / "sweep.json"
SEED = "foretell sweep 2026-11"
DEVICE, LIMIT, REAL_LIMIT = "H100", "400", 300
"""Seconds that one trace, and one real step, may take."""
TWO, FP32 = "--micro-batch 2", "--precision fp32"
"""Remedies of steps that PyTorch itself refuses for one sample (a batch norm that sees one number) or in bf16 (a Fourier transform): they are
asked once more with them."""
LARGER = (4, 5)
"""Steps of the ladder that are tried where a smaller one has no answer: widths that the rule divides may not fit each other."""
_TOLD = ("taken", "stands in", "only", "draw", "left out", "built as")
"""Words of assumptions that are about the model, and not the same in every row."""
LIBRARIES = ("hf", "timm", "torchvision", "geometric", "diffusers")


def is_sealed(name: str) -> bool:
    return int(hashlib.sha256(f"{SEED}:{name}".encode()).hexdigest(), 16) % 3 == 0


def drawn(names: Iterable[str], count: int, seed: str = SEED) -> list[str]:
    """So many of them, by the hash of their name: the same for everybody."""
    return sorted(sorted(names, key=lambda name: hashlib.sha256(f"{seed}/drawn:{name}".encode()).hexdigest())[:count])


# ---------------------------------------------------------------------------------------------- names


def names_of(library: str) -> list[str]:
    if library == "hf":
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        return sorted(CONFIG_MAPPING_NAMES)
    if library == "timm":
        return sorted(importlib.import_module("timm").list_models())
    if library == "torchvision":
        return sorted(importlib.import_module("torchvision.models").list_models())
    if library == "geometric":
        from sweep_files import GEOMETRIC

        return sorted(GEOMETRIC())
    from sweep_files import DIFFUSERS

    return sorted(DIFFUSERS)


def write_list() -> None:
    from importlib.metadata import version

    from foretell.trace.hub.vision import mend_torchvision

    mend_torchvision()
    packages = {"hf": "transformers", "timm": "timm", "torchvision": "torchvision", "geometric": "torch_geometric", "diffusers": "diffusers"}
    told = json.loads(LIST.read_text()) if LIST.exists() else {}
    for library, package in packages.items():
        with contextlib.suppress(ImportError):
            told[library] = {"package": f"{package} {version(package)}", "names": names_of(library)}
    LIST.write_text(json.dumps(told, indent=0) + "\n")


_UNSAID = ("transformers_version", "output_attentions", "output_hidden_states", "return_dict", "dtype", "architectures", "id2label", "label2id")


def _said(part: Any) -> Any:
    """A config's dictionary without what is the same in all of them, which some types do not take back."""
    if not isinstance(part, dict):
        return part
    return {key: _said(value) for key, value in part.items() if not key.startswith("_") and key not in _UNSAID}


def shrunken(kind: str, folder: Path, after: int = 0) -> dict[str, Any]:
    """The smallest config of the ladder that transformers builds, written as config.json; which one, or transformers' error."""
    import torch
    from transformers import AutoConfig

    from foretell.trace.hub import build as hub
    from foretell.trace.hub import classes as hub_class

    errors: list[str] = []
    try:
        config = hub_class.mended(AutoConfig.for_model(kind, **hub_class.plain(kind, {})), {})
        plain = _said(hub_class.decoded(json.loads(config.to_json_string(use_diff=False))))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    cls: Any = None
    for step, candidate in list(enumerate(ladder(plain), 1))[after:]:
        try:
            made = AutoConfig.for_model(kind, **{key: value for key, value in candidate.items() if key != "model_type"})
            cls = cls or hub.class_of_model(made)
            with torch.device("meta"):
                cls, model = hub_class.built(made, lambda one, made=made: one(made))
            folder.mkdir(parents=True, exist_ok=True)
            content = {**json.loads(made.to_json_string()), "model_type": kind, "architectures": [cls.__name__]}
            (folder / "config.json").write_text(json.dumps(content))
            return {"step": step, "class": cls.__name__, "parameters": sum(one.numel() for one in model.parameters())}
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}"[:300])
    return {"error": errors[-1], "errors": errors, "class": cls.__name__ if cls is not None else None}


# ---------------------------------------------------------------------------------------------- asking


def model_of(library: str, name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    if library == "hf":
        path = folder / name
        kept = path / "shrunk.json"
        if not kept.exists():
            found = shrunken(name, path)
            path.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
        told = json.loads(kept.read_text())
        return f"hf:{path}", told
    if library in ("geometric", "diffusers"):
        return f"{HERE / 'sweep_files.py'}:{library}_{name}", {}
    return f"{library}:{name}", {}


def fit(model: str, micro_batch: int = 1, precision: str = "") -> dict[str, Any]:
    """What the command says, and how it ends."""
    from foretell.cli import main

    out, err = io.StringIO(), io.StringIO()
    begun = time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["fit", model, "--on", DEVICE, "--json", "--no-cache", "--time-limit", LIMIT, "--micro-batch", str(micro_batch),
                     *(["--precision", precision] if precision else [])])  # fmt: skip
    row: dict[str, Any] = {"exit": code, "seconds": round(time.perf_counter() - begun, 2)}
    try:
        told = json.loads(out.getvalue())
    except ValueError:
        return {**row, "error": {"problem": (out.getvalue() + err.getvalue())[-600:]}}
    if "error" in told:
        if TWO in str(told["error"]) and micro_batch == 1:
            return {**fit(model, 2, precision), "micro_batch": 2}
        if FP32 in str(told["error"]) and not precision:
            return {**fit(model, micro_batch, "fp32"), "precision": "fp32"}
        return {**row, "error": {key: str(value)[:1500] for key, value in told["error"].items()}}
    return {**row, "assumed": [one for one in told.get("assumptions", []) if any(word in one for word in _TOLD)]}


def trace(model: str, micro_batch: int = 1, precision: str = "") -> dict[str, Any]:
    """The same question as far as the trace, without the command around it: what takes the longest and refuses the most."""
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe
    from foretell.trace.sandbox import child

    recipe = Recipe(precision=precision) if precision else Recipe()
    asked = child.request(Source(model=model, micro_batch=micro_batch), recipe, (9, 0), {})
    found = child.answered(lambda: child.trace_asked(asked))
    if "error" in found and TWO in str(found["error"]) and micro_batch == 1:
        return {**trace(model, 2, precision), "micro_batch": 2}
    if "error" in found and FP32 in str(found["error"]) and not precision:
        return {**trace(model, micro_batch, "fp32"), "precision": "fp32"}
    if "error" in found:
        return {"exit": 70 if found["error"]["kind"] == "InternalError" else 2, "error": {key: text[-1500:] for key, text in found["error"].items()}}
    told = [*json.loads(found["text"])["meta"]["assumed"], *found["notes"]]
    return {"exit": 0, "assumed": [one for one in told if any(word in one for word in _TOLD)]}


def in_a_fork(work: Any, limit: float) -> dict[str, Any]:
    """What `work` gives, in a process of its own that may crash or hang."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(False)

    def run() -> None:
        warnings.simplefilter("ignore")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        try:
            there.send(work())
        except BaseException as error:
            import traceback

            frames = traceback.extract_tb(error.__traceback__)[-3:]
            at = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
            there.send({"error": f"{type(error).__name__}: {error}"[:400], "at": at})

    process = context.Process(target=run)
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv() if here.poll(limit) else {"error": f"longer than {limit} s"}
    except EOFError:
        process.join(5)
        found = {"error": f"the process ended with {process.exitcode} and no answer"}
    process.kill()
    process.join()
    return found


def really(model: str) -> dict[str, Any]:
    """One real step in fp32 with foretell's batch: PyTorch and the library alone."""
    import torch

    from foretell.trace.load.model import Source, load
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.step import Step

    torch.manual_seed(0)
    begun = time.perf_counter()
    step = Step(load(Source(model=model)), Recipe(precision="fp32"), device_type="cpu")
    step.create_optimizer()
    step.micro_batch()
    step.update()
    return {"seconds": round(time.perf_counter() - begun, 2)}


def peaks(model: str) -> dict[str, Any]:
    """Peak bytes of a step in fp32 on this CPU: of a trace as the CPU runs it, and of the step really run."""
    from foretell.simulate.memory.replay import peak_live
    from foretell.trace.load.model import Source
    from foretell.trace.recipe import Recipe
    from foretell.trace.record.on_cpu import measure_on_cpu, trace_as_cpu

    source, recipe = Source(model=model, seq=128), Recipe(precision="fp32")
    trace = trace_as_cpu(source, recipe)
    return {"predicted": peak_live(trace, tuple(trace.schedule)), "measured": measure_on_cpu(source, recipe)[0], "assumed": trace.meta["assumed"]}


# ---------------------------------------------------------------------------------------------- rows


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """By library and name; a later row stands for an earlier one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {f"{row['library']}:{row['name']}": row for row in map(json.loads, lines)}


def is_answer(row: dict[str, Any]) -> bool:
    return row.get("exit") in (0, 1)


def sweep(library: str, names: list[str], out: Path, real: str, folder: Path, quick: float = 0) -> None:
    from foretell.trace.hub import vision as hub_vision
    from foretell.trace.sandbox import server

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    import sweep_preload

    hub_vision.mend_torchvision()
    for module in sweep_preload.PRELOAD:
        importlib.import_module(module)
    if not real and not quick:
        server.ready("sweep_preload")
    with out.open("a") as file:
        for name in names:
            model, told = model_of(library, name, folder)
            row: dict[str, Any] = {"library": library, "name": name, **({"shrunken": told} if told else {})}
            if "error" in told:
                row["excluded"] = told["error"]
            elif quick:
                row.update(_traced(model, quick))
                if _is_untrainable(row):
                    row["excluded"] = row["error"]["problem"]
                elif library == "hf" and row["exit"] not in (0, 1, 139):
                    row = _larger(name, folder, model, told["step"], quick) or row
            elif real:
                row[real] = in_a_fork(lambda model=model: (peaks if real == "peaks" else really)(model), REAL_LIMIT)
            else:
                row.update(fit(model))
            file.write(json.dumps(row).replace(f"hf:{folder}/", "hf:") + "\n")  # where shrunken configs lie is nobody's business
            file.flush()


def _is_untrainable(row: dict[str, Any]) -> bool:
    """Whether transformers itself has no step of training for a class: foretell says so, and PyTorch would."""
    return any(words in str(row.get("error")) for words in ("has no forward of its own", "no output of the model depends on a weight"))


def _larger(name: str, folder: Path, model: str, after: int, limit: float) -> dict[str, Any] | None:
    """The row of a larger config that has an answer; without one the config stays what it was."""
    for step in [step for step in LARGER if step > after]:
        told = shrunken(name, folder / name, step - 1)
        again = _traced(model, limit) if "error" not in told else {}
        if again.get("exit") == 0:
            (folder / name / "shrunk.json").write_text(json.dumps(told))
            return {"library": "hf", "name": name, "shrunken": told, **again}
    shrunken(name, folder / name, after - 1)
    return None


def _traced(model: str, limit: float) -> dict[str, Any]:
    found = in_a_fork(lambda: trace(model), limit)
    return found if "exit" in found else {"exit": 139, "error": {"problem": found["error"]}}


def tell(path: Path, real: Path | None) -> None:
    rows, run = rows_of(path), rows_of(real) if real is not None else {}
    for library in LIBRARIES:
        mine = {key: row for key, row in rows.items() if row["library"] == library}
        if not mine:
            continue
        left_out = {key for key, row in mine.items() if "excluded" in row or "error" in run.get(key, {}).get("really", {})}
        for part, inside in (("sealed", is_sealed), ("open", lambda name: not is_sealed(name))):
            counted = {key: row for key, row in mine.items() if inside(row["name"])}
            can = [row for key, row in counted.items() if key not in left_out]
            good = sum(map(is_answer, can))
            print(f"{library} {part}: {good} of {len(can)} answered ({100 * good / max(1, len(can)):.1f} %), {len(counted) - len(can)} left out")
        if library == "hf":
            print(by_real_steps(mine.values()))
        codes = Counter(row.get("exit") for row in mine.values())
        print(f"{library}: exit codes {dict(codes)}")


def by_real_steps(rows: Iterable[dict[str, Any]]) -> str:
    """Of the types of which PyTorch itself runs a CPU step with foretell's batch. That was run for refused types (`really`); the answered
    are taken to run, and so is a refused one that was not tried."""
    built = [row for row in rows if "excluded" not in row]
    refused = [row for row in built if not is_answer(row)]
    fails = [row for row in refused if "error" in row.get("really", {})]
    untried = sum("really" not in row for row in refused)
    runs, good = len(built) - len(fails), len(built) - len(refused)
    return (
        f"of {runs} that run a CPU step with the same batch {good} answered ({100 * good / max(1, runs):.1f} %); refused though PyTorch runs them "
        f"or nobody tried: {runs - good} ({untried} not tried); {len(fails)} fail there too"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", choices=LIBRARIES)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--sealed", action="store_true")
    parser.add_argument("--failed", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="one name of so many")
    parser.add_argument("--part", default="0/1", help="one of so many parts, for several processes at once: 3/16")
    parser.add_argument("--limit", type=float, default=float(LIMIT), help="seconds that one trace may take")
    parser.add_argument("--drawn", type=int, help="so many of them, by the public seed")
    parser.add_argument("--really", action="store_true")
    parser.add_argument("--peaks", action="store_true", help="peak bytes predicted for this CPU beside those of a step run here")
    parser.add_argument("--answered", type=Path, help="only what has an answer there")
    parser.add_argument("--quick", action="store_true", help="trace only, forked from this process")
    parser.add_argument("--tell", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, help="where shrunken configs are kept")
    asked = parser.parse_args()
    if asked.list:
        write_list()
    if asked.tell:
        tell(asked.tell[0], asked.tell[1] if len(asked.tell) > 1 else None)
    if asked.library is None or asked.out is None:
        return
    names = asked.only or json.loads(LIST.read_text())[asked.library]["names"]
    if asked.open or asked.sealed:
        names = [name for name in names if is_sealed(name) == asked.sealed]
    if asked.failed:
        old = rows_of(asked.failed)
        names = [name for name in names if (row := old.get(f"{asked.library}:{name}")) and not is_answer(row) and "excluded" not in row]
    if asked.answered:
        names = [name for name in names if is_answer(rows_of(asked.answered).get(f"{asked.library}:{name}", {}))]
    if asked.drawn:
        names = drawn(names, asked.drawn)
    done = rows_of(asked.out)
    part, parts = map(int, asked.part.split("/"))
    names = [name for name in names[:: asked.every] if f"{asked.library}:{name}" not in done][part::parts]
    folder = asked.folder or Path(tempfile.gettempdir()) / "foretell-sweep"
    real = "peaks" if asked.peaks else "really" if asked.really else ""
    sweep(asked.library, names, asked.out, real, folder, asked.limit if asked.quick else 0)


if __name__ == "__main__":
    main()
