"""`foretell tune` and `foretell tune verify`: what is asked wrongly is said in a line, and a verdict is an exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretell.cli import main
from foretell.tune.verify.corpus import FOLDER


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main([*words])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize(("words", "told"), [
    (("verify",), "no FILE is given"), (("verify", "nothing.py"), "there is no file nothing.py"),
    (("verify", "x.py", "--baseline", "y.py"), "--baseline is of --bench"),
    (("verify", str(FOLDER / "good" / "gate_rewritten.py"), "--device", "tpu"), "has no Model"),
    (("verify", str(FOLDER / "good" / "gate_rewritten.py"), "--reference", str(FOLDER / "tasks" / "gate.py"), "--device", "tpu"), "cpu or cuda"),
])  # fmt: skip
def test_bad_input_is_a_line(words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = asked(capsys, "tune", *words)
    assert status == 2 and told in said and "Traceback" not in said


def test_a_verdict_is_an_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = str(FOLDER / "tasks" / "softmax.py")
    status, said, _ = asked(capsys, "tune", "verify", str(FOLDER / "results" / "c13_no_maximum.py"), "--reference", task, "--json", "--device", "cpu")
    found = json.loads(said)["kernel"]
    assert status == 1 and (found["stage"], found["check"], found["accepted"]) == ("magnitudes", "magnitudes", False)


def test_a_reference_that_does_not_run_is_the_users(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "both.py"
    path.write_text("class Model:\n    pass\nclass ModelNew:\n    pass\ndef get_inputs():\n    return 1 / 0\n")
    status, _, said = asked(capsys, "tune", "verify", str(path), "--device", "cpu")
    assert status == 2 and "ZeroDivisionError" in said
