"""The server in one file answers as the engine does, and needs nothing of foretell."""

from __future__ import annotations

import http.client
import json
import os
import signal
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from foretell import zoo
from foretell.cli import main
from foretell.serve.engine import ServingEngine, StepLimits
from foretell.serve.sampling import Sampling
from foretell.serve.text import ByteWords

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = {
    "gpt2": {"layers": 2, "dim": 32, "heads": 4, "vocab_size": 300, "context": 128},
    "llama3-1b": {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab_size": 300},
}


def model(name: str) -> Any:
    """Of sharp weights."""
    torch.manual_seed(5)
    found = zoo.load(zoo.get(name)).build(**{**zoo.get(name).config, **MODELS[name]}).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(10 if parameter.dim() > 1 else 1)
    return found


def saved(made: Any, path: Path) -> None:
    header, parts, at = {}, [], 0
    for name, one in made.named_parameters():
        data = one.detach().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(one.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(parts))


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama3-1b", marks=pytest.mark.slow(reason="the same server, another model"))])
def test_a_server_in_one_file_gives_the_engine_s_answers(name: str, tmp_path: Path) -> None:
    script, weights = tmp_path / "server.py", tmp_path / "model.safetensors"
    sizes = [word for key, value in MODELS[name].items() for word in ("--set", f"{key}={value}")]
    limits = ["--pages", "20", "--page", "8", "--running", "5", "--tokens", "16"]
    assert main(["serve", name, *sizes, *limits, "--eject", str(script)]) == 0
    text = script.read_text()
    assert "import foretell" not in text and "from foretell" not in text
    assert subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", str(script)], capture_output=True).returncode == 0
    made = model(name)
    saved(made, weights)
    prompts = [f"prompt number {number} {'x' * (7 * number % 40)}" for number in range(14)]
    how = [Sampling(most=24, temperature=1.2 * (number % 3 == 2), seed=number, top_k=20, top_p=0.9) for number in range(14)]
    engine = ServingEngine(made, pages=100, size=8, limits=StepLimits(running=5, tokens=64))
    answers = engine.generate([list(one.encode()) for one in prompts], how)
    command = [sys.executable, "-I", str(script), "--weights", str(weights), "--port", "0", "--device", "cpu"]
    env = {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2].partition("/")[0])

        def ask(number: int) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = {"prompt": prompts[number], "max_tokens": 24, "temperature": how[number].temperature, "seed": number, "top_k": 20, "top_p": 0.9,
                    "stream": bool(number % 2)}  # fmt: skip
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = connection.getresponse()
            found = answer.read().decode()
            connection.close()
            if not number % 2:
                return answer.status, json.loads(found)["choices"][0]["text"]
            pieces = [line.removeprefix("data: ") for line in found.split("\n\n") if line]
            assert pieces.pop() == "[DONE]"
            return answer.status, "".join(json.loads(one)["choices"][0]["text"] for one in pieces)

        with ThreadPoolExecutor(14) as pool:
            found = list(pool.map(ask, range(14)))
        for number, answer in enumerate(answers):
            decoder = ByteWords().decoder()
            assert found[number] == (200, "".join(decoder.add(one) for one in answer.ids) + decoder.end()), number
        for bad in (b"{", b'{"prompt": "a", "stop": "x"}', b'{"prompt": [900]}', b'{"prompt": "a", "max_tokens": 100000}', b"[]"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", bad)
            assert connection.getresponse().status == 400, bad
            connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(("words", "told"), [(["hf:llama"], "is not of the zoo"), (["resnet50"], "takes no positions")])
def test_what_has_no_file_is_said(words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words, "--eject", str(tmp_path / "a.py")]) == 2
    assert told in capsys.readouterr().err
