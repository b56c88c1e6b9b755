"""Delete caches that tools left in the template's own folder."""

import shutil
from pathlib import Path

for name in ("__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"):
    for folder in list(Path().rglob(name)):
        shutil.rmtree(folder)
