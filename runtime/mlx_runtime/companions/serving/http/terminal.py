"""A server in a terminal, `mlx serve run`: it answers until a signal or another command stops it."""

import asyncio
import contextlib
import logging
import logging.handlers
import os
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_runtime.companions import is_remote
from mlx_runtime.companions.serving.exports.exported import EXPORT, load_export
from mlx_runtime.companions.serving.http import registry
from mlx_runtime.companions.serving.http.access import read_token
from mlx_runtime.companions.serving.http.asgi import Application, Limits, application
from mlx_runtime.companions.serving.http.server import Server, access_for, is_loopback
from mlx_runtime.companions.serving.http.shadow import Shadow, refuse_other_columns
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.errors import UsageError
from mlx_runtime.runs.queries import lookup, reader
from mlx_runtime.storage.local import write_atomic

NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)", re.ASCII)

A_RUN = re.compile(r"run_\d+|\d+|latest")

LONGEST_EXAMPLE = 2_000
"""Length of an example row that is part of the printed command; longer ones are read from the server."""

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

    def other(self, word: str) -> "Source":
        """Return another model: a run of the same experiment, the folder of an export, or, with a `/`, any other."""
        if "/" in word or Source(word).is_export:
            return Source(word)
        experiment, _, run = self.text.partition("/")
        if self.is_export or not experiment or "/" in run:
            raise UsageError(f"{self.text} does not name an experiment; write NAME/{word} in place of {word}")
        return Source(experiment, word)

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
    sources: list[tuple[str, Source]] = []
    if plain:
        source = Source(*plain)
        sources.append((source.name, source))
    for match in filter(None, map(NAMED.fullmatch, words)):
        sources.append((match[1], Source(match[2])))
    names = [name for name, _ in sources]
    if len({*names}) < len(names):
        raise UsageError(f"two models have the same name: {', '.join(names)}; write one as OTHER=RUN")
    return dict(sources)


def refuse_checkpoint(checkpoint: str | None, sources: Iterable[Source]) -> None:
    """Raise UsageError if a checkpoint is selected, but there are only exports."""
    if checkpoint is not None and all(source.is_export for source in sources):
        raise UsageError("an export has only one checkpoint; leave out --checkpoint")


class ModelServer:
    """Models that answer at a port, and the commands of other processes to them."""

    def __init__(
        self,
        sources: Mapping[str, Source],
        limits: Limits,
        host: str,
        port: int,
        *,
        checkpoint: str | None = None,
        trust: bool = False,
        shadow: Source | None = None,
    ) -> None:
        refuse_checkpoint(checkpoint, sources.values())
        self._sources, self._trust = dict(sources), trust
        token = read_token()
        self._own_token = token is None and not is_loopback(host)
        if self._own_token:
            token = secrets.token_urlsafe(32)
        access = access_for(host, token)
        models = {name: source.load(checkpoint, trust=trust) for name, source in sources.items()}
        self.app: Application = application(models, limits, access)
        self.server = Server(self.app, host, port)
        self._token = token
        self._token_file = registry.servers_folder() / f"{self.server.port}.token"
        self.log = registry.servers_folder() / f"{self.server.port}.log"
        self._shadow: Shadow | None = None
        if shadow is not None:
            first = next(iter(models))
            other = shadow.load(checkpoint, trust=trust)
            refuse_other_columns(models[first], other)
            self._shadow = Shadow(first, other, self.app.counters)
            self.app.endpoints[first].watchers.append(self._shadow)

    def lines(self) -> Iterator[str]:
        """Yield the lines to print at the start: the models, the URL, and a command to type."""
        for name, title in self._titles().items():
            model = self.app.endpoints[name].predictor
            yield f"{name}  {title} on {model.device} reads {model.schema.text}"
        yield f"{self.server.url}  try it in a browser; stop it with Ctrl-C"
        if self._own_token:
            yield f"token  {self._token_file}"
        yield self.curl()

    def curl(self) -> str:
        """Return a command that asks the first model for an example row."""
        url = self.server.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        token = ""
        if self._token is not None:
            value = f"$(cat {shlex.quote(str(self._token_file))})" if self._own_token else "$MLX_SERVE_TOKEN"
            token = f' -H "Authorization: Bearer {value}"'
        row = next(iter(self.app.endpoints.values())).example.decode()
        post = f"curl -s {url}/predict{token} -H 'Content-Type: application/json'"
        if len(row) <= LONGEST_EXAMPLE:
            return f"{post} -d {shlex.quote(row)}"
        return f"curl -s {url}/example{token} | {post} -d @-"

    def run(self, say: Callable[[str], None]) -> int:
        """Answer until a signal or another command stops it. Return the exit code."""
        received: list[int] = []

        def stop(number: int, _: object) -> None:
            if received:  # a second Ctrl-C does not wait for answers
                os._exit(128 + number)
            received.append(number)
            self.server.request_stop()

        former = {number: signal.signal(number, stop) for number in SIGNALS}
        try:
            with self._logging(), self._tokens():
                self.server.start()
                with contextlib.closing(self._control()) as self._announced:
                    for line in self.lines():
                        say(line)
                    sys.stdout.flush()
                    self.server.wait()
            self.server.stop()
            if self._shadow is not None:
                self._shadow.close()
            say(self.summary())
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
        return 128 + received[0] if received else 0

    def summary(self) -> str:
        """Return the numbers of requests and rows so far, in one line."""
        count = self.app.counters.total
        rows, failed = count("mlx_rows_total", outcome="answered"), count("mlx_rows_total", outcome="failed")
        text = f"{count('mlx_requests_total'):,} requests, {rows:,} rows answered"
        parts = [text, *([f"{failed:,} failed"] if failed else []), *([self._shadow.line()] if self._shadow else [])]
        return ", ".join(parts)

    def update(self, name: str, source: Source, checkpoint: str | None = None, *, trust: bool = False) -> str:
        """Load another model beside the one of a name, and answer with it from then on."""
        refuse_checkpoint(checkpoint, [source])
        predictor = source.load(checkpoint, trust=trust)
        refuse_other_columns(self.app.endpoints[name].predictor, predictor)

        async def replace() -> None:
            former = self.app.replace(name, predictor)
            if former is not None:
                self._draining = asyncio.ensure_future(former.batcher.drain())  # may take as long as its model

        self.server.call(replace())
        self._sources[name] = source
        self._announced.write()
        logging.getLogger(__package__).warning("%s is now %s", name, predictor.title)
        return f"{name} is now {predictor.title}"

    def _titles(self) -> dict[str, str]:
        return {name: endpoint.predictor.title for name, endpoint in self.app.endpoints.items()}

    def _control(self) -> registry.Control:
        def stop(_: Mapping[str, Any]) -> str:
            self.server.request_stop()
            return "stopping"

        def update(message: Mapping[str, Any]) -> str:
            name, run = str(message["name"]), str(message["run"])
            if name not in self._sources:
                raise UsageError(f"there is no model {name!r}; there are {', '.join(self._sources)}")
            source, checkpoint = self._sources[name].other(run), message["checkpoint"]
            return self.update(name, source, checkpoint, trust=self._trust or message["code"] == "stored")

        actions = {"status": lambda _: self.summary(), "stop": stop, "update": update}
        record = {"port": self.server.port, "url": self.server.url, "log": str(self.log)}
        return registry.Control(record, self._titles, actions)

    @contextlib.contextmanager
    def _logging(self) -> Iterator[None]:
        handler = logging.handlers.RotatingFileHandler(self.log, maxBytes=1 << 20, backupCount=1)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger = logging.getLogger(__package__)
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            handler.close()

    @contextlib.contextmanager
    def _tokens(self) -> Iterator[None]:
        if not self._own_token or self._token is None:
            yield
            return
        write_atomic(self._token_file, "")
        self._token_file.chmod(0o600)
        self._token_file.write_text(self._token)
        try:
            yield
        finally:
            self._token_file.unlink(missing_ok=True)
