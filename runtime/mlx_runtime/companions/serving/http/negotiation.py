"""The types of bodies that a client and a server agree on, and refusals."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

JSON, NPY, ARROW = "application/json", "application/x-npy", "application/vnd.apache.arrow.stream"


class Refusal(Exception):  # noqa: N818 - an answer
    """A request is answered with a status and one line."""

    def __init__(self, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(text)
        self.status, self.headers = status, headers


class BodyError(Refusal):
    """The body of a request cannot be read."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(status, text)


def kind_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the type of the body of a request."""
    if b"content-encoding" in headers:
        raise Refusal(415, "compressed bodies are not read", (b"connection", b"close"))
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind not in (JSON, NPY, ARROW):
        wanted = f"{JSON}, {NPY} or {ARROW}"
        raise Refusal(415, f"Content-Type is {kind!a:.60}; expected {wanted}", (b"connection", b"close"))
    return kind


def wanted_kind(headers: Mapping[bytes, bytes]) -> str:
    """Return the type of the answer: the first known one in `Accept`, by default JSON."""
    accept = headers.get(b"accept", b"*/*").decode("latin-1").lower()
    known = [item for part in accept.split(",") if (item := part.partition(";")[0].strip()) in (JSON, NPY, ARROW)]
    return known[0] if known else JSON


def wanted_output(scope: Mapping[str, Any]) -> str | None:
    """Return the output that the query asks for, of several."""
    return next(iter(parse_qs(scope.get("query_string", b"").decode("latin-1")).get("output", ())), None)
