"""The page to try a model with one row: a single file, which asks the server for its columns."""

import base64
import hashlib
import re
from pathlib import Path

PAGE = (Path(__file__).parent / "pages" / "try.html").read_bytes()


def _hashes(tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts)


POLICY = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
    "img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page runs its own script, and calls nothing but its own server."""

HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
}
