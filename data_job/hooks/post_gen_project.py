"""Delete caches that tools left in the template's own folder, and record what was rendered, for upgrades."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

USERS = ("src", "tests", "notebook.ipynb")
"""Files that belong to the user: an upgrade never writes them, and needs no more than their hashes."""

answers = json.loads(r'''<< cookiecutter | tojson >>''')  # fmt: skip

for name in ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"):
    for folder in list(Path().rglob(name)):
        shutil.rmtree(folder)

new = Path(".mlx", "new")
if not new.exists():  # rendered over files of the user by `cookiecutter -f`: their record, if any, is still the base
    sys.exit()
new.unlink()

files: dict[str, object] = {}
for path in sorted(Path().rglob("*")):
    if path.is_file() and path.parts[0] != ".git":
        content = path.read_bytes()
        lines = content.decode("latin-1").splitlines(keepends=True)  # any bytes, and back
        files[path.as_posix()] = (
            {"sha256": hashlib.sha256(content).hexdigest()}
            if path.parts[0] in USERS
            else {"executable": bool(path.stat().st_mode & 0o100), "lines": lines}
        )
context = {key: value for key, value in answers.items() if not key.startswith("_")}
if answers.get("_variant"):
    context["variant"] = answers["_variant"]
record = {"version": answers["_version"], "context": context, "files": files}
Path(".mlx", "template.json").write_text(json.dumps(record, indent=1) + "\n")
