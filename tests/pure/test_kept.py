"""Rows of searches: whole after an interruption, for one search at a time, and never taken from a file that is somebody else's."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from foretell.errors import UserError
from foretell.tune.search.kept import KeptRows, KeptWinner, kept_rows, winners_elsewhere
from foretell.tune.search.space import Axis, ConfigSpace
from foretell.tune.search.trial import REFUSED, TIMED, TrialResult

SPACE = ConfigSpace((Axis("rows", (1, 2, 4)), Axis("reuse", (False, True))))
ASKED = {"device": "H200", "torch": "2.11", "op": "norm", "template": "t1", "shapes": "float32 16x40"}
ONE, OTHER = {"rows": 1, "reuse": True}, {"rows": 4, "reuse": False}


def filled(folder: Path, **more: str) -> KeptRows:
    with kept_rows(folder, {**ASKED, **more}, SPACE) as kept:
        kept.add(ONE, TrialResult(status=TIMED, seconds=1e-3, speedup=1.5))
        kept.add(OTHER, TrialResult(status=REFUSED, stage="smoke", check="values", reason="wrong"))
        kept.end(KeptWinner(config=ONE, speedup=1.5, low=1.4, beside="eager", date="2026-11-19"))
    return kept


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    before = filled(tmp_path)
    with kept_rows(tmp_path, ASKED, SPACE) as kept:
        assert kept.rows == before.rows and kept.winner == before.winner and len(kept.rows) == 2
    assert stat.S_IMODE(before.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["device", "torch", "op", "template", "shapes"])
def test_whatever_changes_is_another_question(tmp_path: Path, name: str) -> None:
    filled(tmp_path)
    with kept_rows(tmp_path, {**ASKED, name: "other"}, SPACE) as kept:
        assert kept.rows == {} and kept.winner is None


def test_the_winner_of_another_device_is_tried_early(tmp_path: Path) -> None:
    filled(tmp_path)
    assert winners_elsewhere(tmp_path, {**ASKED, "device": "H100"}, SPACE) == [ONE]
    assert winners_elsewhere(tmp_path, ASKED, SPACE) == []
    assert winners_elsewhere(tmp_path, {**ASKED, "device": "H100", "template": "t2"}, SPACE) == []
    (tmp_path / "broken.jsonl").write_bytes(b"\xff{")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert winners_elsewhere(tmp_path, {**ASKED, "device": "H100"}, SPACE) == [ONE]


def test_a_row_that_was_cut_off_is_forgotten(tmp_path: Path) -> None:
    path = filled(tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with kept_rows(tmp_path, ASKED, SPACE) as kept:
        assert len(kept.rows) == 2 and kept.winner is None
        kept.add({"rows": 2, "reuse": True}, TrialResult(status=TIMED, seconds=1e-3, speedup=1.2))
    with kept_rows(tmp_path, ASKED, SPACE) as kept:
        assert len(kept.rows) == 3


def test_one_search_at_a_time(tmp_path: Path) -> None:
    with kept_rows(tmp_path, ASKED, SPACE), pytest.raises(UserError, match="another search"), kept_rows(tmp_path, ASKED, SPACE):
        pass
    with kept_rows(tmp_path, ASKED, SPACE):
        pass


HEAD = json.dumps({"foretell-tune": 1, "question": ASKED})
RESULT = TrialResult(status=TIMED, seconds=1e-3, speedup=1.5).to_json()


@pytest.mark.parametrize("rows", [
    ["{}"], ["[]"], ["null"], ["{"] * 3, [json.dumps({"foretell-tune": 2, "question": ASKED}), "{}"],
    [json.dumps({"foretell-tune": 1, "question": {**ASKED, "device": "H100"}})], [HEAD, "[" * 100000, "{}"],
    [HEAD, json.dumps({"config": {"rows": 3, "reuse": True}, "result": RESULT}), "{}"],
    [HEAD, json.dumps({"config": {"rows": "__import__('os')", "reuse": True}, "result": RESULT}), "{}"],
    [HEAD, json.dumps({"config": ONE, "result": {**RESULT, "speedup": float("inf")}}), "{}"],
    [HEAD, json.dumps({"config": ONE, "result": {**RESULT, "speedup": 0.0}}), "{}"],
    [HEAD, json.dumps({"config": ONE, "result": {**RESULT, "seconds": "1"}}), "{}"],
    [HEAD, json.dumps({"config": ONE, "result": {**RESULT, "status": "fast"}}), "{}"],
    [HEAD, json.dumps({"winner": ONE, "speedup": float("nan"), "low": 1.0, "beside": "", "date": ""}), "{}"],
    [HEAD, json.dumps({"winner": ONE, "speedup": 10**400, "low": 1.0, "beside": "", "date": ""}), "{}"],
])  # fmt: skip
def test_a_hostile_file_is_one_line(tmp_path: Path, rows: list[str]) -> None:
    path = kept_rows(tmp_path, ASKED, SPACE).path
    path.write_text("\n".join(rows) + "\n")
    path.chmod(0o600)
    with pytest.raises(UserError) as caught, kept_rows(tmp_path, ASKED, SPACE):
        pass
    assert "\n" not in str(caught.value) and str(path) in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "shared", "large"])
def test_a_file_of_another_kind_is_one_line(tmp_path: Path, kind: str) -> None:
    path = kept_rows(tmp_path, ASKED, SPACE).path
    if kind == "link":
        (tmp_path / "target").write_text("kept")
        path.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text(HEAD + "\n")
        path.chmod(0o666 if kind == "shared" else 0o600)
        if kind == "large":
            os.truncate(path, 1 << 30)
    with pytest.raises(UserError, match=str(path)), kept_rows(tmp_path, ASKED, SPACE):
        pass
    assert kind != "link" or (tmp_path / "target").read_text() == "kept"
