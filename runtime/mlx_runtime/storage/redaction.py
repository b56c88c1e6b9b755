"""Keep secrets out of records, reports, logs and uploads."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "…"
"""Replaces a secret."""

WORDS = (
    r"(?:pass(?:word|wd|phrase)|pwd|secret|credentials?|api[_-]?key|(?:access|secret|private)[_-]?key(?:[_-]?id)?"
    r"|(?:access|api|auth|bearer|github|gitlab|hf|hub|refresh|session|wandb)[_-]?token)"
)
"""Endings of the names of secrets. `eos_token` is not one."""

NAME = re.compile(rf"(?:^|[._-]){WORDS}$", re.IGNORECASE)

VARIABLE = re.compile(r"(?:^|_)TOKEN$")
"""Names of environment variables that hold secrets."""

NO_SECRETS = re.compile(r"(?:null|none|true|false|\?\?\?|str|int|float|bytes|bool|any|…|\$\{.*)?", re.IGNORECASE)
"""Values that reveal nothing: no value, a reference to where the secret is, or a type."""

PAIR = re.compile(
    rf"(?P<name>(?<![\w.-])(?:(?:[\w.-]*[._-])?(?i:{WORDS})|\w*TOKEN))"
    r"(?P<mark>[\"']?[ \t]*(?::[ \t]*[\w.\[\]| ]+?)?[ \t]*[=:][ \t]*)"
    r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s\"'(){}\[\],;&|]+(?=[\s,;&|)\]}]|$))"
)
"""`password=...`, `password: ...` or `"password": ...`; in code only if a literal follows."""

OPTION = re.compile(rf"(?P<name>(?<!\S)--?(?:[\w-]*-)?(?i:{WORDS}|token))(?P<mark>[ =]+)(?P<value>[^\s-]\S*)")
"""`--password ...`."""

SHAPES = re.compile(
    r"-----BEGIN[A-Z ]* PRIVATE KEY-----.*?(?:-----END[A-Z ]* PRIVATE KEY-----|\Z)"
    r"|(?<=://)[^/\s@'\"]+(?=@)"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}"
    r"|\b(?:gh[oprsu]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}",
    re.DOTALL,
)
"""Text that is secret in any context: passwords in URLs, private keys, tokens of well-known services."""

FILES = (
    *(".env*", "!.env.example", ".netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials", "kaggle.json"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*credentials*.json", "service[-_]account*.json"),
    *(".aws/", ".azure/", ".docker/", ".gcloud/", ".gnupg/", ".kube/", ".ssh/"),
)
"""Names of files and folders that hold secrets, as lines of a .gitignore."""


def is_secret(name: str) -> bool:
    """Return True if a key of a config or an environment variable is a secret, like `cfg.db_password` or `HF_TOKEN`."""
    return bool(NAME.search(name) or VARIABLE.search(name))


def redacted(text: str) -> str:
    """Return a text without the secrets that can be recognized in it."""
    text = SHAPES.sub(HIDDEN, text)
    for pattern in (PAIR, OPTION):
        text = pattern.sub(_without_value, text)
    return text


def _without_value(match: "re.Match[str]") -> str:
    value = match["value"]
    return match[0] if NO_SECRETS.fullmatch(value.strip("\"'")) else f"{match['name']}{match['mark']}{HIDDEN}"


def redacted_override(text: str) -> str:
    """Return an override or another word of a command line, without its value if that is a secret."""
    name, mark, value = text.partition("=")
    if mark and is_secret(name) and not NO_SECRETS.fullmatch(value.strip("\"'")):
        return f"{name}={HIDDEN}"
    return redacted(text)


def redacted_tree(value: Any, *, secret: bool = False) -> Any:
    """Return a config without the values whose keys mark them as secrets, and without secrets recognized in strings."""
    if isinstance(value, Mapping):
        return {name: redacted_tree(item, secret=secret or is_secret(str(name))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(item, secret=secret) for item in value]
    if secret and not NO_SECRETS.fullmatch(str(value)):
        return HIDDEN
    return redacted(value) if isinstance(value, str) else value


def secret_keys(tree: Any, key: str = "", *, secret: bool = False) -> Iterator[str]:
    """Yield the full keys in a config that mark their values as secrets."""
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from secret_keys(item, f"{key}.{name}".lstrip("."), secret=secret or is_secret(str(name)))
    elif secret and not isinstance(tree, list | tuple) and not NO_SECRETS.fullmatch(str(tree)):
        yield key


def hidden_texts(tree: Any, shown: Any) -> set[str]:
    """Return the strings of a config that are missing from its redacted form."""
    if isinstance(tree, Mapping | list | tuple):
        same_kind = type(tree) is type(shown) and len(tree) == len(shown)
        keys = tree.keys() if isinstance(tree, Mapping) else range(len(tree))
        return {text for key in keys for text in hidden_texts(tree[key], shown[key] if same_kind else None)}
    return {tree} if isinstance(tree, str) and tree != shown else set()


def filled(saved: Any, shown: Any, tree: Any) -> Any:
    """Return a saved, redacted config with its secrets put back from the current config `tree`, `shown` redacted.

    A secret is known only where the current config is the same without it.
    """
    if saved == shown:
        return tree
    if not (isinstance(saved, Mapping) and isinstance(shown, Mapping) and isinstance(tree, Mapping)):
        return saved
    both = shown.keys() & tree.keys()
    return {name: filled(item, shown[name], tree[name]) if name in both else item for name, item in saved.items()}
