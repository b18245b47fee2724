"""What servers and kernels leave and say, for `test_fuzz_readers`: plans to serve, loads, records, tables, requests, messages of a candidate."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from foretell.errors import UserError
from foretell.export import serving as exported
from foretell.plan import file as plans
from foretell.plan.types import Plan, ServeLayout
from foretell.report.html import page as pages
from foretell.report.html import served, serving
from foretell.serve import asked
from foretell.serve.text import ByteWords
from foretell.serve.tune.table import TuneTable
from foretell.simulate.serving.load import load_of
from foretell.tune.generate.curate import curated
from foretell.tune.generate.memory import TunerMemory
from foretell.tune.generate.replay import replayed
from foretell.tune.search.kept import KeptRows, KeptWinner, kept_rows, winners_elsewhere
from foretell.tune.search.space import Axis, ConfigSpace
from foretell.tune.search.trial import TrialResult
from foretell.tune.verify import wire
from tests.pure import mutations as spoil
from tests.pure.reader_cases import Case
from tests.pure.test_report_serving import BENCH, SEARCH, TUNE

QUESTION = {"model": "tiny"}
TRANSCRIPT = Path(__file__).parents[1] / "data" / "kernels" / "strategy.jsonl"
KERNEL, SPACE = {"op": "norm", "template": "rows", "device": "H200"}, ConfigSpace((Axis("rows", (1, 2, 4)), Axis("reuse", (False, True))))
FORECAST = {"forecast": {
    "model": "hf:acme/tiny", "device": "H100", "engine": "vllm", "weights": "bf16", "memory_share": 0.9, "tp": 1, "running": 8, "step_tokens": 512,
    "longest": 900, "pages": 60, "page_tokens": 16, "weights_bytes": 1000,
}}  # fmt: skip
BODY = {"prompt": "Once", "max_tokens": 4, "n": 2, "temperature": 0.5, "stop": ["x"], "logprobs": 2, "stream": True,
        "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "hi"}]}  # fmt: skip


def build(at: Path, plan: Plan) -> None:
    plans.write(plan.with_(serve=ServeLayout(pages=60, load="rate=8, in=64±9, out=16", slo="tpot=40ms"), predicted={}), at / "to-serve.json")
    (at / "load.csv").write_text("time,in,out\n" + "".join(f"{0.5 * n},{n + 3},{n + 1}\n" for n in range(9)))
    (at / "load.jsonl").write_text("".join(json.dumps({"time": 0.5 * n, "in": n + 3, "out": n + 1}) + "\n" for n in range(9)))
    for name, content in (("bench", BENCH), ("search", SEARCH), ("tune", TUNE), ("forecast", FORECAST), ("body", BODY)):
        (at / f"{name}.json").write_text(json.dumps(content))
    record = at / "record"
    record.mkdir()
    (record / "serve.json").write_text(json.dumps({"serve": {
        "model": "tiny", "device": "cpu", "dtype": "float32", "pages": 60, "page_tokens": 16, "step_tokens": 512, "running": 8, "tp": 1, "pp": 1,
    }}))
    step = {"seconds": 0.01, "generating": 2, "attended": 40, "chunks": [[0, 8]], "samples": 2, "running": 2, "waiting": 1}
    steps = [{**step, "at": 0.1 * n, "pages": n} for n in range(12)]
    (record / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    row = {"at": 0.1, "in": 8, "out": 4, "first": 0.2, "last": 0.5, "ended": "length"}
    (record / "requests.jsonl").write_text(3 * (json.dumps(row) + "\n"))
    table = TuneTable(at / "table.jsonl", QUESTION)
    table.add_law({"a": 1.0})
    (at / "transcript.jsonl").write_bytes(TRANSCRIPT.read_bytes())
    with kept(at) as rows:
        rows.add({"rows": 1, "reuse": True}, TrialResult(status="timed", seconds=1e-3, speedup=1.5))
        rows.end(KeptWinner(config={"rows": 1, "reuse": True}, speedup=1.5, low=1.4, beside="eager", date="2026-11-19"))
    rows.path.rename(at / "kept.jsonl")
    memory = TunerMemory("cpu", at / "memory.jsonl")
    memory.keep("draft", ("aten.mul", "aten.mean"), "class ModelNew: pass", 2.0, "all rows at once")
    memory.save()
    (at / "message").write_bytes(wire.encode({"kind": "done", "seconds": 0.5}, (b"abcd",)) + b"abcd")


def kept(at: Path) -> KeptRows:
    return kept_rows(at, KERNEL, SPACE)


def read_kept(at: Path) -> None:
    path = kept(at).path
    path.write_bytes((at / "kept.jsonl").read_bytes())
    path.chmod(0o600)
    with kept(at) as rows:
        assert all(SPACE.read(config) == config for config, _ in rows.rows.values())
    winners_elsewhere(at, {**KERNEL, "device": "H100"}, SPACE)


def read_memory(at: Path) -> None:
    (at / "memory.jsonl").chmod(0o600)
    TunerMemory("cpu", at / "memory.jsonl").recalled("draft", ("aten.mul",))


def read_transcript(at: Path) -> None:
    """A replay and a data set; whatever it says, no kernel of it is run."""
    replayed(at / "transcript.jsonl")
    curated([at / "transcript.jsonl"])


def read_page(path: Path) -> None:
    if not served.holds(path):
        raise UserError(f"{path} is nothing of serving", "")
    pages.render(serving.page(served.read(path)))


def read_message(at: Path) -> None:
    content, (near, far) = (at / "message").read_bytes()[: 1 << 15], os.pipe()
    try:
        os.write(far, content)
        os.close(far)
        with contextlib.suppress(wire.Malformed, wire.PeerGone):
            message = wire.read(near, most_bytes=1 << 20)
            assert sum(map(len, message.blobs)) <= 1 << 20
    finally:
        os.close(near)


def read_body(at: Path) -> None:
    """A client may send anything; whatever is wrong with it is its own fault."""
    for chat in (False, True):
        with contextlib.suppress(UserError):
            asked.read((at / "body.json").read_bytes(), ByteWords(), chat=chat, longest=900, model="tiny")


CASES = [
    Case("show to-serve.json", "to-serve.json", spoil.json_spoiled, ("show", "{}/to-serve.json")),
    Case("load.csv", "load.csv", spoil.bytes_spoiled, call=lambda at: load_of(str(at / "load.csv"))),
    Case("load.jsonl", "load.jsonl", spoil.lines_spoiled, call=lambda at: load_of(str(at / "load.jsonl"))),
    *(Case(f"page of {name}", f"{name}.json", spoil.json_spoiled, call=lambda at, name=name: read_page(at / f"{name}.json"))  # type: ignore[misc]
      for name in ("bench", "search", "tune")),
    *(Case(f"page of a record, {name}", f"record/{name}", spoil.lines_spoiled if name.endswith("l") else spoil.json_spoiled,
           call=lambda at: read_page(at / "record")) for name in ("serve.json", "steps.jsonl", "requests.jsonl")),
    Case("forecast to export", "forecast.json", spoil.json_spoiled, call=lambda at: exported.vllm(exported.read(at / "forecast.json"))),
    Case("table of settings", "table.jsonl", spoil.lines_spoiled, call=lambda at: TuneTable(at / "table.jsonl", QUESTION)),
    Case("transcript of a generator", "transcript.jsonl", spoil.lines_spoiled, call=read_transcript),
    Case("rows of a search", "kept.jsonl", spoil.lines_spoiled, call=read_kept),
    Case("memory of a tuner", "memory.jsonl", spoil.lines_spoiled, call=read_memory),
    Case("request body", "body.json", spoil.json_spoiled, call=read_body),
    Case("message of a candidate", "message", spoil.bytes_spoiled, call=read_message),
]  # fmt: skip
