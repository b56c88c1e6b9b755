"""Jobs on a Ray cluster: where it is, what it says of itself, submitting, following, stopping."""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mlx_runtime.errors import ClusterError, UsageError, first_line, plain
from mlx_runtime.logs import last_lines
from mlx_runtime.storage import write_atomic

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

DASHBOARD_PORT = 8265

OTHER_PORTS = {6379: "Ray's own port", 10001: "the port of Ray Client"}
"""Of a head node by default; jobs are submitted to its dashboard."""

REACH_S = 5.0
"""How long a cluster has to answer."""

LOOK_S = 2.0
"""How long each of several clusters has, when runs are listed."""

GONE_S = 60.0
"""How long a cluster that stopped answering is waited for while its log is followed."""

AGENT_S = 60.0
"""How long a cluster that has just started has to become ready for jobs."""

SILENT_S = 30.0
"""A connection that has brought nothing for so long may be dead; another one is made."""

REFUSED = (401, 403)
"""What a cluster answers that wants a token, or another one."""

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Address:
    """Where a cluster's dashboard is.

    Attributes:
        url: like `http://head:8265`.
        source: what said so: `--ray-address` or `RAY_ADDRESS`.
        notice: how it was understood, when not as it was typed.
    """

    url: str
    source: str
    notice: str = ""

    @classmethod
    def of(cls, given: str | None) -> "Address":
        """The address that was given, else that of `RAY_ADDRESS`.

        Args:
            given: `http(s)://host:8265`, `host`, `host:port`, or an address for other purposes of the same head node:
                `ray://host:10001`, `host:6379`.

        Raises:
            UsageError: there is none, or it is none.
        """
        source = "--ray-address" if given else "RAY_ADDRESS"
        text = (given or os.environ.get("RAY_ADDRESS") or "").strip()
        if not text:
            raise UsageError("which cluster? Give --ray-address http://HEAD:8265, or set RAY_ADDRESS")
        scheme, mark, rest = text.partition("://")
        if not mark:
            scheme, rest = "", text
        parts = urlsplit(f"//{rest}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or host.startswith("-") or scheme not in ("", "http", "https", "ray") or text in ("auto", "local"):
            raise UsageError(f"{source} is {text!r}, which is no address of a cluster; write http://HEAD:8265")
        if parts.username or parts.password:
            raise UsageError(f"{source} holds a name or password; a cluster's token belongs in RAY_AUTH_TOKEN")
        host = f"[{host}]" if ":" in host else host
        if scheme in ("http", "https"):
            path = parts.path.rstrip("/")
            return cls(f"{scheme}://{host}{f':{port}' if port else ''}{path}", source)
        if scheme == "ray" or port in OTHER_PORTS:
            what = OTHER_PORTS.get(port or 10001, "an address for Ray Client")
            url = f"http://{host}:{DASHBOARD_PORT}"
            return cls(url, source, f"{text} names {what}; jobs go to the dashboard, {url}")
        url = f"http://{host}:{port or DASHBOARD_PORT}"
        return cls(url, source, "" if port else f"{text} names no port; this is the dashboard's, {url}")


@dataclass(frozen=True)
class Reached:
    """A cluster that answers.

    Attributes:
        address: of its dashboard.
        ray: its version of Ray.
        headers: what each request must carry.
        token_from: where the token came from, or None when it wants none.
        seconds: that the answer took.
    """

    address: Address
    ray: str
    headers: dict[str, str]
    token_from: str | None
    seconds: float


def reached(address: Address, timeout_s: float = REACH_S) -> Reached:
    """Ask a cluster who it is.

    Raises:
        ClusterError: it does not answer in time, wants another token, or is no Ray cluster.
    """
    import requests

    started = time.monotonic()
    where = f"{address.url} (from {address.source})"
    try:
        found, headers, source = _let_in(f"{address.url}/api/version", timeout_s, {})
        if found.status_code in REFUSED:
            if source is None:
                raise ClusterError(
                    f"the cluster at {where} wants a token; set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file"
                )
            if source == str(_ray_token_file()):
                source += ", which Ray writes for its clusters on this machine"
            raise ClusterError(f"the cluster at {where} refuses the token from {source}; set RAY_AUTH_TOKEN to its own")
        version = found.json()["ray_version"]
    except (requests.Timeout, requests.ConnectionError) as error:
        unknown = "resolve" in str(error)
        why = "does not answer (there is no such host)" if unknown else "does not answer (nothing listens there)"
        if isinstance(error, requests.Timeout):
            why = f"did not answer within {timeout_s:g} s"
        raise ClusterError(
            f"{where} {why}; is the cluster up, and is this the host and port of its dashboard ({DASHBOARD_PORT})?"
        ) from error
    except requests.RequestException as error:
        raise ClusterError(f"{where} cannot be asked: {first_line(error)}") from error
    except (KeyError, TypeError) as error:
        raise ClusterError(
            f"{where} answers, but is no Ray dashboard; its port is {DASHBOARD_PORT} by default"
        ) from error
    return Reached(address, str(version), headers, source, time.monotonic() - started)


def remember(address: Address) -> None:
    """Note that the user has launched a job on a cluster, so that later commands may send it the token."""
    file = _clusters_file()
    with contextlib.suppress(OSError):  # without it, commands ask for RAY_ADDRESS
        known = file.read_text().splitlines() if file.is_file() else []
        if address.url not in known:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, "".join(f"{url}\n" for url in [*known, address.url]))


def trusted(url: str) -> bool:
    """True if a cluster may get the token: `RAY_ADDRESS` names it, or this user has launched a job on it from here.

    An address in the record of a run is not enough, because everybody who can write to the storage can change it.
    """
    with contextlib.suppress(UsageError):
        if Address.of(None).url == url:
            return True
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return url in _clusters_file().read_text().splitlines()
    return False


def untrusted_notice(url: str) -> str:
    """One line about a cluster that only the record of a run names."""
    return f"{url} was not asked with your token, because only run.json names it; if it is yours: RAY_ADDRESS={url}"


def statuses(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What clusters say of jobs: PENDING RUNNING STOPPED SUCCEEDED FAILED.

    Args:
        pairs: address and id of each job, from the records of runs. Clusters that are not `trusted` are asked without a
            token; a line on stderr names those that want one.

    Returns:
        Status by address and id; jobs of clusters that cannot be reached, or do not know them, are left out.
    """
    from concurrent.futures import ThreadPoolExecutor

    wanted = set(pairs)
    addresses = sorted({address for address, _ in wanted})
    if not addresses:
        return {}
    with ThreadPoolExecutor(len(addresses)) as pool:
        lists = dict(zip(addresses, pool.map(_statuses, addresses), strict=True))
    return {(address, job): lists[address][job] for address, job in wanted if job in lists[address]}


class Jobs:
    """The jobs of a cluster.

    Args:
        cluster: that answers.
    """

    def __init__(self, cluster: Reached) -> None:
        self.cluster = cluster
        self._made: JobSubmissionClient | None = None

    @property
    def _client(self) -> "JobSubmissionClient":
        if self._made is None:
            from ray.job_submission import JobSubmissionClient

            with _without("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # they would win over the argument
                self._made = JobSubmissionClient(self.cluster.address.url, headers=self.cluster.headers)
        return self._made

    def named(self, wanted: str) -> str:
        """An id that no job of the cluster has: the wanted one, or that with a number behind it."""
        wanted, taken = re.sub(r"[^A-Za-z0-9_.-]", "-", wanted), self.known()
        names = itertools.chain([wanted], (f"{wanted}.{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def submit(
        self,
        command: Sequence[str],
        *,
        job: str,
        folder: Path,
        environment: Mapping[str, str],
        metadata: Mapping[str, str],
        runtime_env: Mapping[str, Any],
    ) -> None:
        """Upload a folder and run a command in it, on the head node.

        Args:
            command: and its arguments.
            job: its id, from `named`.
            folder: to upload; becomes the working directory.
            environment: of the command and all that it starts.
            metadata: for the dashboard.
            runtime_env: of Ray, what else it shall contain.

        Raises:
            ClusterError: the cluster does not take it.
        """
        ours = {"MLX_JOB": job, "MLX_JOB_ADDRESS": self.cluster.address.url}
        variables = {**runtime_env.get("env_vars", {}), **environment, **ours}
        until = time.monotonic() + AGENT_S
        while True:
            try:
                with _quiet():
                    self._client.submit_job(
                        entrypoint=shlex.join(command),
                        submission_id=job,
                        runtime_env={**runtime_env, "working_dir": str(folder), "env_vars": variables},
                        metadata=dict(metadata),
                    )
                remember(self.cluster.address)
                return
            except Exception as error:  # the library raises RuntimeError, ValueError, and what requests does
                if "No available agent" in str(error) and time.monotonic() < until:
                    time.sleep(1)
                    continue
                raise ClusterError(f"{self.cluster.address.url} does not take the job: {_reason(error)}") from error

    def known(self) -> dict[str, str]:
        """Status of every job, by id."""
        return _statuses(self.cluster.address.url, self.cluster.headers, REACH_S)

    def details(self, job: str) -> "Details":
        """How a job is doing.

        Raises:
            ClusterError: the cluster does not answer, or does not know it.
        """
        try:
            answer = _asked(f"{self.cluster.address.url}/api/jobs/{job}", REACH_S, self.cluster.headers)
            found = answer.json() if answer.status_code == 200 else {}
        except Exception as error:
            raise ClusterError(f"{self.cluster.address.url} does not answer: {first_line(error)}") from error
        if not found:
            raise ClusterError(f"{self.cluster.address.url} knows no job {job}")
        return Details(found["status"], found.get("message") or "", found.get("driver_exit_code"))

    def log(self, job: str) -> str:
        """All that a job has printed so far.

        Raises:
            ClusterError: the cluster does not answer, or does not know it.
        """
        try:
            answer = _asked(f"{self.cluster.address.url}/api/jobs/{job}/logs", 6 * REACH_S, self.cluster.headers)
            answer.raise_for_status()
            return str(answer.json()["logs"])
        except Exception as error:
            raise ClusterError(f"{self.cluster.address.url} gives no log of {job}: {first_line(error)}") from error

    def follow(self, job: str, write: Callable[[str], None], tail: int | None = None) -> "Details":
        """Pass on what a job prints until it has ended, over lost connections too.

        Args:
            job: its id.
            write: takes pieces of text.
            tail: lines of what it has printed before to begin with; all when None.

        Returns:
            How it ended.

        Raises:
            ClusterError: the cluster has not answered for `GONE_S`.
        """
        seen = 0
        if tail is not None:
            before = self.log(job)
            write(last_lines(before, tail))
            seen = len(before)
        until = time.monotonic() + GONE_S
        while True:
            whole, seen = asyncio.run(self._read(job, seen, write))
            try:
                details = self.details(job)
                until = time.monotonic() + GONE_S
                if details.ended and whole:
                    return details
            except ClusterError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.5)

    async def _read(self, job: str, skip: int, write: Callable[[str], None]) -> tuple[bool, int]:
        """Pass on what comes after the first `skip` characters. Whether it came to its end, and how much there was."""
        seen = 0  # each connection begins with the first character
        with contextlib.suppress(Exception), _quiet():  # a connection that was dropped, in any of the library's ways
            stream = self._client.tail_job_logs(job)
            while True:
                try:
                    text = await asyncio.wait_for(anext(stream), SILENT_S)
                except StopAsyncIteration:
                    return True, max(seen, skip)
                fresh = text[max(0, skip - seen) :]
                seen += len(text)
                if fresh:
                    write(fresh)
        return False, max(seen, skip)

    def forget(self, job: str) -> None:
        """Take a job that has ended off the cluster's list."""
        with contextlib.suppress(Exception):
            self._client.delete_job(job)

    def stop(self, job: str) -> None:
        """Send SIGTERM to a job, and SIGKILL half a minute later.

        Raises:
            ClusterError: the cluster does not take it.
        """
        try:
            self._client.stop_job(job)
        except Exception as error:
            raise ClusterError(f"{job} cannot be stopped: {_reason(error)}") from error


@dataclass(frozen=True)
class Details:
    """How a job is doing.

    Attributes:
        status: PENDING RUNNING STOPPED SUCCEEDED FAILED.
        message: what Ray says of it.
        exit_code: of its command, once that has ended.
    """

    status: str
    message: str
    exit_code: int | None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def reason(self) -> str:
        """The first line of the message, without the log that may follow it."""
        return self.message.strip().partition("\n")[0].partition(", last available logs")[0]

    @property
    def code(self) -> int:
        """To end with oneself: the command's, else 0 for success."""
        if self.exit_code is not None:
            return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
        return 0 if self.status == "SUCCEEDED" else 1


def _asked(url: str, timeout_s: float, headers: dict[str, str]) -> Any:
    import requests

    # With an `auth` of its own, requests does not look for a password in ~/.netrc.
    return requests.get(url, timeout=timeout_s, headers=headers, auth=lambda request: request)


def _let_in(url: str, timeout_s: float, headers: dict[str, str]) -> tuple[Any, dict[str, str], str | None]:
    """The answer to a request, the headers that it took, and where the token in them is from if it took ours."""
    answer, source = _asked(url, timeout_s, headers), None
    if answer.status_code in REFUSED and not headers:
        token, source = _token()
        if token is not None:
            headers = {"Authorization": f"Bearer {token}"}
            answer = _asked(url, timeout_s, headers)
    return answer, headers, source


def _statuses(address: str, headers: dict[str, str] | None = None, timeout_s: float = LOOK_S) -> dict[str, str]:
    with contextlib.suppress(Exception):
        if headers is None and not trusted(address):
            answer = _asked(f"{address}/api/jobs/", timeout_s, {})
            if answer.status_code in REFUSED:
                print(f"note: {untrusted_notice(plain(address))}", file=sys.stderr)
        else:
            answer, _, _ = _let_in(f"{address}/api/jobs/", timeout_s, headers or {})
        return {item["submission_id"]: item["status"] for item in answer.json() if item.get("submission_id")}
    return {}


def _token() -> tuple[str | None, str | None]:
    """The token for a cluster that wants one, and where it came from; as Ray itself looks for it."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path) if path else _ray_token_file()
    with contextlib.suppress(OSError):
        if token := file.read_text().strip():
            return token, "RAY_AUTH_TOKEN_PATH" if path else str(file)
    return None, None


def _ray_token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _clusters_file() -> Path:
    """Addresses of the clusters on which this user has launched jobs; never in a storage, which others may write to."""
    return Path.home() / ".config" / "mlx" / "clusters"


def _reason(error: Exception) -> str:
    """What a person can use of the library's message, which may hold a traceback of the server."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's lines about each file; its loggers have levels of their own."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
