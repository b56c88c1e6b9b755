"""Addresses of clusters, and the decision whether they may receive the user's token."""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mlx_runtime.errors import ClusterError, UsageError, printable, short_message
from mlx_runtime.settings import Settings

DASHBOARD_PORT = 8265

OTHER_PORTS = {6379: "Ray's own port", 10001: "the port of Ray Client"}
"""Default ports of a head node that do not accept jobs."""


@dataclass(frozen=True)
class Address:
    """The address of a cluster's dashboard, and its source."""

    url: str
    source: str
    notice: str = ""
    """Explanation if the text was not the address of a dashboard."""

    @classmethod
    def parse(cls, text: str | None, option: str = "--ray-address") -> "Address":
        """Parse an address, by default the one in `RAY_ADDRESS`.

        It may be `http(s)://host:8265`, `host`, `host:port`, or an address of the same head node that does not accept
        jobs: `ray://host:10001`, `host:6379`. Messages call it `option`.
        """
        source = option if text else "RAY_ADDRESS"
        text = (text or os.environ.get("RAY_ADDRESS") or "").strip()
        if not text:
            raise UsageError(f"which cluster? Pass {option} http://HEAD:8265, or set RAY_ADDRESS")
        scheme, mark, rest = text.partition("://")
        if not mark:
            scheme, rest = "", text
        parts = urlsplit(f"//{rest}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or host.startswith("-") or scheme not in ("", "http", "https", "ray") or text in ("auto", "local"):
            raise UsageError(f"{source} is {text!r}, which is not the address of a cluster; write http://HEAD:8265")
        if parts.username or parts.password:
            raise UsageError(f"{source} contains a user name or password; set the cluster's token in RAY_AUTH_TOKEN")
        host = f"[{host}]" if ":" in host else host
        if scheme in ("http", "https") and port not in OTHER_PORTS:
            return cls(f"{scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}", source)
        problem = "has no port"
        if scheme == "ray" or port in OTHER_PORTS:
            problem = f"is {OTHER_PORTS.get(port or 10001, 'an address for Ray Client')}"
        elif port:
            return cls(f"http://{host}:{port}", source)
        url = f"{'https' if scheme == 'https' else 'http'}://{host}:{DASHBOARD_PORT}"
        return cls(url, source, f"{text} {problem}; using the dashboard, {url}")


def is_named(url: str) -> bool:
    """Return True if the user has named a cluster now, which may receive the token: in `RAY_ADDRESS`, or with `--on`.

    An address in the record of a run is not enough, because anyone who can write to the storage can change it.
    """
    if (job := Settings.read().job) is not None and job["address"] == url:
        return True
    with contextlib.suppress(UsageError):
        return Address.parse(None).url == url
    return False


def note_untrusted(url: str) -> None:
    """Print to stderr that a cluster did not receive the token because only a run's record names it."""
    problem = f"your token was not sent to {url}, which only run.json names"
    print(printable(f"note: {problem}; if it is your cluster: RAY_ADDRESS={url}"), file=sys.stderr)


def find_token() -> tuple[str | None, str | None]:
    """Return the token for clusters that require one, and its source, searched in Ray's order."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        if path:
            raise ClusterError(f"cannot read RAY_AUTH_TOKEN_PATH={path}: {short_message(error)}") from error
    return (token, "RAY_AUTH_TOKEN_PATH" if path else str(file)) if token else (None, None)
