"""Secrets stay out of records, reports, logs and uploads: which names and files hold them, and texts without them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "…"
"""Stands for a secret."""

WORDS = (
    r"(?:pass(?:word|wd|phrase)|pwd|secret|credentials?|api[_-]?key|(?:access|secret|private)[_-]?key(?:[_-]?id)?"
    r"|(?:access|api|auth|bearer|github|gitlab|hf|hub|refresh|session|wandb)[_-]?token)"
)
"""What names of secrets end with. `eos_token` is none."""

NAME = re.compile(rf"(?:^|[._-]){WORDS}$", re.IGNORECASE)

VARIABLE = re.compile(r"(?:^|_)TOKEN$")
"""Likewise, as environment variables are written."""

NO_SECRETS = re.compile(r"(?:null|none|true|false|\?\?\?|str|int|float|bytes|bool|any|…|\$\{.*)?", re.IGNORECASE)
"""Values that give nothing away: none, a reference to where the secret is, or a type."""

PAIR = re.compile(
    rf"(?P<name>(?<![\w.-])(?:(?:[\w.-]*[._-])?(?i:{WORDS})|\w*TOKEN))"
    r"(?P<mark>[\"']?[ \t]*(?::[ \t]*[\w.\[\]| ]+?)?[ \t]*[=:][ \t]*)"
    r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s\"'(){}\[\],;&|]+(?=[\s,;&|)\]}]|$))"
)
"""`password=...`, `password: ...` or `"password": ...`; of code only if what follows is a literal."""

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
"""Texts that are secrets wherever they stand: keys in addresses, private keys, tokens of well-known services."""

FILES = (
    *(".env*", "!.env.example", ".netrc", ".pgpass", ".npmrc", ".pypirc", ".git-credentials", "kaggle.json"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*credentials*.json", "service[-_]account*.json"),
    *(".aws/", ".azure/", ".docker/", ".gcloud/", ".gnupg/", ".kube/", ".ssh/"),
)
"""Files and folders that hold secrets by their names, as lines of a .gitignore."""


def is_secret(name: str) -> bool:
    """True if a key of a config or a variable should not be shown, like `cfg.db_password` or `HF_TOKEN`."""
    return bool(NAME.search(name) or VARIABLE.search(name))


def redacted(text: str) -> str:
    """A text without the secrets that can be recognized in it."""
    text = SHAPES.sub(HIDDEN, text)
    for pattern in (PAIR, OPTION):
        text = pattern.sub(_without_value, text)
    return text


def _without_value(match: "re.Match[str]") -> str:
    value = match["value"]
    return match[0] if NO_SECRETS.fullmatch(value.strip("\"'")) else f"{match['name']}{match['mark']}{HIDDEN}"


def redacted_override(text: str) -> str:
    """An override or another word of a command line, without its value if that is a secret."""
    name, mark, value = text.partition("=")
    if mark and is_secret(name) and not NO_SECRETS.fullmatch(value.strip("\"'")):
        return f"{name}={HIDDEN}"
    return redacted(text)


def redacted_tree(value: Any, *, secret: bool = False) -> Any:
    """A config without the values of keys that `is_secret` knows."""
    if isinstance(value, Mapping):
        return {name: redacted_tree(item, secret=secret or is_secret(str(name))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(item, secret=secret) for item in value]
    if secret and not NO_SECRETS.fullmatch(str(value)):
        return HIDDEN
    return redacted(value) if isinstance(value, str) else value


def secret_keys(tree: Any, key: str = "", *, secret: bool = False) -> Iterator[str]:
    """The full keys of a config whose values `redacted_tree` hides because of their names."""
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from secret_keys(item, f"{key}.{name}".lstrip("."), secret=secret or is_secret(str(name)))
    elif secret and not isinstance(tree, list | tuple) and not NO_SECRETS.fullmatch(str(tree)):
        yield key


def hidden_texts(tree: Any, shown: Any) -> set[str]:
    """The texts of a config that are not in it as it is shown."""
    if isinstance(tree, Mapping | list | tuple):
        same_kind = type(tree) is type(shown) and len(tree) == len(shown)
        keys = tree.keys() if isinstance(tree, Mapping) else range(len(tree))
        return {text for key in keys for text in hidden_texts(tree[key], shown[key] if same_kind else None)}
    return {tree} if isinstance(tree, str) and tree != shown else set()


def filled(saved: Any, shown: Any, tree: Any) -> Any:
    """Put back what was left out of a config when it was saved, as far as it is the same in the present one.

    Args:
        saved: a config as it was shown then.
        shown: the present one as it is shown.
        tree: the present one.
    """
    if saved == shown:
        return tree
    if not (isinstance(saved, Mapping) and isinstance(shown, Mapping) and isinstance(tree, Mapping)):
        return saved
    both = shown.keys() & tree.keys()
    return {name: filled(item, shown[name], tree[name]) if name in both else item for name, item in saved.items()}
