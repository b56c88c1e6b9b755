"""Reject an invalid name of a data job before anything is written, and note whether files are here."""

import json
import re
import sys
from pathlib import Path

name = json.loads(r'''<< cookiecutter.job_name | tojson >>''')  # fmt: skip
if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", name):
    print(
        f"error: {name!r} is not a valid data job name; use up to 100 letters, digits, - and _, starting with a letter",
        file=sys.stderr,
    )
    sys.exit(1)

if {path.name for path in Path().iterdir()} <= {".git"}:
    Path(".mlx").mkdir()
    Path(".mlx", "new").touch()  # for post_gen_project.py: whatever will be here is rendered
