"""The source from which a generated Makefile installs the runtime, as recorded by pip (PEP 610)."""

import json
from pathlib import Path

import pytest

from mlx_runtime import __version__
from mlx_runtime.cli.verbs.projects import requirement

pytestmark = pytest.mark.pure

GIT = {"vcs": "git", "commit_id": "c0ffee", "requested_revision": "main"}

INDEX = f"mlx-runtime=={__version__}"


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, INDEX),
        ({"url": Path(__file__).as_uri(), "archive_info": {}}, f"mlx-runtime @ {Path(__file__).as_uri()}"),
        (
            {"url": "https://host/mlx.git", "vcs_info": GIT, "subdirectory": "runtime"},
            "mlx-runtime @ git+https://host/mlx.git@c0ffee\\#subdirectory=runtime",
        ),
    ],
    ids=["index", "wheel", "git"],
)
def test_a_makefile_installs_what_pip_has_recorded(
    origin: object, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With only a version, which an index may not have, a note names the cure."""
    info = tmp_path / f"mlx_runtime-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mlx-runtime\nVersion: {__version__}\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert requirement() == expected
    note = capsys.readouterr().err
    assert note.startswith(f"note      make setup installs {INDEX}; ") if expected == INDEX else note == ""
