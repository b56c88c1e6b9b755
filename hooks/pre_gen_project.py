"""Reject an invalid name of an experiment before anything is written."""

import json
import re
import sys

name = json.loads(r'''<< cookiecutter.experiment_name | tojson >>''')  # fmt: skip
if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,99}", name):
    print(
        f"error: {name!r} is not a valid experiment name; use up to 100 letters, digits, - and _, "
        "starting with a letter",
        file=sys.stderr,
    )
    sys.exit(1)
