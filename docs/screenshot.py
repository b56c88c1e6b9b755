"""Trains the template's experiment, opens it in TensorBoard, and saves a screenshot as docs/tensorboard.png."""

import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import Browser, Page  # noqa: E402 - needs the path above
from clusters import free_ports  # noqa: E402

MLX = (sys.executable, "-m", "mlx_runtime")


@contextlib.contextmanager
def board(folder: Path, *names: str) -> Iterator[str]:
    """Run `mlx xp board NAMES` in an experiment, and yield the address of its TensorBoard."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([*MLX, "xp", "board", *names, "--port", str(port)], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(url, timeout=5)
                break
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError("TensorBoard did not answer")
            time.sleep(0.3)
        yield url
    finally:
        server.terminate()
        server.wait()


def curves(browser: Browser, url: str, least: int, tags: str = "") -> Page:
    """Open the curves whose tags match a regular expression, and wait until at least `least` of them are drawn."""
    page = browser.page(width=1400, height=1000, offline=False)
    page.open(f"{url}/?darkMode=false&tagFilter={quote(tags)}#timeseries")
    page.until(f"document.querySelectorAll('scalar-card line-chart svg path').length >= {least}")
    page.evaluate("[...document.querySelectorAll('button')].find(item => item.innerText.includes('Settings')).click()")
    time.sleep(1)  # until the cards have moved
    return page


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        subprocess.run([*MLX, "train", "new", "digits", "-o", parent], check=True, stdout=subprocess.DEVNULL)
        folder = Path(parent, "digits")
        subprocess.run([*MLX, "train", "run", "cfg.log_every_steps=5"], cwd=folder, check=True)
        (folder / "browser").mkdir()
        with Browser(folder / "browser") as browser, board(folder, "digits", "run_001") as url:
            curves(browser, url, least=4, tags="train/|val/").picture(ROOT / "docs" / "tensorboard.png")


if __name__ == "__main__":
    main()
