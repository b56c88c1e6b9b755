"""Definitions of sweeps: additions of a command to a stored definition, and changes that need `--force`."""

from dataclasses import replace

import pytest

from mlx_runtime.companions.sweeps.definition import Definition, differences, merge
from mlx_runtime.storage.redaction import HIDDEN

pytestmark = pytest.mark.pure

STORED = Definition(("lr=1,2",), "grid", "none", "val/loss", "min", 2, parallel=2)


def test_repeated_overrides_with_a_secret_are_no_other_space() -> None:
    typed = ("lr=1,2,3", "cfg.api_key=abcdef")
    stored = Definition.from_json(replace(STORED, overrides=typed).as_json())
    assert merge(stored, Definition(typed)) == replace(STORED, overrides=typed)


def test_a_record_holds_no_secrets() -> None:
    definition = Definition(("lr=1,2", "cfg.api_key=abcdef"))
    assert definition.as_json()["overrides"] == ["lr=1,2", f"cfg.api_key={HIDDEN}"]
    assert Definition.from_json(STORED.as_json()) == STORED
    assert differences(definition, Definition.from_json(definition.as_json())) == {}
