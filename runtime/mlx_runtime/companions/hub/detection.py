"""Find likely secrets in files before they leave the storage: values whose names mark them, and tokens of services.

The rules for names and URLs are those of `storage/redaction.py`, those for tokens come from detect-secrets.
"""

import functools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_runtime.config.interpolation import parse_config
from mlx_runtime.errors import StorageError, UsageError, short_message
from mlx_runtime.storage.redaction import HIDDEN, redact, secret_keys

ALLOWED = "pragma: allowlist secret"
"""Comment on a line that holds no secret, as for detect-secrets."""

NAMED = 10
"""Number of positions that an error lists before it counts the rest."""

PREFIXES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|sk-(?=[\w-]*\d)[\w-]{16,}|(?:npm_|github_pat_|AIza|ya29\.|dop_v1_|shpat_)[\w-]{16,})"
)
"""Tokens of services that detect-secrets lacks."""

LITERAL = re.compile(rf"[\"']{HIDDEN}\\?[\"']|{HIDDEN}@|[?&][\w.-]+={HIDDEN}")
"""Matches a redacted string or URL. In source code and prose, other values are names of variables, or words."""

QUOTED = (
    *(".py", ".pyi", ".pyx", ".ipynb", ".json", ".md", ".rst", ".html", ".js", ".ts"),
    *(".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".java"),
)
"""Endings of names of files in which only literals count. In all others, strings may have no quotes."""

UNUSED = {
    *("KeywordDetector", "BasicAuthDetector"),  # as in `redaction`
    *("Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector"),  # digests and addresses are no secrets
    *("CloudantDetector", "IbmCloudIamDetector", "IbmCosHmacDetector", "SoftlayerDetector", "NpmDetector"),  # slow
}
"""Detectors of detect-secrets that are not used."""


def find_secrets(text: str, name: str) -> list[str]:
    """Return the positions of likely secrets in the text of a file, like `src/tools.py:12`."""
    lines, any_value = text.splitlines(), not name.endswith(QUOTED)
    hidden = ((number, line, redact(line)) for number, line in enumerate(lines, 1))
    found = {number for number, line, shown in hidden if shown != line and (any_value or LITERAL.search(shown))}
    for token in _tokens(text):
        found |= {number for number, line in enumerate(lines, 1) if token in line}
    return [f"{name}:{number}" for number in sorted(found) if ALLOWED not in lines[number - 1]]


def _tokens(text: str) -> Iterator[str]:
    """Yield the tokens of services and the first lines of private keys in a text."""
    yield from PREFIXES.findall(text)
    for detector in _detectors():
        yield from filter(None, detector.analyze_string(text))


@functools.cache
def _detectors() -> tuple[Any, ...]:
    from detect_secrets.settings import default_settings, get_plugins  # here, because few runs need it

    with default_settings():
        return tuple(item for item in get_plugins() if type(item).__name__ not in UNUSED)


def refuse_secrets(file: Path, target: str) -> None:
    """Raise a UsageError if a conf.yaml, or an archive with the code of a run, holds likely secrets.

    `target` is where the file would go, for the message.
    """
    if file.suffix == ".zip":
        try:
            with zipfile.ZipFile(file) as archive:
                contents = [(name, archive.read(name).decode(errors="replace")) for name in archive.namelist()]
        except Exception as error:  # zipfile raises many types of exceptions
            raise StorageError(f"{file.name} is damaged: {short_message(error)}") from error
        found = [position for name, text in contents for position in find_secrets(text, name)]
        replaced = found[0].rpartition(":")[0] if found else ""
        cure = (
            f", or end a line that holds none with the comment `{ALLOWED}`; in a stored run, replace the file: "
            f"zip -u {file.name} {replaced}"
        )
    else:
        text = file.read_text(encoding="utf-8")
        found = [f"{file.name}: {key}" for key in secret_keys(parse_config(text, environment=False))]
        found += find_secrets(text, file.name) if not found else []
        cure = f"; in a stored run, edit its {file.name}"  # it has no comments
    if found:
        more = f" and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
        raise UsageError(
            f"{', '.join(found[:NAMED])}{more} would take a likely secret to {target}. Read it from the environment, "
            f"like ${{oc.env:NAME}}{cure}"
        )
