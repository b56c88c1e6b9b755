"""Who may use a server: holders of its token, and on a loopback address only pages of its own."""

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_runtime.errors import UsageError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Hosts by which a server without a token may be called."""


LEAST_TOKEN = 16
"""Minimum length of a token: shorter ones could be guessed, even from their hash."""

MAKE_A_TOKEN = "make one: export MLX_SERVE_TOKEN=$(openssl rand -hex 24)"


def read_token() -> str | None:
    """Return the token in the environment, or None. Raises UsageError if it is too short, or cannot be in a header."""
    token = os.environ.get("MLX_SERVE_TOKEN") or None
    if token is not None and (len(token) < LEAST_TOKEN or not re.fullmatch("[!-~]+", token)):
        raise UsageError(f"MLX_SERVE_TOKEN needs {LEAST_TOKEN} or more ASCII characters, and no spaces; {MAKE_A_TOKEN}")
    return token


@dataclass(frozen=True)
class Access:
    """The requests that a server answers.

    Attributes:
        digest: `digest_of` the bearer token that requests must have; None for none.
        hosts: Names in the header `Host`, without a port; None for any. A page of another site whose name resolves to
            this machine (DNS rebinding) has another.
    """

    digest: str | None = None
    hosts: frozenset[str] | None = LOOPBACK

    @classmethod
    def at(cls, host: str, token: str | None) -> "Access":
        """Return the requests that a server on an address answers. Beyond this machine, it needs a token."""
        digest = None if token is None else digest_of(token)
        if is_loopback(host):
            return cls(digest, LOOPBACK | {in_url(host)})
        if token is None:
            raise UsageError(f"a server on {host} needs a token; {MAKE_A_TOKEN}")
        return cls(digest, hosts=None)

    def refusal(self, headers: Mapping[str, str], *, public: bool) -> tuple[int, str] | None:
        """Return the status and reason with which a request is refused, or None. `public` ones need no token."""
        host = headers.get("host", "").lower()
        if self.hosts is not None and re.sub(r":\d+$", "", host) not in self.hosts:
            return 403, "this server answers only requests for localhost or 127.0.0.1"
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            return 403, "pages of other sites may not call this server"
        if self.digest is None or public:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return 401, "a token is needed; send the header Authorization: Bearer TOKEN"
        if not hmac.compare_digest(digest_of(token), self.digest):
            return 401, "the token is not that of this server"
        return None


def digest_of(token: str) -> str:
    """Return the hash of a token by which a server recognizes it. Only this hash is sent to a cluster."""
    return hashlib.sha256(token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Return True if only programs on this machine can call an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    """Return an address as it is written in URLs."""
    return f"[{host}]" if ":" in host else host


def curl(url: str, *, token: bool) -> str:
    """Return a command that asks a model for its example row. With `token`, it sends that in the environment."""
    header = ' -H "Authorization: Bearer $MLX_SERVE_TOKEN"' if token else ""
    return f"curl -s {url}/example{header} | curl -s {url}/predict{header} -H 'Content-Type: application/json' -d @-"
