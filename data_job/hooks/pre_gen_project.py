"""Reject an invalid name of a data job before anything is written."""

import json
import re
import sys

name = json.loads(r'''<< cookiecutter.job_name | tojson >>''')  # fmt: skip
if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", name):
    print(
        f"error: {name!r} is not a valid data job name; use up to 100 letters, digits, - and _, starting with a letter",
        file=sys.stderr,
    )
    sys.exit(1)
