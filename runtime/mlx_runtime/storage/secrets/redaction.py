"""Keep secrets out of records, reports, logs and uploads."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_runtime.storage.secrets.detection import HIDDEN, find, is_random, is_secret, may_be_text, reveals

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


def redact(text: str) -> str:
    """Return a text without the secrets that can be recognized in it."""
    for secret in reversed(find(text)):
        text = text[: secret.start] + HIDDEN + text[secret.end :]
    return text


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
    return _redact_value(str(value)) if isinstance(value, str) else value  # a plain one, of any subclass


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


def _redact_value(value: str) -> str:
    """Return a value without secrets. Random text counts as a secret even without quotes."""
    return HIDDEN if is_random(value) else redact(value)


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
