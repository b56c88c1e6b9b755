"""`mlx serve`: a server in a process of its own, found, updated and stopped by other commands."""

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

from mlx_runtime.companions.serving.http import registry
from mlx_runtime.companions.serving.http.access import read_token
from mlx_runtime.companions.serving.http.asgi import Limits
from mlx_runtime.companions.serving.http.server import serve
from mlx_runtime.companions.serving.http.shadow import agree
from mlx_runtime.companions.serving.http.terminal import ModelServer, Source, parse
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.serving.schema import Column, Schema
from mlx_runtime.errors import UsageError
from mlx_runtime.storage import leases
from mlx_runtime.storage.documents import now

pytestmark = pytest.mark.local

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def trained(mlx: Mlx, bound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with two runs, whose models differ."""
    folder = tmp_path_factory.mktemp("served")
    subprocess.run(["cp", "-r", str(bound), str(folder)], check=True)
    for seed in (1, 2):
        done = mlx(folder / "digits", "train", "run", "cfg.num_epochs=1", "cfg.start_workers=0", f"cfg.seed={seed}")
        assert done.returncode == 0, done.stderr
    return folder / "digits"


Run = Callable[..., tuple[Command, list[str]]]


@pytest.fixture
def run(start: Start, trained: Path, tmp_path: Path) -> Run:
    """`run("digits", ...)` starts a server at a free port, and returns its process and the lines that it prints."""

    def run(*words: str, **settings: str) -> tuple[Command, list[str]]:
        process = start(trained, "serve", "run", *words, "--port", "0", MLX_CACHE=str(tmp_path / "cache"), **settings)
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
    process, lines = run("digits", "run_001", "--max-wait-ms", "400")
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
    body = json.dumps({"rows": json.loads(urllib.request.urlopen(f"{url}/example").read())["rows"]}).encode()
    answers: list[Any] = []

    def one_is_queued() -> bool:
        return 'mlx_queued_rows{model="digits"} 1.0' in urllib.request.urlopen(f"{url}/metrics").read().decode()

    thread = threading.Thread()
    while not one_is_queued():
        if not thread.is_alive():  # or the one before was answered between two looks
            thread = threading.Thread(target=lambda: answers.append(ask(f"{url}/predict", body)))
            thread.start()
    process.send_signal(signal.SIGTERM)
    output_text, errors = process.communicate(timeout=30)
    thread.join()
    assert [answer["outputs"] for answer in answers] == [[output]] * len(answers)
    assert (process.returncode, errors) == (143, "")
    assert output_text.splitlines()[-1].endswith(f"requests, {1 + len(answers)} rows answered")
    with pytest.raises(urllib.error.URLError):
        ask(f"{url}/healthz")

    process, lines = run("digits")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_server_is_listed_updated_without_a_failed_request_and_stopped(
    run: Run, mlx: Mlx, trained: Path, tmp_path: Path
) -> None:
    cache = {"MLX_CACHE": str(tmp_path / "cache")}
    process, lines = run("digits", "run_001", "other=digits/run_002", "--shadow", "run_002")
    url = url_of(lines)
    example = urllib.request.urlopen(f"{url}/example").read()
    first, second = (ask(f"{url}/models/{name}/predict", example)["outputs"] for name in ("digits", "other"))
    assert first != second
    [record] = json.loads(mlx(trained, "serve", "ls", "--json", **cache).stdout)
    assert record["models"] == {"digits": "digits/run_001 epoch_0001", "other": "digits/run_002 epoch_0001"}
    assert Path(record["socket"]).stat().st_mode & 0o777 == 0o600
    assert "of 1 rows" in record["status"]

    seen, stop = [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            seen.append(ask(f"{url}/predict", example)["outputs"])

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    done = mlx(trained, "serve", "update", "digits", "run_002", **cache)
    assert done.stdout == "digits is now digits/run_002 epoch_0001\n", done.stderr
    stop.set()
    for thread in threads:
        thread.join()
    digits = [output[0]["probabilities"] for output in seen]
    known = [pytest.approx(outputs[0]["probabilities"], rel=1e-4) for outputs in (first, second)]
    assert digits
    assert all(item in known for item in digits)
    assert ask(f"{url}/predict", example)["outputs"][0]["probabilities"] == pytest.approx(second[0]["probabilities"])
    assert "digits is now digits/run_002" in mlx(trained, "serve", "logs", **cache).stdout
    for words, problem in ((("run_009",), "run_009"), (("run_001", "--checkpoint", "epoch_0007"), "epoch_0007")):
        done = mlx(trained, "serve", "update", "digits", *words, **cache)
        assert (done.returncode, problem in done.stderr, done.stderr.count("\n")) == (1, True, 1), done.stderr
    done = mlx(trained, "serve", "update", "third", "run_001", **cache)
    assert (done.returncode, "no server serves 'third'; " in done.stderr) == (2, True)

    assert mlx(trained, "serve", "stop", **cache).stdout == f"stopped {url}\n"
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert re.search(r"shadow digits/run_002 epoch_0001 differs on \d+ of [\d,]+ rows", text)
    assert mlx(trained, "serve", "ls", **cache).stderr == "no server is running; start one: mlx serve run NAME\n"


class Loaded(Source):
    """A model of one column, which has its name."""

    def load(self, checkpoint: str | None = None, *, trust: bool = False) -> Predictor:
        return Predictor(lambda batch: batch, Schema((Column(self.text, "float32"),)), f"model {self.text}")


def test_a_model_is_not_replaced_by_one_that_reads_other_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_CACHE", str(tmp_path))
    server = ModelServer({"x": Loaded("x")}, Limits(), "127.0.0.1", 0)
    try:
        with pytest.raises(UsageError, match=r"^model y reads different columns than model x: y: float32$"):
            server.update("x", Loaded("y"))
        assert server.app.endpoints["x"].predictor.title == "model x"
    finally:
        server.server.stop()


def test_killed_servers_are_not_listed(run: Run, mlx: Mlx, trained: Path, tmp_path: Path) -> None:
    process, _ = run("digits")
    process.kill()
    process.wait()
    folder = tmp_path / "cache" / "servers"
    (folder / "1-2.json").write_text('{"port": "x"}')
    (folder / "3-4.json").write_bytes(b"\xff")
    assert len([*folder.glob("*.json")]) == 3
    assert mlx(trained, "serve", "ls", "--json", MLX_CACHE=str(tmp_path / "cache")).stdout.strip() == "[]"
    assert len([*folder.glob("*.json")]) == 2


def test_records_of_other_machines_are_kept(mlx: Mlx, trained: Path, tmp_path: Path) -> None:
    """The cache may be in a home folder that several machines mount."""
    folder = tmp_path / "cache" / "servers"
    folder.mkdir(parents=True)
    record = leases.this_process() | {"port": 1, "url": "http://x", "socket": "/x", "log": "/x", "models": {}}
    for number, fields in enumerate(({"host": "other", "boot": "other"}, {"pid_started": "0"})):
        (folder / f"{number}.json").write_text(json.dumps(record | {"heartbeat": "2026-01-01T00:00:00+00:00"} | fields))
    assert mlx(trained, "serve", "ls", "--json", MLX_CACHE=str(tmp_path / "cache")).stdout.strip() == "[]"
    assert [file.name for file in folder.glob("*.json")] == ["0.json"]


@pytest.mark.pure
def test_a_server_has_ended_even_if_nobody_has_collected_its_exit_code() -> None:
    """Containers often have no process that does."""
    process = subprocess.Popen(["sleep", "60"])
    record = {"port": 1, **leases.this_process(), "heartbeat": now()}
    record |= {"pid": process.pid, "pid_started": leases.start_time_of(process.pid)}
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    registry.wait_for_end(record)
    process.wait()


def test_other_machines_need_a_token(run: Run) -> None:
    """It is in a file that only its user can read, or in MLX_SERVE_TOKEN."""
    process, lines = run("digits", "--host", "0.0.0.0")
    file = Path(next(line for line in lines if line.startswith("token")).split()[1])
    assert file.stat().st_mode & 0o777 == 0o600
    url = url_of(lines).replace("0.0.0.0", "127.0.0.1")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(f"{url}/schema")
    done = subprocess.run(lines[-1], shell=True, capture_output=True, text=True, timeout=30)
    assert len(json.loads(done.stdout)["outputs"]) == 1
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert not file.exists()
    _, lines = run("digits", MLX_SERVE_TOKEN="0123456789abcdef")
    assert 'Authorization: Bearer $MLX_SERVE_TOKEN"' in lines[-1]
    assert "0123456789abcdef" not in " ".join(lines)
    assert ask(f"{url_of(lines)}/example", Authorization="Bearer 0123456789abcdef")["rows"]


@pytest.mark.pure
@pytest.mark.parametrize("token", ["abc", 15 * "x", 16 * "é", "correct horse battery staple", "0123456789abcdef\n"])
def test_a_token_that_is_short_or_cannot_be_sent_is_refused(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SERVE_TOKEN", token)
    with pytest.raises(UsageError, match="^MLX_SERVE_TOKEN needs 16 or more ASCII characters, and no spaces; make"):
        read_token()
    monkeypatch.setenv("MLX_SERVE_TOKEN", "")
    assert read_token() is None


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


def test_a_long_example_is_read_from_the_server(script: Any, trained: Path, tmp_path: Path) -> None:
    """A shell refuses arguments of more than 128 KiB."""
    done = script(
        trained,
        "import os, subprocess\n"
        f"os.environ['MLX_CACHE'] = {str(tmp_path)!r}\n"
        "from mlx_runtime.companions.serving.http import terminal\n"
        "from mlx_runtime.companions.serving.http.asgi import Limits\n"
        "terminal.LONGEST_EXAMPLE = 10\n"
        "served = terminal.ModelServer({'digits': terminal.Source('digits')}, Limits(), '127.0.0.1', 0)\n"
        "with served.server:\n"
        "    assert len(served.curl()) < 200\n"
        "    print(subprocess.run(served.curl(), shell=True, capture_output=True, text=True).stdout)\n",
    )
    assert len(done["outputs"]) == 1


def test_the_folder_of_an_export_is_served(run: Run, mlx: Mlx, trained: Path, tmp_path: Path) -> None:
    done = mlx(trained, "xp", "export", "digits", "run_001", "-o", str(tmp_path / "export"))
    assert done.returncode == 0, done.stderr
    _, lines = run(str(tmp_path / "export"), "run=digits/run_001")
    example = urllib.request.urlopen(f"{url_of(lines)}/example").read()
    one, other = (ask(f"{url_of(lines)}/models/{name}/predict", example)["outputs"][0] for name in ("export", "run"))
    assert one["probabilities"] == pytest.approx(other["probabilities"], rel=1e-4)


def test_bad_commands_end_with_one_line(mlx: Mlx, trained: Path, tmp_path: Path) -> None:
    file = trained / "src" / "experiment.py"
    text = file.read_text()
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("a", "b", "c"), 2, "which model? mlx serve run NAME [RUN]"),
        (("digits", "run_001", "digits=digits/run_002"), 2, "two models have the same name"),
        (("digits", "run_007"), 2, "run_007"),
        (("digits", "--host", "nowhere.invalid"), 2, "cannot listen on nowhere.invalid:8000"),
    ]
    for words, code, line in cases:
        done = mlx(trained, "serve", "run", *words, MLX_CACHE=str(tmp_path))
        assert (done.returncode, line in done.stderr, done.stderr.count("\n")) == (code, True, 1), done.stderr
    edit(file, "    def predict(", "    def answer(")
    try:
        done = mlx(trained, "serve", "run", "digits", MLX_CACHE=str(tmp_path))
        assert (done.returncode, "has no predict; write it in src/experiment.py" in done.stderr) == (2, True)
    finally:
        file.write_text(text)


@pytest.mark.pure
def test_models_on_the_command_line(tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    (export / "export.json").touch()
    assert parse(["digits"]) == {"digits": Source("digits")}
    assert parse(["digits", "3", "b=x/run_001"]) == {"digits": Source("digits", "3"), "b": Source("x/run_001")}
    assert parse([str(export)]) == {"export": Source(str(export))}
    assert Source(str(export)).is_export
    assert not Source("digits/run_001").is_export
    assert [Source(*words).other("3") for words in (("a",), ("a", "1"), ("a/1",))] == [Source("a", "3")] * 3
    assert Source("a").other("b/3") == Source("b/3")
    for text in (str(export), "s3://bucket/runs/a/run_001", "/runs/a/run_001"):
        with pytest.raises(UsageError, match="does not name an experiment; write NAME/3 in place of 3"):
            Source(text).other("3")
    with pytest.raises(UsageError, match="which model"):
        parse(["a", "b", "c"])


@pytest.mark.pure
def test_answers_agree() -> None:
    """Whole numbers have to be equal, vectors need their maximum at the same position, numbers may differ by 1%."""
    assert agree({"a": 3, "b": [0.2, 0.8], "c": 1.0}, {"a": 3, "b": [0.4, 0.6], "c": 1.005})
    assert not agree({"a": 3}, {"a": 4})
    assert not agree({"b": [0.2, 0.8]}, {"b": [0.6, 0.4]})
    assert not agree({"c": 1.0}, {"c": 1.1})
    assert not agree({"c": 1.0}, ValueError())
    assert not agree({"c": 1.0}, {"d": 1.0})


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
