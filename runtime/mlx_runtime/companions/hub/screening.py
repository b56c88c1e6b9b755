"""Removal of likely secrets from files before their upload, and announcements of uploads."""

import functools
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlx_runtime.companions.hub.detection import find
from mlx_runtime.companions.hub.downloads import CARD, CHECKPOINTS, WEIGHTS
from mlx_runtime.config.interpolation import escape, parse_config
from mlx_runtime.runs.folder import EVALUATIONS
from mlx_runtime.runs.snapshots import CODE
from mlx_runtime.runs.tables import plural
from mlx_runtime.storage.files import size_text
from mlx_runtime.storage.redaction import HIDDEN, hidden_texts, redact_tree

NAMED = 10
"""Number of positions that a line lists before it counts the rest."""

UNIQUE = 6
"""Minimum length of values to search for in the text of conf.yaml; shorter ones are found only by their keys."""


def screen(file: Path) -> tuple[str, ...]:
    """Remove secrets from a copy of conf.yaml or code.zip. Return their positions: `src/tools.py:12 (password)`."""
    content = file.read_bytes()
    screened, positions = _screen_archive(content) if file.name == CODE else _screen_config(content, file.name)
    if positions:
        file.write_bytes(screened)
    return positions


@functools.lru_cache(maxsize=2)  # the code of a run stays the same
def _screen_archive(content: bytes) -> tuple[bytes, tuple[str, ...]]:
    positions: list[str] = []
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as copy:
        for member in archive.infolist():
            text = archive.read(member).decode(errors="surrogateescape")
            is_code = member.filename.endswith(".py")
            screened, found = _screen_text(text, member.filename, code=is_code)
            if found and is_code and not _compiles(screened):
                positions += [f"{position}, so the file is left out" for position in found]
                continue
            positions += found
            copy.writestr(member, screened.encode(errors="surrogateescape"))
    return written.getvalue(), tuple(positions)


def _screen_config(content: bytes, name: str) -> tuple[bytes, tuple[str, ...]]:
    text = content.decode()
    tree = parse_config(text, environment=False)
    hidden = hidden_texts(tree, redact_tree(tree))
    known = sorted((escape(item) for item in hidden if len(item) >= UNIQUE), key=len, reverse=True)
    screened, positions = _screen_text(text, name, known=known)
    return screened.encode(), tuple(positions)


def _screen_text(text: str, name: str, *, code: bool = False, known: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return a text without its secrets, and their positions. `known` are texts that are secrets as a whole."""
    positions = []
    for secret in reversed(find(text, code=code)):
        positions.append((text.count("\n", 0, secret.start) + 1, secret.kind))
        text = text[: secret.start] + HIDDEN + "\n" * text.count("\n", secret.start, secret.end) + text[secret.end :]
    for whole in known:
        while (at := text.find(whole)) >= 0:
            positions.append((text.count("\n", 0, at) + 1, "secret"))
            text = text[:at] + HIDDEN + text[at + len(whole) :]
    return text, [f"{name}:{line} ({kind})" for line, kind in sorted(positions)]


def _compiles(code: str) -> bool:
    try:
        compile(code, "", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def announcement(files: Mapping[str, Path], hidden: Sequence[str], title: str, settings: str) -> str:
    """Return lines that list the files of a first upload by kind, and the settings that change them."""
    sizes: dict[str, list[int]] = {}
    for path, file in files.items():
        sizes.setdefault(_kind(path), []).append(file.stat().st_size)
    width = max(map(len, sizes))
    lines = [f"mirror    first upload to {title}:"]
    for kind, found in sorted(sizes.items()):
        lines.append(f"          {kind:<{width}}  {plural(len(found), 'file')}, {size_text(sum(found))}")
    if WEIGHTS not in files:
        lines.append("          later: newer checkpoints and metrics, and the weights of the best at the end")
    if hidden:
        lines.append(redactions(hidden))
    lines.append("          to change this: cfg.hub.mirror, cfg.keep_checkpoints, .gitignore;")
    lines.append(f"          to change the visibility: {settings}")
    return "\n".join(lines)


def redactions(hidden: Sequence[str]) -> str:
    """Return lines that list the secrets removed from an upload, and the cure."""
    more = f" and {len(hidden) - NAMED:,} more" if len(hidden) > NAMED else ""
    return (
        f"          uploaded without likely secrets: {', '.join(hidden[:NAMED])}{more}\n"
        "          read secrets from the environment: ${oc.env:NAME}"
    )


def _kind(path: str) -> str:
    if path.startswith(f"{CHECKPOINTS}/"):
        return "checkpoints"
    if path.startswith(f"{EVALUATIONS}/"):
        return "evaluations"
    if path in (CARD, WEIGHTS, CODE):
        return {CARD: "model card", WEIGHTS: "weights", CODE: "code"}[path]
    return "config, metrics, events"
