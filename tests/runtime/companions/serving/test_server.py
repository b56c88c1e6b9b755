"""`mlx serve run`: a server in a process of its own, which a signal stops."""

import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from conftest import Mlx, Start, edit
from forkserver import Command

from mlx_runtime.companions.serving.http.server import serve
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.serving.schema import Column, Schema

pytestmark = pytest.mark.local

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def trained(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with two runs, whose models differ, and whose best checkpoints are the first ones."""
    folder = tmp_path_factory.mktemp("served")
    subprocess.run(["cp", "-r", str(bound), str(folder)], check=True)
    settings = ("cfg.num_epochs=2", "cfg.start_workers=0", "cfg.monitor=val/cross_entropy", "cfg.mode=max")
    for seed in (1, 2):
        done = mlx(folder / "digits", "train", "run", *settings, f"cfg.seed={seed}")
        assert done.returncode == 0, done.stderr
    return folder / "digits"


Run = Callable[..., tuple[Command, list[str]]]


@pytest.fixture
def run(start: Start, trained: Path) -> Run:
    """`run("digits", ...)` starts a server at a free port, and returns its process and the lines that it prints."""

    def run(*words: str, **settings: str) -> tuple[Command, list[str]]:
        process = start(trained, "serve", "run", *words, "--port", "0", **settings)
        assert isinstance(process, Command)
        while "\ncurl " not in process.output():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        return process, process.output().splitlines()

    return run


def url_of(lines: list[str]) -> str:
    return next(line for line in lines if line.startswith("http")).split()[0]


def ask(url: str, body: bytes | None = None, **headers: str) -> Any:
    request = urllib.request.Request(url, body, JSON | {k.replace("_", "-"): v for k, v in headers.items()})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_the_printed_command_answers_and_a_signal_stops_the_server(run: Run, script: Any, trained: Path) -> None:
    """A request that is being answered gets its answer. Ctrl-C exits with 130, SIGTERM with 143."""
    process, lines = run("digits", "run_001", "--max-wait-ms", "1500")
    assert re.fullmatch(r"digits  digits/run_001 epoch_0001 on \w+ reads image: float32 \(1, 8, 8\)", lines[0])
    done = subprocess.run(lines[-1], shell=True, capture_output=True, text=True, timeout=30)
    [output] = json.loads(done.stdout)["outputs"]
    expected = script(
        trained,
        "import json; from mlx_runtime import open_run\n"
        "predictor = open_run('digits/run_001').predictor()\n"
        "row = predictor.schema.example_rows()[0]\n"
        "print(json.dumps({name: value[0].tolist() for name, value in predictor([row]).items()}))\n",
    )
    assert output["digit"] == expected["digit"]
    assert output["probabilities"] == pytest.approx(expected["probabilities"], rel=1e-5)

    url = url_of(lines)
    answers: list[Any] = []
    body = urllib.request.urlopen(f"{url}/example").read()
    thread = threading.Thread(target=lambda: answers.append(ask(f"{url}/predict", body)))
    thread.start()
    time.sleep(0.5)  # until the request waits for further rows
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    thread.join()
    assert [answer["outputs"] for answer in answers] == [[output]]
    assert (process.returncode, errors) == (143, "")
    with pytest.raises(urllib.error.URLError):
        ask(f"{url}/healthz")


def test_other_machines_need_a_token(run: Run, mlx: Mlx, trained: Path) -> None:
    done = mlx(trained, "serve", "run", "digits", "--host", "0.0.0.0", "--port", "0")
    line = "error: a server on 0.0.0.0 needs a token; make one: export MLX_SERVE_TOKEN=$(openssl rand -hex 24)\n"
    assert (done.returncode, done.stderr) == (2, line)
    token = "0123456789abcdef"
    _, lines = run("digits", "--host", "0.0.0.0", MLX_SERVE_TOKEN=token)
    assert token not in " ".join(lines)
    environment = os.environ | {"MLX_SERVE_TOKEN": token}
    done = subprocess.run(lines[-1], shell=True, capture_output=True, text=True, timeout=30, env=environment)
    assert len(json.loads(done.stdout)["outputs"]) == 1
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(f"{url_of(lines)}/schema")


def test_a_run_answers_while_a_block_runs(script: Any, trained: Path) -> None:
    done = script(
        trained,
        "import json, urllib.request; from mlx_runtime import open_run\n"
        "with open_run('digits/run_001').server() as url:\n"
        "    body = urllib.request.urlopen(f'{url}/example').read()\n"
        "    request = urllib.request.Request(f'{url}/predict', body, {'Content-Type': 'application/json'})\n"
        "    print(urllib.request.urlopen(request).read().decode())\n",
    )
    assert len(done["outputs"]) == 1


def test_bad_commands_end_with_one_line(mlx: Mlx, trained: Path) -> None:
    file = trained / "src" / "experiment.py"
    text = file.read_text()
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("digits", "run_001", "digits=digits/run_002"), 2, "two models have the same name"),
        (("digits", "--host", "nowhere.invalid"), 2, "cannot listen on nowhere.invalid:8000"),
    ]
    for words, code, line in cases:
        done = mlx(trained, "serve", "run", *words, MLX_SERVE_TOKEN="0123456789abcdef")
        assert (done.returncode, line in done.stderr, done.stderr.count("\n")) == (code, True, 1), done.stderr
    edit(file, "    def predict(", "    def answer(")
    try:
        done = mlx(trained, "serve", "run", "digits")
        assert (done.returncode, "has no predict; write it in src/experiment.py" in done.stderr) == (2, True)
    finally:
        file.write_text(text)


@pytest.mark.browser
def test_the_page_tries_a_row_in_a_real_browser(tmp_path: Path) -> None:
    """A row is filled in, changed and answered; an image is chosen; markup in names is shown as text."""
    import torch

    def function(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        flat = batch["image"].flatten(1)
        return {"mean": flat.mean(dim=1), "quarters": flat.reshape(len(flat), 4, -1).mean(dim=2)}

    schema = Schema(
        (Column("image", "float32", (1, 8, 8)), Column("<b>text</b>", "string"), Column("count", "int64")),
        (),
        {
            "image": torch.linspace(0, 1, 64).reshape(1, 1, 8, 8),
            "<b>text</b>": ["<i>x</i>"],
            "count": torch.tensor([7]),
        },
    )
    scratch = tmp_path / "browser"
    scratch.mkdir()
    title = "<img src=x onerror=alert(1)>"
    with Browser(scratch) as browser, serve({"model": Predictor(function, schema, title)}) as url:
        page = browser.page(offline=False)
        page.open(f"{url}/")
        page.until("document.querySelectorAll('fieldset').length === 3")
        assert page.evaluate("document.querySelector('h1').textContent") == title
        assert page.evaluate("document.querySelector('h1').children.length") == 0
        assert page.evaluate("document.querySelectorAll('textarea')[1].value") == "<i>x</i>"
        page.evaluate("document.getElementById('send').click()")
        page.until("document.querySelectorAll('.bar').length === 4")
        assert '"mean": 0.5' in page.evaluate("document.querySelector('pre').textContent")
        page.picture(tmp_path / "page.png")
        page.evaluate(
            "const canvas = document.createElement('canvas'); canvas.width = canvas.height = 20;"
            "const pen = canvas.getContext('2d'); pen.fillStyle = '#fff'; pen.fillRect(0, 0, 20, 20);"
            "canvas.toBlob((blob) => { const box = new DataTransfer(); box.items.add(new File([blob], 'white.png'));"
            "const input = document.querySelector('input[type=file]'); input.files = box.files;"
            "input.dispatchEvent(new Event('change')); });"
        )
        page.until("document.querySelector('textarea').value.startsWith('[[[1,1,1')")
        page.evaluate("document.getElementById('send').click()")
        page.until("document.querySelector('pre')?.textContent.includes('\"mean\": 1')")
        page.evaluate("document.querySelectorAll('textarea')[2].value = '7.5'")
        page.evaluate("document.getElementById('send').click()")
        page.until("document.querySelector('.error')?.textContent.includes('count is')")
        assert page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'refused')") == "refused"
