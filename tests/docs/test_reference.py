"""The API reference matches the docstrings."""

import importlib.util
from pathlib import Path

import pytest

import mlx_runtime

pytestmark = pytest.mark.pure

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_up_to_date_and_has_all_public_names() -> None:
    spec = importlib.util.spec_from_file_location("api", DOCS / "api.py")
    assert spec is not None
    assert spec.loader is not None
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    text = (DOCS / "api.md").read_text()
    assert text == api.page(), "run: make docs, or python docs/api.py"
    assert [name for name in mlx_runtime.__all__ if f"\n### {name}\n" not in text] == []
