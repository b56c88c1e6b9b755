"""Refuse a name that cannot be a data job's, before anything is written."""

import json
import re
import sys

name = json.loads(r'''<< cookiecutter.job_name | tojson >>''')  # fmt: skip
if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
    print(
        f"error: {name!r} cannot name a data job; use letters, digits, - and _, starting with a letter",
        file=sys.stderr,
    )
    sys.exit(1)
