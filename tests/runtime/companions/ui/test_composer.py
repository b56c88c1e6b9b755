"""An experiment is composed in a real browser, by clicks alone, and trained."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from browser import Browser, Page
from conftest import edit

from mlx_runtime.config.projects import CONF

pytestmark = pytest.mark.browser

NOTEBOOK = """
import marimo

app = marimo.App(width="full")

@app.cell
def _():
    from pathlib import Path
    from mlx_runtime.companions.ui.composer import composer, composer_tab
    composing = composer(Path.cwd())
    return composer_tab, composing

@app.cell
def _(composer_tab, composing):
    composer_tab(composing)
    return
"""

HELPERS = """
all = (selector, root = document) => [...root.querySelectorAll(selector),
    ...[...root.querySelectorAll("*")].filter(item => item.shadowRoot).flatMap(item => all(selector, item.shadowRoot))];
shown = () => all("pre, td").map(item => item.innerText).join("\\n");
button = label => all("button").filter(item => item.innerText == label && !item.disabled)[0];
labelled = (kind, label) => all(kind).filter(item => item.shadowRoot?.querySelector("label")?.innerText == label)[0];
field = label => labelled("marimo-text", label)?.shadowRoot.querySelector("input");
fill = (input, text) => {
    input.focus();
    Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(input, text);
    input.dispatchEvent(new Event("input", {bubbles: true}));
    input.blur();
    return true;
};
list = label => labelled("marimo-dropdown", label)?.shadowRoot.querySelector("button");
option = text => all("[role=option]").filter(item => item.innerText.trim() == text)[0];
"""


class Person:
    """Somebody who clicks and types in the tab, and waits for what they expect to see."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.evaluate(HELPERS)

    def click(self, label: str, then: str) -> None:
        self.page.until(f"!!button({json.dumps(label)})")
        self.page.evaluate(f"button({json.dumps(label)}).click()")
        self.sees(then)

    def choose(self, label: str, option: str, then: str = "") -> None:
        self.page.until(f"!!list({json.dumps(label)})")
        self.page.evaluate(f"list({json.dumps(label)}).click()")
        self.page.until("!!all('[cmdk-input]')[0]")
        self.page.evaluate(f"fill(all('[cmdk-input]')[0], {json.dumps(option)})")
        self.page.until(f"!!option({json.dumps(option)})")
        self.page.evaluate(f"option({json.dumps(option)}).click()")
        self.page.until(f"list({json.dumps(label)})?.innerText.includes({json.dumps(option)})")
        self.sees(then)

    def fill(self, **texts: str) -> None:
        for label, text in texts.items():
            self.page.until(f"!!field({json.dumps(label)})")
            self.page.evaluate(f"fill(field({json.dumps(label)}), {json.dumps(text)})")

    def sees(self, text: str) -> None:
        try:
            self.page.until(f"shown().includes({json.dumps(text)})")
        except TimeoutError as error:
            raise AssertionError(f"{text!r} is not in: {self.page.evaluate('shown()')}") from error


@contextlib.contextmanager
def served(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    notebook = folder / "notebook.py"
    notebook.write_text(NOTEBOOK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "marimo", "run", str(notebook), "--headless", "--no-token", "--port", str(port)]
    with (folder / "marimo.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while True:
            try:
                with urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                assert server.poll() is None, (folder / "marimo.log").read_text()
                assert time.monotonic() < end
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def test_a_network_is_composed_by_clicks_and_trained(digits: Path, environment: dict[str, str], tmp_path: Path) -> None:
    environment = environment | {"MLX_CACHE": str(tmp_path / "cache"), "MPLCONFIGDIR": str(tmp_path)}
    edit(digits / CONF, "num_epochs: 30", "num_epochs: 5")
    edit(digits / CONF, "start_workers: 2", "start_workers: 0")
    before = (digits / CONF).read_text()
    (tmp_path / "browser").mkdir()
    with served(digits, environment) as url, Browser(tmp_path / "browser") as browser:
        page = browser.page(width=1400, offline=False)
        page.open(url)
        person = Person(page)
        person.sees("no problems")
        identity = "button('Drop changes').getRootNode().host.parentElement.getAttribute('object-id')"
        earlier = page.evaluate(identity)
        person.choose("Class", "torch.nn.Sequential", then="+    _target_: torch.nn.Sequential")
        assert page.evaluate(identity) != earlier  # otherwise late clicks would press other buttons
        for number, path in enumerate(("src.models.ConvBlock", "src.models.ConvBlock", "torch.nn.Flatten")):
            person.choose("Block", path)
            person.click("Add block", then=f"{number}  {path}")
        person.choose("Block", "torch.nn.Linear")
        person.click("Add block", then="models.net._args_[3].in_features: ??? must be given a value")
        person.choose("Node", "models.net._args_[3]: Linear", then="size of each input sample")
        person.fill(in_features="128", out_features="10", bias="false")
        page.evaluate("button('Apply').click(), button('Save conf.yaml').click()")  # before the result is shown
        person.sees("nothing was done: the page has changed since that click")
        assert (digits / CONF).read_text() == before
        for line in ("in_features: 128", "out_features: 10", "bias: false"):
            person.sees(f"+        {line}")
        person.sees("models.net._args_[1]: ")
        person.sees("to have 1 channels, but got 32 channels instead")
        person.choose("Node", "models.net._args_[1]: ConvBlock", then="int = 1")
        person.fill(in_channels="thirty")
        person.click("Apply", then="models.net._args_[1].in_channels is 'thirty', not of type int")
        page.until("field('in_channels')?.value == '1'")
        person.fill(in_channels="32")
        person.click("Apply", then="no problems")
        person.sees("(n, 32, 2, 2)")
        person.sees("1,280")
        page.picture(tmp_path / "composed.png")
        person.click("Save conf.yaml", then="conf.yaml: no changes")
        assert "in_channels: 32\n      - _target_: torch.nn.Flatten\n" in (digits / CONF).read_text()
        person.click("Start run", then="started; output in ")
        assert [error for error in page.errors() if "was preloaded" not in error] == []  # of marimo's own pages
        assert all(request.startswith(url) for request in page.requests())
        file, deadline = digits / "runs" / "digits" / "run_001" / "run.json", time.monotonic() + 120
        while not (file.exists() and "SUCCEEDED" in file.read_text()):
            assert time.monotonic() < deadline, page.evaluate("shown()")
            time.sleep(0.2)
    assert json.loads(file.read_text())["best"]["value"] >= 0.97  # of val/accuracy
