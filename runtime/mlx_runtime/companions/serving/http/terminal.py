"""A server in a terminal, `mlx serve run`: it answers until a signal stops it."""

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_runtime.companions import is_remote
from mlx_runtime.companions.serving.exports.exported import EXPORT, load_export
from mlx_runtime.companions.serving.http.access import Access, curl, read_token
from mlx_runtime.companions.serving.http.application import Application
from mlx_runtime.companions.serving.http.limits import Limits
from mlx_runtime.companions.serving.http.server import Server
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.queries import lookup, reader
from mlx_runtime.workers.stop_requests import hangup_ignored

NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)", re.ASCII)

A_RUN = re.compile(r"run_\d+|\d+|latest")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Source:
    """A model on a command line: a run of an experiment, the folder or URI of a run, or the folder of an export."""

    text: str
    run: str | None = None

    @property
    def is_export(self) -> bool:
        return self.run is None and Path(self.text, EXPORT).is_file()

    @property
    def name(self) -> str:
        """Name of the model if none is given."""
        parts = self.text.rstrip("/").split("/")
        return parts[-1] if self.is_export or len(parts) != 2 else parts[0]

    def load(self, checkpoint: str | None = None, *, trust: bool = False) -> Predictor:
        """Return the predictor of the model."""
        if self.is_export:
            loaded: Predictor = load_export(Path(self.text))
            return loaded
        if is_remote(self.text):
            return reader.open_run(self.text).predictor(checkpoint, trust=trust)
        run = self.run or ("latest" if "/" not in self.text else None)
        return reader.open_run(lookup.resolve_run(self.text, run).location).predictor(checkpoint, trust=trust)


def parse(words: Sequence[str]) -> dict[str, Source]:
    """Return the models on a command line, `[NAME] [RUN]` or a folder, and `NAME=RUN`, by their names.

    Without a name, it is that of the experiment in the working directory.

    Raises:
        UsageError: there is none, or a name occurs twice.
    """
    plain = [word for word in words if NAMED.fullmatch(word) is None]
    if not words or (len(plain) == 1 and A_RUN.fullmatch(plain[0])):
        own = lookup.conf_value("cfg.name")
        plain = [own, *plain] if own else []
    if len(plain) > 2 or not (plain or words):
        raise UsageError("which model? mlx serve run NAME [RUN], or the folder of an export; add more as OTHER=RUN")
    sources = [(source.name, source) for source in ([Source(*plain)] if plain else [])]
    sources += [(match[1], Source(match[2])) for match in filter(None, map(NAMED.fullmatch, words))]
    names = [name for name, _ in sources]
    if len({*names}) < len(names):
        raise UsageError(f"two models have the same name: {', '.join(names)}; write one as OTHER=RUN")
    return dict(sources)


def run(
    sources: Mapping[str, Source],
    limits: Limits,
    host: str,
    port: int,
    *,
    checkpoint: str | None = None,
    trust: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Answer until a signal. Return the exit code.

    Raises:
        UsageError: a model or the port cannot be used, or a checkpoint is selected, but there are only exports.
    """
    if checkpoint is not None and all(source.is_export for source in sources.values()):
        raise UsageError("an export has only one checkpoint; leave out --checkpoint")
    token = read_token()
    access = Access.at(host, token)
    models = {name: source.load(checkpoint, trust=trust) for name, source in sources.items()}
    server = Server(Application(models, limits, access), host, port)
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        if received:  # a second Ctrl-C does not wait for answers
            os._exit(128 + number)
        received.append(number)
        server.request_stop()

    for number in SIGNALS:
        if number != signal.SIGHUP or not hangup_ignored():
            signal.signal(number, stop)
    server.start()
    for name, model in models.items():
        say(f"{name}  {model.title} on {model.device} reads {model.schema.text}")
    say(f"{server.url}  try it in a browser; stop it with Ctrl-C")
    say(curl(server.url, token=token is not None))
    sys.stdout.flush()
    server.wait()
    return 128 + received[0] if received else 1
