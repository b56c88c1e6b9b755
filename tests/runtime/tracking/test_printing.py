"""Text from a storage cannot control a terminal: it neither moves the cursor nor changes other lines."""

import json
import re
import unicodedata
from pathlib import Path

import pytest
from conftest import Mlx

from mlx_runtime.errors import printable

pytestmark = pytest.mark.pure

EVIL = "a\x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\b\rc\x08\x9b31md\u202ee\x00f\u2028"
"""Clears the screen, sets the title, adds a link, moves the cursor back, adds colors, reverses text."""


def test_no_control_character_is_left() -> None:
    everything = "".join(map(chr, range(0x3000))) + "\ud800\udfff" + EVIL
    left = printable(everything)
    assert {character for character in left if unicodedata.category(character) in ("Cc", "Cs")} == {"\t", "\n"}
    assert not {"\u202e", "\u2066", "\u2028"} & set(left)
    assert "\n" not in printable(everything, one_line=True)
    left.encode()


@pytest.mark.process
def test_commands_print_what_others_wrote_as_text(mlx: Mlx, tmp_path: Path) -> None:
    """Names of experiments and files, every field of a record, and conf.yaml."""
    storage = tmp_path / "storage"
    for number in (1, 2):
        run = storage / re.sub(r"[/\x00]", "", f"digits{EVIL}") / f"run_{number:03d}"
        run.mkdir(parents=True)
        record = {
            "status": "SUCCEEDED",
            "monitor": EVIL,
            "mode": "max",
            "metrics": {EVIL: 0.5 * number},
            "epochs": EVIL,
            "best": {"value": 1.0, "epoch": 0, "path": EVIL},
            "workers": EVIL,
            "host": EVIL + str(number),
            "device": EVIL + str(number),
            "latest": {"epoch": 0, "path": EVIL},
            "heartbeat": "2026-01-01T00:00:00+00:00",
        }
        (run / "run.json").write_text(json.dumps(record))
        (run / "conf.yaml").write_text(json.dumps({"cfg": {EVIL: EVIL + str(number)}}))
        (run / "logs").mkdir()
        (run / f"x\x1b[2Jy\nz{number}").write_text("")
    name = run.parent.name
    commands = [
        ["xp", "ls"],
        ["xp", "ls", "--json"],
        ["xp", "ls", "a\x1b[2J"],
        ["xp", "ls", "--sort", "a\x1b[2J"],
        ["xp", "best", name],
        ["xp", "diff", name, "1", "2"],
        ["xp", "compare", name, "1", "2"],
        ["xp", "stop", name, "1"],
        ["xp", "logs", name, "1"],
        ["data", "show", "--depth", "9"],
        ["data", "rm", "-y", f"{name}/run_001"],
        ["xp", "rm", "-y", name, "1"],
    ]
    for command in commands:
        done = mlx(tmp_path, *command, MLX_STORAGE=str(storage))
        assert done.returncode in (0, 1, 2)
        printed = done.stdout + done.stderr
        assert printed
        assert "Traceback" not in printed
        assert "\x1b" not in printed, command
        assert printable(printed) == printed, command
