"""The cost of a mirror: the same run with and without one, on a Hub on this machine."""

import json
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from commands import ROOT, environment, mlx, workplace
from page import table
from processes import cost
from rounds import alternating, median

sys.path.append(str(ROOT / "tests"))

from hub_server import Hub

TITLE = "Mirrors"

CONTENDERS = {"without": "no mirror", "mirror": "`cfg.hub.mirror`"}

ANSWER_S = 0.1
"""How long the Hub takes to answer each request."""


def section(rounds: int, only: Collection[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="bench-") as parent, Hub() as hub:
        hub.delay_s = ANSWER_S
        hub.create("alice/mirrored")
        folder = workplace(Path(parent), "checkpoints")
        found = alternating(list(CONTENDERS), only, rounds, lambda contender: _measured(contender, folder, hub))
    commits = len(hub.commits("alice/mirrored"))
    rows = []
    for contender, measured in found.items():
        epoch, blocked, end, whole = (median(item[name] for item in measured) for name in measured[0])
        cells = [f"{epoch:.2f} s", f"{1000 * blocked:.0f} ms", f"{end:.2f} s", f"{whole:.1f} s"]
        rows.append([CONTENDERS[contender], *cells])
    head = ["", "epoch with a checkpoint", "blocking the loop", "from the loop to the end of the run", "whole run"]
    return f"""Four epochs, two of them with a checkpoint of 19 MB; {commits} commits upload them to a Hub on this
machine, which answers each request after {ANSWER_S} s. Two workers keep all cores busy, so uploading and the Hub itself
slow them down. The end of a mirrored run waits for the last upload. Medians of {rounds} alternating rounds.

{table(head, rows)}
"""


def _measured(contender: str, folder: Path, hub: Hub) -> dict[str, float]:
    out = folder / "measured.json"
    out.unlink(missing_ok=True)
    mirror = []
    if contender == "mirror":
        mirror = ["cfg.hub.mirror=hf://alice/mirrored"]
        hub.repositories.clear()
    command = mlx("cfg.num_epochs=4", "models.net.layers=1", f"cfg.out={out}", *mirror)
    taken = cost(command, folder, environment(folder) | hub.variables())
    found = json.loads(out.read_text())
    return {
        "epoch": median(found["with"]),
        "blocked": median(found["blocked"]),
        "end": taken.started + taken.wall_s - out.stat().st_mtime,
        "whole": taken.wall_s,
    }
