"""Sweeps of training functions: the experiment that calls one, and its config as overrides."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlx_runtime.companions.notebook.calls import changed_definitions, override, run_settings
from mlx_runtime.companions.notebook.function_runs import Trainer
from mlx_runtime.config.composition import parse_overrides
from mlx_runtime.errors import UsageError

VARIES = re.compile(r"(choice|range|interval|tag|int)\(.*\)", re.DOTALL)
"""Texts in a config that stand for several values, in Hydra's sweep grammar."""


def function_overrides(function: Callable[..., Any], config: Any, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides of a sweep that calls a function.

    Args:
        function: training function.
        config: its config, with texts like `choice(0.1, 0.01)` in place of the values that vary.
        settings: arguments of `Trainer`, and `dataset`.

    Raises:
        UsageError, ConfigError: there is no such setting, the function cannot be called with the config, or nothing in
            it varies.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"a function is tuned over a config, like {{'lr': 'choice(0.1, 0.01)'}}, not {config!r:.60}")
    varying = dict(_varying("cfg.config", config))
    if not varying:
        raise UsageError(
            f"no value in the config of {function.__name__} varies; write some as text, like 'choice(0.1, 0.01)' or "
            "'interval(0.01, 0.1)'. A list is one value"
        )
    trainer = Trainer(**{name: value for name, value in settings.items() if name != "dataset"})
    _, values = run_settings(trainer.settings, function, dict(config), dataset=settings.get("dataset"))
    fixed = [override(f"cfg.{name}", value) for name, value in values.items()]
    return (*fixed, *(f"{key}={text}" for key, text in varying.items()))


def keep_function(words: Sequence[str], stored: Sequence[str], title: str) -> tuple[str, ...]:
    """Return the overrides of a sweep to resume, with its stored function: the same pickled again has other bytes.

    Raises:
        UsageError: a definition that the function uses was edited.
    """
    before, now = ({item.partition("=")[0]: item for item in found} for found in (stored, words))
    lists: list[Any] = [parse_overrides([found["++cfg.definitions"]])[0].value() for found in (before, now)]
    if changed := changed_definitions(*lists):
        names = ", ".join(changed)
        raise UsageError(f"{title} was started with another definition of {names}; undo the edits, or start a new one")
    return tuple((now | {key: before[key] for key in now if key == "++cfg.function_file"}).values())


def _varying(key: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys and texts of the values that vary."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _varying(f"{key}.{name}", value)
        elif isinstance(value, str) and VARIES.fullmatch(value) is not None:
            if not re.fullmatch(r"\w+", str(name)):
                raise UsageError(f"{name!r} varies, so its name must be one of letters, digits and underscores")
            if parse_overrides([f"++{key}.{name}={value}"])[0].is_sweep_override():
                yield f"++{key}.{name}", value
