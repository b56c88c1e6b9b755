"""Recognize secrets in text that is uploaded or exported, also those that no name reveals.

detect-secrets finds tokens of services and random text in source code. This module adds the names of `redaction`,
headers, parts of URLs and options.
"""

import base64
import functools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from mlx_runtime.storage.redaction import QUOTED, UNQUOTED, WORDS, is_secret, may_be_text, reveals

URL = re.compile(r"\b[a-z][a-z0-9+.-]{0,15}://[^\s\"'<>`{}|\\^]+", re.IGNORECASE)
PARAMETER = re.compile(r"[?&#;]([^=&#?;]+)=([^&#;]*)")
SIGNING = re.compile(r"(?:^|[._-])(?:sig|signature|auth|hmac|credential|policy|ticket|jwt|session)$", re.IGNORECASE)
"""Names of URL parameters with secrets, in addition to those of `is_secret`."""

KEYS = ("key", "code")
"""Names of URL parameters whose long values are secrets."""

WEBHOOK = re.compile(r"(?:(?<=[/.])|^)(?:web)?hooks?(?:b2)?(?:\.[^/]*)?/(?:services/)?", re.IGNORECASE)

HEADER = re.compile(
    r"\b(?:(?:authorization(?:\\?[\"'][ \t]*[:=,][ \t]*[bf]?\\?[\"']|[ \t]*:[ \t]*[\"']?|[ \t]*=[ \t]*[bf]?[\"']))"
    r"(?![\w-]+[ \t]+[\\…${<])(?:[A-Za-z][\w-]*[ \t]+)?|cookie:[ \t]*)"
    r"(?P<value>[^\s\"'\\{}$<>,()\[\]]{4,}(?:(?<=[;,])[ \t]*[^\s\"'\\]+)*)",
    re.IGNORECASE,
)
SCHEME = re.compile(
    r"\b(?:(?i:bearer)[ \t]+(?P<bearer>[\w.~+/=-]{8,})|(?i:basic)[ \t]+(?P<basic>[A-Za-z0-9+/]{6,}={0,2}))"
)

PREFIXES = re.compile(r"\b(?:hf_|sk-|npm_|github_pat_|AIza|ya29\.|dop_v1_|shpat_)[\w-]{16,}")
"""Tokens of services that detect-secrets lacks."""

PRIVATE_KEY = re.compile(
    r"-----BEGIN[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----|\Z)"
    r"|PuTTY-User-Key-File-\d.*?(?:Private-MAC:[^\n]*|\Z)",
    re.DOTALL,
)

LOGIN = re.compile(
    rf"\b(?:log_?in|authenticate|(?:http_?)?basic_?auth|auth[ \t]*=[ \t]*"
    rf"|set_?(?:(?:access_?)?token|password|api_?key))[ \t]*"
    rf"\((?:[ \t]*(?:{QUOTED}|[\w.]+)[ \t]*,)*?[ \t]*(?P<value>{QUOTED})[ \t]*\)",
    re.IGNORECASE,
)
"""The last argument of a call that logs in."""

USER = re.compile(r"(?<!\S)(?:-u|--user|--proxy-user)[ =]['\"]?[\w.@-]*[A-Za-z][\w.@-]*:(?P<value>[^\s'\"]+)")

ARGUMENTS = re.compile(rf"\([ \t]*[\"'](?P<name>[\w.-]+)[\"'][ \t]*,[ \t]*(?P<value>{QUOTED})")
"""`setdefault("HF_TOKEN", "...")`, and headers as pairs."""

WORD = r"[A-Za-z0-9+/_=-]{16,}"
RANDOM = re.compile(rf"(?<=[\"'`])({WORD})(?=[\"'`])|(?:(?<==)|(?<=: ))({WORD})(?=[\s,;&|)\]}}\"']|$)")
RANDOM_LENGTH, LONG_LENGTH = 16, 30
RUNS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")

OTHER_PLUGINS = {
    *("BasicAuthDetector", "IPPublicDetector", "PrivateKeyDetector", "KeywordDetector"),
    *("Base64HighEntropyString", "HexHighEntropyString"),  # digests and hashes of commits have the same entropy
    *("CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "SoftlayerDetector", "NpmDetector"),  # slow
}
"""Unused detectors of detect-secrets: addresses are not secrets, and the rules here cover the others."""


class Finding(NamedTuple):
    """Position and kind of a secret in a text."""

    start: int
    end: int
    kind: str


PAIR = re.compile(
    rf"(?P<word>(?i:{WORDS})|(?<=[A-Z_])TOKEN)(?P<mark>\\?[\"'`]?\]?[ \t]*(?::[ \t]*[\w.\[\]| ]+?)?[ \t]*"
    rf"(?:={{1,3}}|!=|:=|=>|:)[ \t]*)(?P<value>{QUOTED}|{UNQUOTED})"
)
OPTION = re.compile(rf"(?<!\S)--?(?:[\w-]*-)?(?i:{WORDS})(?P<mark>[ =]+)(?P<value>{QUOTED}|[^\s\"'-]\S*)")


class _Rules(NamedTuple):
    services: tuple[Any, ...]
    entropy: Any


@functools.cache
def _rules() -> _Rules:
    """Return the rules that need detect-secrets, which is imported when there is text to scan."""
    from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString
    from detect_secrets.settings import default_settings, get_plugins

    with default_settings():
        services = tuple(item for item in get_plugins() if type(item).__name__ not in OTHER_PLUGINS)
    return _Rules(services, Base64HighEntropyString(limit=3.5))


def is_random(word: str) -> bool:
    """Return True if a word looks like a key: random letters of both cases and digits, but not a hash, name or path."""
    if (
        not re.fullmatch(r"(?!sha\d+-)[\w+/=-]{16,}", word, re.ASCII)
        or _rules().entropy.calculate_shannon_entropy(word) < _rules().entropy.entropy_limit
    ):
        return False
    return any(map(_is_random_piece, re.split(r"[-_/+=]+", word)))


def _is_random_piece(piece: str) -> bool:
    kinds = sum(bool(re.search(kind, piece)) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    if len(piece) < RANDOM_LENGTH or kinds < 2 or not re.search("[0-9]", piece):
        return False
    if kinds == 2 and (len(piece) < LONG_LENGTH or re.fullmatch("[0-9a-fA-F]+", piece)):
        return False
    return len(piece) < 2.6 * len(RUNS.findall(piece))


def find(text: str, *, code: bool = False) -> list[Finding]:
    """Return the secrets in a text, in order and without overlaps.

    With `code`, the text is source code, in which only literals are secrets.
    """
    found: list[Finding] = []
    for one in sorted(item for item in _candidates(text, code) if item.start < item.end):
        if found and one.start < found[-1].end:
            found[-1] = found[-1]._replace(end=max(one.end, found[-1].end))
        else:
            found.append(one)
    return found


def _candidates(text: str, code: bool) -> Iterator[Finding]:
    rules = _rules()
    for match in PRIVATE_KEY.finditer(text):
        yield Finding(*match.span(), "private key")
    for match in PREFIXES.finditer(text):
        yield Finding(*match.span(), "token")
    for match in URL.finditer(text):
        yield from _in_url(match[0], match.start())
    for pattern in (HEADER, SCHEME):
        for match in pattern.finditer(text):
            if match.lastgroup != "basic" or _is_login(match["basic"]):
                yield from _value(match, match.lastgroup or "", "authorization")
    for match in PAIR.finditer(text):
        name = re.search(r"[\w.-]*\Z", text[max(0, match.start() - 100) : match.start()])[0] + match["word"]  # type: ignore[index]
        is_literal = match["value"][-1] in "\"'"
        if match["word"].lower() == "authorization":  # whose value has two words
            continue
        if is_secret(name) and reveals(match["value"], name) and (is_literal or not code):
            if not is_literal and _refers(match["value"], name, match["mark"], text):
                continue
            for one in _value(match, "value", match["word"].lower()):
                yield one if is_literal else one._replace(end=_phrase_end(text, one.end))
    for pattern, name in ((OPTION, "option"), (LOGIN, "login"), (USER, "password")):
        for match in pattern.finditer(text):
            if reveals(match["value"]):
                yield from _value(match, "value", name)
    for match in ARGUMENTS.finditer(text):
        if is_secret(match["name"]) and reveals(match["value"], match["name"]):
            yield from _value(match, "value", match["name"].lower())
    for detector in rules.services:
        for secret in {secret.strip(" \t\n\"':=") for secret in detector.analyze_string(text)}:
            for match in re.finditer(re.escape(secret) + r"[\w.~+/=-]*", text) if secret else ():
                yield Finding(*match.span(), detector.secret_type)
    for match in RANDOM.finditer(text):
        if is_random(match[match.lastindex or 0]):
            yield Finding(*match.span(match.lastindex or 0), "random text")


def _value(match: "re.Match[str]", group: str, kind: str) -> Iterator[Finding]:
    """Yield the span of a value, without the quotes around it."""
    value = match[group]
    opening = re.match(r"[rbfuRBFU]{0,2}\\?[\"'`]", value)
    closing = re.search(r"\\?[\"'`]$", value) if opening else None
    if value and reveals(value):
        start = match.start(group) + (opening.end() if opening else 0)
        yield Finding(start, match.end(group) - (len(closing[0]) if closing else 0), kind)


def _phrase_end(text: str, end: int) -> int:
    """Return the end of an unquoted value: in a line of YAML, which starts with its key, the end of the line."""
    line = text[text.rfind("\n", 0, end) + 1 : end]
    phrase = re.match(r"[^\n#\"']*", text[end:])
    is_yaml = re.match(r"[+-]?[ \t]*(?:- )?[\w.-]+: [^=]*$", line) is not None
    return end + len(phrase[0].rstrip()) if is_yaml and phrase else end


def _refers(value: str, name: str, mark: str, text: str) -> bool:
    """Return True if an unquoted value names a variable: `password=self.password`, or `token = next_token`."""
    if re.fullmatch(r"[A-Za-z_][\w]*(?:\.\w+)+", value) and is_secret(value):
        return True
    last = name.rpartition(".")[2]
    return value == last or (may_be_text(name) and mark != "=" and re.fullmatch(r"[A-Za-z_]+", value) is not None)


def _in_url(url: str, at: int) -> Iterator[Finding]:
    """Yield the secrets in a URL: a password, parameters, the path of a webhook, and random segments of the path."""
    start = url.index("://") + 3
    end = start + re.search(r"[/?#]|$", url[start:]).start()  # type: ignore[union-attr]
    user, mark, _ = url[start:end].rpartition("@")
    if (
        mark
        and (":" in user or len(user) >= RANDOM_LENGTH or re.search(r"\d", user))
        and reveals(user.rpartition(":")[2])
    ):
        yield Finding(at + start, at + start + len(user), "password in a URL")
    for match in PARAMETER.finditer(url, end):
        name, value = match[1], match[2]
        signs = SIGNING.search(name) or (name.lower() in KEYS and len(value) >= 8) or is_random(value)
        if (signs or is_secret(name)) and reveals(value, name):
            yield Finding(at + match.start(2), at + match.end(2), f"{name} in a URL")
    path = re.match(r"[^?#]*", url[start:])[0]  # type: ignore[index]
    if (hook := WEBHOOK.search(path)) and re.search(r"\d", path[hook.end() :]):
        yield Finding(at + start + hook.end(), at + start + len(path), "webhook")
    for match in re.finditer(r"(?<=/)[^/]+", path):
        if is_random(match[0]) or re.fullmatch(r"bot\d+:[\w-]{20,}", match[0]):
            yield Finding(at + start + match.start(), at + start + match.end(), "random text in a URL")


def _is_login(text: str) -> bool:
    """Return True if text is a user and a password in base64, as in `Basic ...` of HTTP."""
    try:
        return b":" in base64.b64decode(text, validate=True)
    except ValueError:
        return False
