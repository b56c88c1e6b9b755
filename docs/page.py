"""Trains the template's experiment, and saves pictures of its page (`mlx xp ui`) as docs/page-*.png."""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from screenshot import MLX, ROOT, Browser

TOKEN = "a-token-of-this-script"
SWEEP = ("optimizers.adam.lr=1e-3,3e-3,1e-2", "cfg.start_workers=0", "cfg.num_epochs=10")
PICTURES = {"Runs": "digits/run_003", "Curves": "val/accuracy", "Compose": "conf.yaml: no changes"}
"""Tabs, and a text that each of them shows when it has been drawn."""

TEXTS = """(() => {
    const found = [], walk = (node) => {
        if (node.nodeType === 3) found.push(node.data);
        if (node.shadowRoot) walk(node.shadowRoot);
        node.childNodes.forEach(walk);
    };
    walk(document.body);
    return found.join(" ");
})()"""


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        subprocess.run([*MLX, "train", "new", "digits", "-o", parent], check=True, stdout=subprocess.DEVNULL)
        folder = Path(parent, "digits")
        subprocess.run([*MLX, "train", "sweep", *SWEEP], cwd=folder, check=True)
        (folder / "browser").mkdir()
        command, settings = [*MLX, "xp", "ui", "--port", "0"], os.environ | {"MLX_UI_TOKEN": TOKEN}
        server = subprocess.Popen(command, cwd=folder, env=settings, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = server.stdout.readline().strip().replace("MLX_UI_TOKEN", TOKEN)
        try:
            with Browser(folder / "browser") as browser:
                for tab, text in PICTURES.items():
                    page = browser.page(width=1200, height=600, offline=False)
                    while page.evaluate("location.protocol") != "http:":  # the server starts
                        page.open(f"{url}&tab={tab}")
                    page.until(f"{TEXTS}.includes({text!r})")
                    time.sleep(2)  # until the charts are drawn
                    page.picture(ROOT / "docs" / f"page-{tab.lower()}.png")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
