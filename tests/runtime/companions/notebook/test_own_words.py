"""Errors of `Trainer` name its arguments: those of all settings, and the texts of all errors in the package."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlx_runtime
from mlx_runtime import Trainer
from mlx_runtime.companions.notebook.calls import in_own_words
from mlx_runtime.companions.notebook.function_runs import OWN
from mlx_runtime.config.constructors.signatures import parameters
from mlx_runtime.errors import ConfigError, MlxError
from mlx_runtime.loop.options import TrainConfig

pytestmark = pytest.mark.pure

VALUES = (-1, 0, 3, 2**70, 0.5, float("nan"), "nonsense", "a.b", "", True, None, [1], {"a": 1}, {"a": "b"}, object())


def wrong_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield settings and fields of sections, each with values of which most are wrong."""
    for item in parameters(TrainConfig) or []:
        if item.name in OWN:
            continue
        yield from ((item.name, {item.name: value}) for value in VALUES)
        if dataclasses.is_dataclass(item.annotation) and isinstance(item.annotation, type):
            for field in dataclasses.fields(item.annotation):
                for value in VALUES:
                    yield f"{item.name}.{field.name}", {item.name: item.annotation(**{field.name: value})}


def test_errors_of_all_settings_name_the_arguments_of_a_trainer() -> None:
    errors = []
    for name, settings in wrong_settings():
        try:
            Trainer(num_workers=2, **settings)
        except MlxError as error:
            errors.append((name, str(error)))
    for name, text in errors:
        assert name in text
        assert "cfg" not in text
        assert "--" not in text
    assert {name for name, _ in errors} == {name for name, _ in wrong_settings()}


def texts() -> Iterator[tuple[str, str]]:
    """Yield the strings of the package that name settings, with `x` in place of what is inserted, and their places."""
    package = Path(mlx_runtime.__file__).parent
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text())
        skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            values = [part.value if isinstance(part, ast.Constant) else "x" for part in parts]
            if id(node) not in skipped and isinstance(node, ast.JoinedStr | ast.Constant):
                text = "".join(map(str, values))
                if "cfg." in text and text != "cfg." and "\\" not in text:  # prefixes and patterns
                    yield f"{file.relative_to(package)}:{node.lineno}", text


def test_no_text_of_the_package_keeps_the_words_of_a_config() -> None:
    found = dict(texts())
    assert len(found) > 150
    for place, text in found.items():
        own = str(in_own_words(MlxError(text)))
        for word in ("cfg.", "=null", "=true", "=false", " null"):
            assert word not in own, (place, own)


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("cfg.start_workers=3 is too many", "num_workers=3 is too many"),
        ("set cfg.use_gpu=null, or cfg.compile=true.", "set use_gpu=None, or compile=True."),
        ("use cfg.strategy=fsdp or ddp", "use strategy='fsdp' or ddp"),
        ("try cfg.loader=workers=4", "try loader='workers=4'"),
        ("cfg.engine=a.b cannot be imported", "engine='a.b' cannot be imported"),
        ("cfg.monitor=None, cfg.lr=0.1", "monitor=None, lr=0.1"),
        ("write a norm, or null for none", "write a norm, or None for none"),
        ("runs/my.cfg.yaml and src.cfg.name", "runs/my.cfg.yaml and src.cfg.name"),
        ("cfg.restore_checkpoint_path is 'x'", "checkpoint is 'x'"),
        ("--resume names a run", "resume names a run"),
        ("datasets.val.batch_size is 0", "batch_size is 0"),
    ],
)
def test_settings_become_arguments(text: str, own: str) -> None:
    assert str(in_own_words(ConfigError(text))) == own
