"""Keep secrets out of records, reports and logs: the values of keys that name secrets, and users in URLs.

Secrets without such a name are not recognized. `companions/hub/detection.py` also looks for them in what is uploaded.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "…"
"""Replacement for a secret."""

LEFT_OUT = re.compile(rf"(?:^|[:=/]){HIDDEN}(?:$|[@&])")
"""Matches values of a redacted config whose secret was left out."""

NOT_SECRET = re.compile(
    r"(?:null|none|true|false|\?\?\?|str|int|float|bytes|bool|any|\$\w*|.*\{.*\}|\$\{.*|%s|\w{0,5}\.{3}|[.*…]+|<.*>"
    r"|x{3,}|your[ _-].*|https?://[\w.:-]+/?)?",
    re.IGNORECASE,
)
"""Values that reveal nothing: an empty value, a placeholder, a type, a host, or a reference to a secret."""

WORD = re.compile(r"(?=.{1,15}$)[a-z]+(?:_[a-z]+)?")
"""Values of settings called `token` or `signature`, like `average`, but not of secrets."""

NOT_TOKEN = re.compile(r"\[.*\]|[+-]?\d{0,5}|[+-]?\d*\.\d+(?:e[+-]?\d+)?|\S{1,3}", re.IGNORECASE)
"""Values of text tokens, like `[PAD]`, and of counts of tokens, but not of secrets."""

TEXT_TOKEN = re.compile(
    r"(?:^|[._-])(?:(?:bos|eos|pad|unk|cls|sep|mask|special|start|end|stop|eot|image|img|audio|video|class|register"
    r"|prefix|suffix|next|prev|last|first|max|min|num|n|per|by|each|new|word|sub|char|byte|forced\w*|target|source|src"
    r"|tgt|label|blank|context|extra|role|turn|forward|backward|train|val|test|eval))[_-](?:token|pass)$",
    re.IGNORECASE,
)
"""Names of text tokens, and of passes over data."""

WORDS = (
    r"(?:(?<![A-Za-z0-9])(?:pass|pass[_-]?phrase|authorization|bearer|cookie|credentials?|signature|token"
    r"|web[_-]?hook(?:[_-]?url)?)"
    r"|(?:smtp|mail|user|admin|root|ftp|ssh|sudo|login|proxy|redis|mysql|pg|postgres|mongo|db|database|key)[_-]?pass"
    r"|(?:access|secret|signing|encryption|master|session|shared|storage|webhook|hmac|deploy|api|auth|service|account|db"
    r"|database|priv|private|client)[_-]?key(?:[_-]?id)?"
    r"|pass[_-]?phrase|password|passwd|pwd|secret|(?:access|auth|bearer|refresh|session|api|bot)[_-]?token)"
    r"(?:[_-]?(?:value|text|string|hex|b64|base64|v?\d+))?"
)
"""Endings of names of secrets, as a regular expression for any case."""

QUOTED = r"[rbfuRBFU]{0,2}(?:\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')|\\\"[^\"\\\n]*\\\""
UNQUOTED = r"(?!<)[^\s\"'`(){}\[\],;&|\\]+(?=[\s,;&|)\]}\"'`]|$)"
_LOGIN = r"(?i:bearer|basic|token)[ \t]+"

_NAME = re.compile(rf"(?i:{WORDS})$|(?<=[A-Z_])TOKEN$")
_PAIR = re.compile(
    rf"(?P<word>(?i:{WORDS})|(?<=[A-Z_])TOKEN)(?P<mark>\\?[\"'`]?\]?[ \t]*(?::[ \t]*str[ \t]*)?(?:={{1,2}}|:)[ \t]*)"
    rf"(?P<value>{QUOTED}|{_LOGIN}{UNQUOTED}|(?!{_LOGIN}){UNQUOTED})"
)
_USER = re.compile(r"(?<=://)(?:[^\s/@:?#\"'<>{}…]*:[^\s/@?#\"'<>{}…]+|[^\s/@:?#\"'<>{}…]{16,})@")
"""A password, or a token, before the host of a URL."""

FILES = (
    *(".env*", "*.env", "!.env.example", ".netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials", "kaggle.json"),
    *("secrets.*", "*.secret", "*.token", "token.txt", "*-token.txt", "*_token.txt", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*credentials*.json"),
    *("service-account*.json", "service_account*.json", ".aws/", ".azure/", ".docker/", ".gcloud/", ".gnupg/"),
    *(".kube/", ".ssh/"),
)
"""Names of files and folders that hold secrets, as lines of a .gitignore or, below `**/`, a .dockerignore."""

_KEY = re.compile(r"[+~]*[\w.@/-]+")


def is_secret(name: str) -> bool:
    """Return True if a config key or an environment variable names a secret, like `cfg.db_password` or `HF_TOKEN`."""
    return bool(_NAME.search(name)) and not TEXT_TOKEN.search(name)


def may_be_text(name: str) -> bool:
    """Return True if a name like `token` is also common for harmless values."""
    return re.search(r"(?<![a-z0-9])(?:token|signature)$", name, re.IGNORECASE) is not None


def reveals(value: str, name: str = "") -> bool:
    """Return True if a value, given its name, would reveal a secret."""
    bare = value.strip("\"'`")
    if HIDDEN in bare or NOT_SECRET.fullmatch(bare) or (may_be_text(name) and NOT_TOKEN.fullmatch(bare)):
        return False
    return not (name.rpartition(".")[2] in ("token", "signature") and WORD.fullmatch(bare))


def redact(text: str) -> str:
    """Return a text without the values of names of secrets, and without users in URLs."""

    def hide(match: "re.Match[str]") -> str:
        before = text[max(0, match.start() - 100) : match.start()]
        name, mark, value = re.split(r"[^\w.-]", before)[-1] + match["word"], match["mark"], match["value"]
        quote = "" if value[-1] not in "\"'" else value[-2:] if value[-2:] == '\\"' else value[-1]
        refers = not quote and (("." in value and is_secret(value)) or (mark != "=" and "=" in mark))
        if refers or not is_secret(name) or not reveals(value, name):
            return match[0]
        return f"{match['word']}{mark}{quote}{HIDDEN}{quote}"

    return _USER.sub(f"{HIDDEN}@", _PAIR.sub(hide, text))


def redact_override(text: str) -> str:
    """Return an override or another word of a command line, without its value if the value is a secret."""
    name, mark, value = text.partition("=")
    if mark and _KEY.fullmatch(name) and _hides(name, value):
        return f"{name}={HIDDEN}"
    return redact(text)


def redact_tree(value: Any, *, secret: bool = False) -> Any:
    """Return a config without the values whose keys mark them as secrets, and without secrets recognized in strings."""
    if isinstance(value, Mapping):
        return {name: redact_tree(item, secret=secret or _hides(str(name), item)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(item, secret=secret) for item in value]
    if secret and reveals(str(value)):
        return HIDDEN
    return redact(str(value)) if isinstance(value, str) else value  # a plain one, of any subclass


def secret_keys(tree: Any, key: str = "", *, secret: bool = False) -> Iterator[str]:
    """Yield the full keys of secrets in a config, recognized by key or by value, like a password in a URL."""
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from secret_keys(item, f"{key}.{name}".lstrip("."), secret=secret or _hides(str(name), item))
    elif not isinstance(tree, list | tuple) and (
        reveals(str(tree)) if secret else isinstance(tree, str) and "${" not in tree and redact(tree) != tree
    ):
        yield key


def _hides(name: str, value: Any) -> bool:
    """Return True if a key marks its value as a secret; below one like `token`, only text is."""
    if isinstance(value, Mapping | list | tuple):
        return is_secret(name) and not may_be_text(name)
    return is_secret(name) and reveals(str(value), name)


def hidden_texts(tree: Any, shown: Any) -> set[str]:
    """Return the strings of a config that are missing from its redacted form."""
    if isinstance(tree, Mapping | list | tuple):
        same_kind = type(tree) is type(shown) and len(tree) == len(shown)
        keys = tree.keys() if isinstance(tree, Mapping) else range(len(tree))
        return {text for key in keys for text in hidden_texts(tree[key], shown[key] if same_kind else None)}
    return {tree} if isinstance(tree, str) and tree != shown else set()


def unredact(saved: Any, shown: Any, tree: Any) -> Any:
    """Return a saved, redacted config with its secrets put back from the current config `tree`, `shown` redacted.

    A secret is put back only where the two configs are otherwise equal.
    """
    if saved == shown:
        return tree
    if not (isinstance(saved, Mapping) and isinstance(shown, Mapping) and isinstance(tree, Mapping)):
        return saved
    both = shown.keys() & tree.keys()
    return {name: unredact(item, shown[name], tree[name]) if name in both else item for name, item in saved.items()}
