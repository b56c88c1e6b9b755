"""Checks before a launch, printed one per line, on every kind of cluster."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_runtime.config.projects import CONF, commands
from mlx_runtime.errors import ClusterError, ConfigError, MlxError, UsageError
from mlx_runtime.loop.options import ENGINES
from mlx_runtime.storage.redaction import redact_override, secret_keys
from mlx_runtime.workers.placement import engine_class

if TYPE_CHECKING:
    from mlx_runtime.config.composition import Config
    from mlx_runtime.driver.request import RunConfig
    from mlx_runtime.loop.options import TrainConfig


@dataclass(frozen=True)
class Check:
    """The subject of a check, its finding, and a hint to fix it, or None if the check passed."""

    name: str
    text: str
    hint: str | None = None

    @property
    def ok(self) -> bool:
        return self.hint is None

    def line(self) -> str:
        """One line for the terminal."""
        text = self.text if self.ok or self.text.endswith((".", "?")) else f"{self.text}."
        return " ".join(filter(None, [f"{'ok' if self.ok else 'FAIL':<6}{self.name:<10} {text}", self.hint]))


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


class Checks:
    """The checks of a launch, each printed as soon as its result is known.

    Args:
        show_all: print those that have passed, too.
        write: prints a line; by default to stderr.
    """

    def __init__(self, *, show_all: bool = False, write: Callable[[str], object] = print_to_stderr) -> None:
        self._show_all, self._write, self.failed = show_all, write, 0

    def add(self, *checks: Check) -> bool:
        """Return True if these have passed."""
        for check in checks:
            self.failed += not check.ok
            if self._show_all or not check.ok:
                self._write(check.line())
        return all(check.ok for check in checks)

    def require(self, *checks: Check) -> None:
        """Raise ClusterError if one of these has failed, after all of them."""
        if not self.add(*checks):
            raise self.failure()

    def failure(self) -> ClusterError:
        """Return the error that ends the launch."""
        return ClusterError(f"preflight failed: {self.failed} check{'s' * (self.failed != 1)}, see above")

    def config(self, load: "Callable[[], RunConfig]") -> "RunConfig":
        """Load the config of a run, sweep or data job. Raises UsageError for a wrong name, as of a run to resume."""
        try:
            config = load()
        except UsageError:
            raise
        except MlxError as error:
            cure = f"Edit {CONF}, or pass overrides" if isinstance(error, ConfigError) else f"See: {commands()} show"
            self.add(Check("config", str(error), cure))
            raise self.failure() from error
        self.add(Check("config", f"{CONF} fits the code"))
        return config


def require(check: Check) -> None:
    """Raise ClusterError if a check has failed."""
    if not check.ok:
        raise ClusterError(check.text, check.hint or "")


def refuse_engine(cfg: "TrainConfig") -> None:
    """Raise ConfigError if the engine of a run cannot train in a job; no other check matters then."""
    engine = "ray" if cfg.engine == "auto" and cfg.start_workers else cfg.engine
    if engine in ENGINES and (reason := engine_class(engine).refusal(cfg, in_job=True)):
        cure = "" if cfg.engine == "auto" else "use cfg.engine=auto, or "
        raise ConfigError(f"cfg.engine={cfg.engine} cannot train this: {reason}; {cure}train here: {commands()} run")


def check_secrets(config: "Config") -> Check:
    """Reject secrets in conf.yaml or overrides, where everyone can read them."""
    sent = {"cfg": {"runtime_env": config.cfg.runtime_env or {}}}  # with values from the environment here
    written = list(dict.fromkeys([*secret_keys(sent), *secret_keys(config.unresolved)]))
    for item in config.overrides:
        name = item.partition("=")[0].lstrip("+")
        if redact_override(item) != item and not any(f"{key}.".startswith(f"{name}.") for key in written):
            written.append(name)
    if written:
        hint = "Set it in the environment of the nodes, list its name in cfg.secrets=[NAME], and write ${oc.env:NAME}"
        return Check("secrets", f"{', '.join(written)} would show in the dashboard and in run.json", hint)
    names = config.cfg.secrets
    return Check("secrets", f"by name: {', '.join(names)}" if names else "none")
