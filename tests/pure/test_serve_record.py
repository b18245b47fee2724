"""What a server writes down: every step and request, within bounds; and what came of them beside what is predicted."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from foretell.api.serving.beside import beside
from foretell.cli import main
from foretell.errors import UserError
from foretell.plan.types import Plan, ServeLayout
from foretell.price.serving.measured_steps import fitted
from foretell.serve import record as records
from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.record import RequestRow, ServeRecord, ThinnedRows
from foretell.serve.sampling import Sampling
from foretell.serve.thread import EngineThread
from foretell.serve.tune.trial import steps_of
from tests.pure.test_serve_http import SIZES, model

pytestmark = pytest.mark.usefixtures("one_thread")


def served(folder: Path | None, count: int = 6) -> tuple[ServeRecord, int]:
    """Some requests through an engine in its thread, one of them cancelled; the record, and tokens that came."""
    record = ServeRecord(folder)
    engine = ServingEngine(model(), pages=60, size=8, limits=StepLimits(running=4, tokens=32), share=False)
    keeper = EngineThread(engine, record=record)
    record.about({"serve": {"model": "gpt2", "device": "cpu", "dtype": "float32", "pages": 60, "page_tokens": 8, "running": 4, "step_tokens": 32}})
    tokens, ended = [], [threading.Event() for _ in range(count)]

    def listen(number: int) -> Any:
        def told(event: Any) -> None:
            tokens.append(event.token)
            if event.ended:
                ended[number].set()

        return told

    for number in range(count):
        keeper.submit(tuple(range(1, 20 + number)), Sampling(most=10), listen(number)).result(30)
    assert all(one.wait(60) for one in ended)
    gone = keeper.submit(tuple(range(1, 30)), Sampling(most=80), lambda event: None).result(30)
    keeper.cancel(gone)
    keeper.drain()
    assert keeper.join(30)
    record.close()
    return record, sum(one is not None for one in tokens)


def test_every_step_and_every_request_is_written_down(tmp_path: Path) -> None:
    record, tokens = served(tmp_path / "out")
    shapes, seconds = steps_of(tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert sum(row["out"] for row in rows if row["ended"] == "length") == tokens == 60
    assert [row["ended"] for row in rows].count("cancelled") == 1 and len(rows) == 7 == len(record.requests)
    prompts = sum(row["in"] for row in rows)
    computed = sum(shape.tokens for shape in shapes)
    assert sum(shape.samples for shape in shapes) >= tokens and prompts - 29 <= computed <= prompts + 60 + 80
    assert len(shapes) == record.steps and min(seconds) > 0 and fitted(shapes * 5, seconds * 5).off < 1
    for row in rows:
        assert row["ended"] != "length" or 0 <= row["at"] <= row["first"] <= row["last"]
    with pytest.raises(UserError, match="another server"):
        ServeRecord(tmp_path / "out")


def test_a_file_of_rows_grows_ever_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_ROWS", 50)
    rows = ThinnedRows(tmp_path / "rows.jsonl")
    for number in range(10_000):
        rows.add({"number": number})
    rows.close()
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["number"] for row in found[:50]] == list(range(50)) and len(found) <= 50 * 9
    assert found[-1]["every"] >= 64 and 10_000 - found[-1]["number"] <= found[-1]["every"]


def plan(**more: Any) -> Plan:
    return Plan(model={"model": "gpt2"}, hardware="auto", serve=ServeLayout(pages=60, page=8, running=4, tokens=32, share=False), **more)


def test_requests_are_predicted_as_they_came() -> None:
    """A clock of known steps writes the requests down; the law of these steps gives the same times again."""
    law = {"factors": {"step": 0.01, "token": 0.001, "sequence": 0.0, "read": 0.0, "pair": 0.0, "sample": 0.0}, "off": 0.0, "steps": 100}
    # One at a time: a prompt of 20 takes 0.03 s, each token after it 0.011 s.
    rows = [RequestRow(came=number, prompt=20, wanted=5, output=5, first=number + 0.03, last=number + 0.03 + 4 * 0.011, ended="length")
            for number in range(5)]  # fmt: skip
    rows.append(RequestRow(came=9.0, prompt=20, wanted=50, output=3, first=9.1, last=9.2, ended="cancelled"))
    found = beside(plan(predicted={"serving": {"steps": law}}), rows)
    assert found is not None and found.predicted is not None and (found.requests, found.left_out) == (5, 1)
    for name in ("tokens_per_second", "inside", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95"):
        assert getattr(found.predicted, name) == pytest.approx(getattr(found.measured, name), rel=1e-6), name
    assert beside(plan(), rows[5:]) is None, "nothing was answered"
    other = beside(plan().with_(hardware="H100"), rows)
    assert other is not None and other.predicted is None and "for H100-SXM-80GB, and a CPU served it" in other.why_not
    without = beside(plan(), rows)
    assert without is not None and without.predicted is None and "plan has none" in without.why_not


def test_a_page_is_made_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served(tmp_path / "out")
    assert main(["report", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["sections"] == ["pages"]
    text = (tmp_path / "out" / "report.html").read_text()
    assert "Pages held" in text and "Cancelled or failed: 1." in text and '"kind":"lines"' in text


@pytest.mark.slow(reason="a server in a process of its own; the record and the comparison are tried above")
def test_the_command_records_and_compares(tmp_path: Path) -> None:
    import http.client
    import os
    import signal
    import subprocess
    import sys

    from foretell.plan import file

    law = {"factors": {"step": 0.002, "token": 1e-5, "sequence": 1e-4, "read": 0.0, "pair": 0.0, "sample": 0.0}, "off": 0.0, "steps": 100}
    one = Plan(model={"model": "gpt2", "overrides": SIZES}, hardware="auto", serve=ServeLayout(pages=60, page=8, running=4, tokens=32),
               predicted={"serving": {"steps": law}})  # fmt: skip
    file.write(one, tmp_path / "plan.json")
    words = [sys.executable, "-m", "foretell", "serve", str(tmp_path / "plan.json"), "--device", "cpu", "--port", "0", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        line = next(line for line in iter(process.stdout.readline, "") if "ready at" in line)
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        for number in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": f"number {number}", "max_tokens": 8}))
            assert connection.getresponse().status == 200
            connection.close()
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert "served    3 requests; these requests as predicted" in said and "first token p50" in said, said
    about = json.loads((tmp_path / "out" / "serve.json").read_text())
    assert about["beside"]["requests"] == 3 and about["plan"]["serve"]["running"] == 4
