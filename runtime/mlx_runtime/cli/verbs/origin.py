"""The source from which this package was installed, and from which generated projects install it."""

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mlx_runtime import __version__


def requirement() -> str:
    """Return the requirement, in Makefile syntax, with which pip installs this package again.

    A package from an index has no URL of its own: its requirement is the version, with a note for the user.
    """
    if url := _url():
        return f"mlx-runtime @ {url}".replace("$", "$$").replace("#", "\\#")
    found = f"mlx-runtime=={__version__}"
    cure = "if no package index has it, set RUNTIME in the Makefile to a wheel, a git URL or the folder of a checkout"
    print(f"note      make setup installs {found}; {cure}", file=sys.stderr)
    return found


def _url() -> str | None:
    """Return the URL of a wheel, folder or repository recorded by pip or uv (PEP 610), or None."""
    try:
        recorded = distribution("mlx-runtime").read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    origin = json.loads(recorded or "{}")
    url: str = origin.get("url", "")
    if url.startswith("file:") and not Path(url2pathname(urlsplit(url).path)).exists():
        return None
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"{url}#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else url or None
