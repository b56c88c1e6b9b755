"""The page of `mlx xp ui`, in a real browser."""

import json
import math
import pydoc
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from browser import Browser, Page
from conftest import Mlx, Start
from faults import wait_for
from stored_sweeps import store_search

from mlx_runtime.companions.ui import server
from mlx_runtime.runs import records
from mlx_runtime.runs.checkpoints.index import CheckpointInfo
from mlx_runtime.runs.checkpoints.store import CheckpointStore
from mlx_runtime.runs.folder import RunFolder, claim_run
from mlx_runtime.storage import documents, leases

pytestmark = pytest.mark.browser

TOKEN = "a-token-for-the-tests"

TEXTS = """(() => {
    const found = [], walk = (node) => {
        if (node.nodeType === 3 && !["SCRIPT", "STYLE"].includes(node.parentNode.nodeName)) found.push(node.data);
        if (node.shadowRoot) walk(node.shadowRoot);
        node.childNodes.forEach(walk);
    };
    walk(document.body);
    return found.join(" ").replaceAll("\\u200b", "");
})()"""
"""All text of the page, with that of marimo's elements, which is in shadow roots."""

FOREIGN = """(() => {
    const found = [], walk = (node) => {
        if (node.shadowRoot) walk(node.shadowRoot);
        const address = node.nodeType === 1 && (node.getAttribute("src") || node.getAttribute("href")) || "";
        const bad = /evil|javascript:|pwned|data:(?!image.(png|jpeg|gif|svg.xml;base64))/i;
        if (bad.test(address)) found.push(node.outerHTML);
        node.childNodes.forEach(walk);
    };
    walk(document.body);
    return found;
})()"""
"""Elements of the page that have an address from a run."""

EVIL = (
    "<img src=x onerror='window.pwned=1'>",
    "</script><script>window.pwned=1</script>%{x}<b>",
    "http://evil.test/a.png",
    "![a](http://evil.test/b.png) [c](javascript:alert(1))",
    "DATA:image/svg+xml,<svg onload='window.pwned=1'/>",
    "<marimo-ui-element object-id='pwned'><marimo-button data-label='\"pwned\"'></marimo-button></marimo-ui-element>",
    "WWW.evil.test mailto:pwned@evil.test //evil.test/c.png",
    "$\\href{javascript:alert(1)}{x}$ `x` <a href='http://evil.test'>x</a>",
)
"""Texts that would change the page, or make it ask another host, without escaping."""

Serve = Callable[..., str]


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Serve:
    """`serve(storage, ...)` serves the page, and returns its URL with the token."""

    def serve(*arguments: str | Path) -> str:
        process = start(tmp_path, "xp", "ui", *map(str, arguments), "--port", "0", MLX_UI_TOKEN=TOKEN)
        line = wait_for(lambda: process.output() or (process.poll() is not None and process.communicate()))
        assert str(line).startswith("http://127.0.0.1:"), line
        return str(line.strip().replace("MLX_UI_TOKEN", TOKEN))

    return serve


def opened(browser: Browser, url: str, **choice: object) -> Page:
    """Open a page with a choice, and wait until it has been drawn."""
    page = browser.page(offline=False)
    items = {name: "\n".join(value) if isinstance(value, list | tuple) else value for name, value in choice.items()}
    wait_for(lambda: answers(page, f"{url}&{urlencode(items)}"), seconds=60)
    page.until(f"{TEXTS}.includes('Differences')", 60)
    return page


def answers(page: Page, url: str) -> bool:
    page.open(url)
    return bool(page.evaluate("location.protocol") == "http:")


def shows(page: Page, text: str, timeout_s: float = 120) -> None:
    try:
        page.until(f"{TEXTS}.includes({json.dumps(text)})", timeout_s)
    except TimeoutError:
        raise AssertionError(f"{text!r} is not in {page.evaluate(TEXTS)[-3000:]}") from None


@pytest.fixture
def evil(tmp_path: Path) -> list[RunFolder]:
    """Runs with such texts in every field that the page shows, of a sweep."""
    storage = str(tmp_path / "storage")
    found = []
    for number, text in enumerate(EVIL):
        name = f"digits{number}" if {*text} & {*"/\\?#"} else text
        folder = claim_run(storage, name)
        facts: dict[str, Any] = dict.fromkeys(("command", "device", "host", "python", "error", "monitor"), text)
        facts |= {"status": "FAILED", "overrides": [text], "git": {"commit": text}, "packages": {text: text}}
        facts |= {"job": {"id": text, "address": text}, "values": {text: text, "lr": number}, "stop_reason": text}
        facts |= {"metrics": {text: 0.5, f"lr/{text}": 0.1}, "start": documents.now()}
        records.Record(folder, **facts, epoch=1, epochs=2, best={"epoch": 0, "value": 0.5, "path": text})
        lines = [{"step": step, "epoch": 0, "timestamp": 0.0, text: 0.5, f"lr/{text}": 0.1} for step in (1, 2, 3)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        folder.conf.write_text(json.dumps({"a": text}))
        (folder.path / records.LABELS).write_text(json.dumps({"tags": [text], "note": text}))
        (folder.path / "logs").mkdir()
        (folder.path / "logs/driver.log").write_text(text)
        CheckpointStore(folder.checkpoints).save({}, CheckpointInfo(0, True, 3, {text: 0.5}))
        write_events(folder, text)
        found.append(folder)
    return found


def write_events(folder: RunFolder, text: str) -> None:
    """Write what a user's code may add to TensorBoard."""
    import torch
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder.path)) as writer:
        writer.add_image(text, torch.zeros(3, 4, 4), 7)
        writer.add_text(text, text, 7)


ELEMENTS = """((selector) => {
    const found = [], walk = (node) => {
        if (node.nodeType === 1 && node.matches(selector)) found.push(node);
        if (node.shadowRoot) walk(node.shadowRoot);
        node.childNodes.forEach(walk);
    };
    walk(document.body);
    return found;
})"""
"""A function that returns the elements of the page that match a selector, in shadow roots, too."""


def show(page: Page, view: int) -> None:
    page.evaluate(f"{ELEMENTS}('input[type=radio], button[role=radio]')[{view}].click()")


@pytest.mark.timeout(900)
def test_what_runs_say_stays_text_in_every_view(browser: Browser, serve: Serve, evil: list[RunFolder]) -> None:
    keys, runs = [f"config.{text}" for text in EVIL], [str(run.path) for run in evil]
    choice = {"columns": keys, "metrics": EVIL, "mean by": keys, "run": runs, "of": runs[-1]}
    page = opened(browser, serve(evil[0].root), **choice)
    for view, texts in enumerate((EVIL, EVIL, EVIL, EVIL[-1:])):
        show(page, view)
        for text in texts:
            shows(page, text)
        page.until(f"{ELEMENTS}('img[src^=data]').length >= {view // 3}")  # from TensorBoard
        time.sleep(1)  # what a text could load
        assert page.evaluate("window.pwned") is None
        assert page.evaluate(FOREIGN) == []
        assert [item for item in page.requests() if "evil.test" in item.partition("?")[0]] == []


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A sweep, two runs with different code, one of them alive, and two that cannot be read."""
    root = tmp_path / "storage"
    sweep = store_search(root, trials=12)
    for path in root.glob("digits/run_*/run.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"sweep": {"name": sweep.name, "trial": 1}, "values": {"kind": "trial"}}))
    for number in (1, 2):
        folder = claim_run(str(root), "shapes")
        facts = {"monitor": "val/loss", "mode": "min", "metrics": {"val/loss": 0.5, "lr/adam": 0.1}}
        alive = {"start": documents.now(), "attempt": 1} | leases.this_process()
        config = {"cfg.seed": number, "lr": 0.1}
        records.Record(folder, status="SUCCEEDED" if number == 1 else "RUNNING", values=config, **facts, **alive)
        folder.conf.write_text(f"cfg:\n  seed: {number}\n  lr: 0.1\n")
        folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in curve(0, 100)))
        (folder.path / "logs").mkdir()
        (folder.path / "logs/driver.log").write_text(f"log of run {number}\n")
        with zipfile.ZipFile(folder.path / "code.zip", "w") as archive:
            archive.writestr("src/models.py", f"WIDTH = {number}\n")
    (claim_run(str(root), "broken").record).write_text("{")
    newer = claim_run(str(root), "newer")
    newer.record.write_text('{"status": "SUCCEEDED", "metrics": [1, 2]}')
    return root


POINT = {"step": 100_001, "epoch": 2_000, "timestamp": 100_101.0, "lr/adam": 0.1}


def curve(first: int, end: int) -> list[dict[str, float]]:
    return [
        POINT | {"step": step, "epoch": step // 50, "timestamp": 100.0 + step, "val/loss": 1 / (step + 1)}
        for step in range(first, end)
    ]


def own_page(folder: Path, old: str, new: str) -> None:
    """Make an experiment's own page of the packaged one."""
    (folder / "src").mkdir()
    (folder / "src/conf.yaml").touch()
    page = server.PACKAGED.read_text()
    assert page.count(old) == 1
    (folder / "dashboard.py").write_text(page.replace(old, new))


@pytest.mark.timeout(900)
def test_each_view_of_runs(browser: Browser, serve: Serve, storage: Path, tmp_path: Path) -> None:
    """What cannot be read is named, next to all else; a choice is in the URL; a live run is followed."""
    own_page(tmp_path, 'default_interval="10s"', 'default_interval="2s"')
    other = tmp_path / "other"
    records.Record(claim_run(str(other), "shapes"), status="FAILED", monitor="val/loss", start=documents.now())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        url = serve(storage, other, f"s3://bucket/runs?endpoint_override={endpoint}&scheme=http&region=eu-west-1")
        page = opened(browser, url)
        shows(page, "has not answered within 5 s")
    first, second = (storage / "shapes" / name for name in ("run_001", "run_002"))
    shows(page, "broken/run_001/run.json")
    shows(page, "metrics is a list, not a mapping")
    shows(page, "Training now")
    page.until(f"{ELEMENTS}('td button[role=checkbox]').length >= 3")
    page.evaluate(f"{ELEMENTS}('td button[role=checkbox]')[0].setAttribute('data-old', '')")
    revise(second, epoch=1, epochs=3, metrics={"val/loss": 0.4321, "lr/adam": 0.1})
    shows(page, "0.4321")  # of the run that trains, while the list is as it was
    for number in range(3):
        assert page.evaluate(f"{ELEMENTS}('td button[role=checkbox]')[0].hasAttribute('data-old')")
        page.evaluate(f"{ELEMENTS}('td button[role=checkbox]')[{number}].click()")
    page.until("decodeURIComponent(location.search).split('shapes/').length >= 4")
    show(page, 1)
    page.until(f"{ELEMENTS}('.scatterlayer .trace path.js-line').length === 2")
    shows(page, str(first))  # another storage has a run of this name
    with second.joinpath("metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in [*curve(100, 100_000), POINT | {"val/loss": math.inf}])
    page.until(f"{ELEMENTS}('.js-plotly-plot').some(plot => plot.layout.xaxis.range[1] > 99000)")
    show(page, 2)
    shows(page, "config.cfg.seed")
    page.evaluate(f"{ELEMENTS}('td').forEach(cell => cell.setAttribute('data-old', ''))")
    revise(storage / "digits/run_001", metrics={"loss": 0.1234})
    time.sleep(5)  # two refreshes
    assert page.evaluate(f"{ELEMENTS}('td[data-old]').length")  # what it shows has not changed
    shutil.rmtree(other)
    shows(page, f"{other} cannot be read: there is no storage")

    choice = {"run": [str(first), str(second)], "mean by": ["config.lr"], "x": "epoch", "of": str(second)}
    page = opened(browser, url, tab="Curves", **choice)
    shows(page, "lr = 0.1000")
    show(page, 2)
    shows(page, "-WIDTH = 2")
    show(page, 4)
    shows(page, "Parallel coordinates")
    shows(page, "Importance of parameters")
    page.until(f"{ELEMENTS}('.js-plotly-plot').length >= 6")
    shows(page, "PRUNED")
    show(page, 3)
    shows(page, "log of run 2")
    page.until(f"{ELEMENTS}('.scatterlayer .trace path.js-line').length === 1")
    with (second / "logs/driver.log").open("a") as log:
        log.write("and a new line\n")
    shows(page, "and a new line")
    blocked = [item for item in page.requests() if not item.startswith(url.partition("/?")[0])]
    assert {item.partition("/npm/")[0] for item in blocked} <= {"https://cdn.jsdelivr.net"}  # MathJax, by marimo
    assert [item for item in page.errors() if "preload" not in item and "Content Security Policy" not in item] == []


def revise(run: Path, **facts: object) -> None:
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | facts))


@pytest.mark.timeout(900)
def test_ten_thousand_runs_are_listed_and_searched(browser: Browser, serve: Serve, tmp_path: Path) -> None:
    root = tmp_path / "storage"
    facts = {"status": "SUCCEEDED", "metrics": {"val/loss": 0.5}, "values": {f"group.key{n}": n for n in range(50)}}
    for number in range(1, 10_001):
        folder = root / "digits" / f"run_{number:05d}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(facts | {"seed": number}))
    url = serve(root)
    page = opened(browser, url)
    shows(page, "10,000 rows", timeout_s=240)
    page.evaluate(TYPE % "run_09999")
    shows(page, "digits/run_09999", timeout_s=60)
    assert "digits/run_10000" not in page.evaluate(TEXTS)


TYPE = f"""(() => {{
    const [box] = {ELEMENTS}('input[placeholder^=Search]');
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(box, "%s");
    box.dispatchEvent(new Event("input", {{bubbles: true}}));
}})()"""
"""Types into the search of the page."""


def test_an_export_works_without_a_network(browser: Browser, mlx: Mlx, storage: Path, tmp_path: Path) -> None:
    chosen = ("--run", "shapes/*", "--run", "broken/*")
    for runs in ((), chosen):  # the second export replaces the first one
        done = mlx(tmp_path, "xp", "ui", str(storage), "--export", "pages", *runs)
        assert done.stdout == "pages/index.html\n", done.stderr
    page = browser.page()
    page.open(tmp_path / "pages/index.html")
    text = page.evaluate("document.body.innerText")
    assert "shapes/run_002" in text.replace("\t", "/")
    assert "broken/run_001/run.json" in text
    assert page.evaluate("document.querySelectorAll('.scatterlayer .trace path.js-line').length") == 4
    assert page.evaluate("[...document.querySelectorAll('td a')].map(item => item.getAttribute('href'))") == [
        f"run_{number:03d}.html" for number in (1, 2, 3)
    ]
    assert len([*(tmp_path / "pages").iterdir()]) == 4
    assert page.errors() == []


@pytest.mark.process
def test_only_holders_of_the_token_see_the_page(serve: Serve, storage: Path) -> None:
    url = serve(storage)
    address = url.partition("/?")[0]
    wait_for(lambda: reaches(address), seconds=60)
    with urllib.request.urlopen(address) as answer:
        assert "/auth/login" in answer.url
        assert "img-src 'self' data: blob:" in answer.headers["content-security-policy"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{address}/api/status")


def reaches(address: str) -> bool:
    try:
        with urllib.request.urlopen(address):
            return True
    except OSError:
        return False


@pytest.mark.process
def test_what_cannot_be_served_is_told_in_a_line(mlx: Mlx, storage: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options, message in (
            (["--host", "0.0.0.0"], "a page on 0.0.0.0 needs a token of your choice: export MLX_UI_TOKEN="),
            (["--port", str(port)], f"cannot serve on port {port}: Address already in use"),
            (["--edit"], f"there is no dashboard.py in {tmp_path}; copy the packaged one"),
            (["--run", "digits/*"], "--run belongs to --export"),
            (["--export", "pages", "--run", "nothing"], f"there are no runs like nothing in {storage}; list them"),
            (["--export", str(storage)], f"{storage} is not empty, and has no earlier export; choose another folder"),
        ):
            done = mlx(tmp_path, "xp", "ui", str(storage), *options)
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: {message}"), done.stderr
    assert mlx(tmp_path, "xp", "ui", "nothing").stderr.startswith("error: there is no storage")


@pytest.mark.pure
def test_the_page_is_short() -> None:
    assert len(server.PACKAGED.read_text().splitlines()) <= 200


def test_an_error_in_a_page_is_shown_in_its_own_cell(
    browser: Browser, serve: Serve, storage: Path, tmp_path: Path
) -> None:
    """Everything else works. The error shows, too, that the page does not have the token in its environment."""
    tokens = "len([name for name in __import__('os').environ if name.startswith('MLX_UI')])"
    own_page(tmp_path, "    mo.vstack(views.differences(chosen()))", f"    mo.vstack(1 / {tokens})")
    page = opened(browser, serve(storage), tab="Differences")
    shows(page, "ZeroDivisionError")
    shows(page, "broken/run_001/run.json")


def test_a_page_is_edited_in_the_browser(browser: Browser, start: Start, storage: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))  # marimo asks for a name before it saves a file in /tmp
    own_page(folder, 'app_title="Runs"', 'app_title="Ours"')
    settings = {"MLX_UI_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}  # not forked, because marimo runs __main__ again
    process = start(folder, "xp", "ui", str(storage), "--edit", "--port", "0", **settings)
    page, url = browser.page(offline=False), process.stdout.readline().strip().replace("MLX_UI_TOKEN", TOKEN)
    wait_for(lambda: answers(page, url), seconds=60)
    editor = "[...document.querySelectorAll('.cm-content')].find(cell => /import marimo as mo/.test(cell.innerText))"
    page.until(f"!!{editor}", 60)
    page.evaluate(f"""(() => {{
        const editor = {editor};
        editor.focus();
        getSelection().selectAllChildren(editor);
        getSelection().collapseToEnd();
        document.execCommand("insertText", false, '\\nmo.plain_text("edited " + str(6 * 7))');
        const keys = {{key: "Enter", code: "Enter", keyCode: 13, ctrlKey: true, bubbles: true}};
        editor.dispatchEvent(new KeyboardEvent("keydown", keys));
    }})()""")
    shows(page, "edited 42")
    page.evaluate("document.querySelector('[data-testid=save-button]').click()")
    wait_for(lambda: 'mo.plain_text("edited " + str(6 * 7))' in (folder / "dashboard.py").read_text())
    process.kill()
    shutil.rmtree(folder)


@pytest.mark.pure
@pytest.mark.parametrize(
    "name",
    [
        "marimo._cli.cli.main",
        "marimo._server.registry.MIDDLEWARE_REGISTRY.register",
        "marimo._runtime.context.get_context",
        "marimo._runtime.context.types.RuntimeContext.provide_ui_ids",
    ],
)
def test_marimo_has_its_internals_that_are_used(name: str) -> None:
    """marimo has no public way to add headers, or to number elements; see server.py and composer.py."""
    assert callable(pydoc.locate(name)), f"marimo {version('marimo')} has no {name}; adapt its caller, or pin marimo"
