"""Client of the REST API of a cluster's dashboard: submit, follow and stop jobs.

Ray's own `JobSubmissionClient` needs seconds to import Ray, has no timeouts, and prefers `RAY_ADDRESS` to its argument.
API: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html (Ray 2.60).
"""

import asyncio
import contextlib
import itertools
import json
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.cluster import packages
from mlx_runtime.cluster.addresses import (
    DASHBOARD_PORT,
    Address,
    find_token,
    is_trusted,
    ray_token_file,
    remember,
    untrusted_notice,
)
from mlx_runtime.errors import ClusterError, printable, short_message
from mlx_runtime.runs.logs import last_lines

if TYPE_CHECKING:
    import requests

ANSWER_S = 5.0
"""Timeout of a request."""

TRANSFER_S = 120.0
"""Timeout of a request that transfers a package or a log."""

LIST_S = 2.0
"""Timeout of each cluster when runs are listed."""

RECONNECT_S = 60.0
"""How long to wait for a cluster that stopped answering while its log is followed."""

AGENT_S = 60.0
"""How long to wait for a cluster that has just started and cannot run jobs yet."""

SILENT_S = 30.0
"""A log stream that was silent for this long may be dead and is reopened."""

UNAUTHORIZED = (401, 403)

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class NoAnswerError(ClusterError):
    """A job that ended without the answer that it should have printed.

    Args:
        problem: what happened.
        log: what the job printed.
    """

    def __init__(self, problem: str, log: str) -> None:
        super().__init__(problem)
        self.log = log


@dataclass(frozen=True)
class JobSpec:
    """A command to run on the head node.

    Attributes:
        command: program and arguments.
        folder: uploaded as the working directory.
        environment: variables of the command and of everything it starts.
        metadata: shown in the dashboard.
        runtime_env: further parts of Ray's runtime environment.
    """

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobState:
    """State of a job.

    Attributes:
        status: PENDING RUNNING STOPPED SUCCEEDED FAILED.
        message: Ray's explanation of the status.
        return_code: exit code of the command, once it has ended.
    """

    status: str
    message: str
    return_code: int | None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def reason(self) -> str:
        """First line of the message, without the log that may follow it."""
        return self.message.strip().partition("\n")[0].partition(", last available logs")[0]

    @property
    def exit_code(self) -> int:
        """Exit code for a process that stands for the job: 128 + N if signal N killed it."""
        if self.return_code is not None:
            return self.return_code if self.return_code >= 0 else 128 - self.return_code
        return 0 if self.status == "SUCCEEDED" else 1


@dataclass(frozen=True)
class Dashboard:
    """The dashboard of a cluster that has answered. Its methods raise `ClusterError` if a request fails.

    Attributes:
        address: address of the dashboard.
        ray_version: version of Ray on the cluster.
        headers: sent with each request.
        token_source: where the token came from, or None if the cluster requires none.
        latency_s: duration of the first request.
    """

    address: Address
    ray_version: str
    headers: Mapping[str, str]
    token_source: str | None
    latency_s: float

    @classmethod
    def connect(cls, address: Address) -> "Dashboard":
        """Ask a cluster for its version, with a token only if it requires one.

        Raises:
            ClusterError: it does not answer in time, refuses the token, or is not a Ray cluster.
        """
        import requests

        where = f"{address.url} (from {address.source})"
        started = time.monotonic()
        try:
            answer, headers, token_source = _authorized_get(f"{address.url}/api/version", ANSWER_S)
            if answer.status_code in UNAUTHORIZED:
                raise _unauthorized(where, token_source)
            version = str(answer.json()["ray_version"])
        except requests.RequestException as error:
            hint = f"Is the cluster up, and is this the host and port of its dashboard ({DASHBOARD_PORT})?"
            if isinstance(error, requests.Timeout):
                raise _unreachable(f"{where} did not answer within {ANSWER_S:g} s", hint) from error
            if isinstance(error, requests.ConnectionError):
                raise _unreachable(f"{where} does not answer ({_connection_problem(error)})", hint) from error
            raise _unreachable(f"{where} is not a Ray dashboard: {short_message(error)}", hint) from error
        except (KeyError, TypeError) as error:
            hint = f"Its default port is {DASHBOARD_PORT}"
            raise _unreachable(f"{where} answers, but is not a Ray dashboard", hint) from error
        return cls(address, version, headers, token_source, time.monotonic() - started)

    def unused_id(self, wanted: str) -> str:
        """Return a job id that the cluster does not know: the wanted one, or that one with a number appended."""
        wanted, taken = re.sub(r"[^A-Za-z0-9_.-]", "-", wanted), _statuses(self.address.url, self.headers, ANSWER_S)
        names = itertools.chain([wanted], (f"{wanted}.{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def submit(self, job: str, spec: JobSpec) -> None:
        """Upload the folder of a job and start its command.

        Args:
            job: id returned by `unused_id`.
            spec: what to run.
        """
        runtime_env = packages.resolve(spec.runtime_env, self._send)
        own = {"MLX_JOB": job, "MLX_JOB_ADDRESS": self.address.url}
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **spec.environment, **own}
        runtime_env["working_dir"] = self._send(*packages.pack_folder(spec.folder))
        body = {
            "entrypoint": shlex.join(spec.command),
            "submission_id": job,
            "runtime_env": runtime_env,
            "metadata": dict(spec.metadata),
        }
        deadline = time.monotonic() + AGENT_S
        while True:
            answer = self._request("POST", "jobs/", TRANSFER_S, json=body)
            if answer.status_code == 200:
                remember(self.address)
                return
            # Ray has no other sign of a head node whose agent is still starting.
            if "No available agent" not in answer.text or time.monotonic() > deadline:
                raise ClusterError(f"{self.address.url} rejected the job: {_last_line(answer.text)}")
            time.sleep(1)

    def ask(self, name: str, spec: JobSpec, *, marker: str, timeout_s: float) -> Any:
        """Run a short job that prints its answer as one line of JSON.

        Args:
            name: beginning of the job's id.
            spec: what to run.
            marker: prefix of the line with the answer.
            timeout_s: how long the job may take; it is then stopped.

        Raises:
            NoAnswerError: the job ended without an answer.
            ClusterError: the job did not end in time.
        """
        job = f"{name}-{uuid.uuid4().hex[:8]}"
        self.submit(job, spec)
        deadline = time.monotonic() + timeout_s
        while not (state := self.state(job)).ended:
            if time.monotonic() > deadline:
                self.stop(job)
                raise ClusterError(f"the job {job} did not end within {timeout_s:.0f} s")
            time.sleep(0.2)
        log = self.log(job)
        for line in log.splitlines():
            if line.startswith(marker):
                with contextlib.suppress(ClusterError):
                    self._request("DELETE", f"jobs/{job}", ANSWER_S)
                return json.loads(line.removeprefix(marker))
        reason = last_lines(log, 1).strip() or last_lines(state.message.strip(), 1)
        raise NoAnswerError(f"the job {job} failed: {reason}", log)

    def state(self, job: str) -> JobState:
        """Return the state of a job; raises if the cluster does not know it."""
        answer = self._request("GET", f"jobs/{job}", ANSWER_S)
        if answer.status_code != 200:
            raise ClusterError(f"{self.address.url} has no job {job}")
        facts = answer.json()
        return JobState(facts["status"], facts.get("message") or "", facts.get("driver_exit_code"))

    def log(self, job: str) -> str:
        """Return everything that a job has printed so far."""
        answer = self._request("GET", f"jobs/{job}/logs", TRANSFER_S)
        if answer.status_code != 200:
            raise ClusterError(f"{self.address.url} has no log of {job}: {_last_line(answer.text)}")
        return str(answer.json()["logs"])

    def follow(self, job: str, write: Callable[[str], object], tail: int | None = None) -> JobState:
        """Pass on what a job prints until it ends, and reconnect when the connection is lost.

        Args:
            job: its id.
            write: receives pieces of text.
            tail: number of lines to begin with; None for everything printed so far.

        Returns:
            The state in which it ended.

        Raises:
            ClusterError: the cluster has not answered for `RECONNECT_S`.
        """
        seen = 0
        if tail is not None:
            log = self.log(job)
            write(last_lines(log, tail))
            seen = len(log)
        deadline = time.monotonic() + RECONNECT_S
        while True:
            complete, seen = asyncio.run(self._stream(job, seen, write))
            try:
                state = self.state(job)
                deadline = time.monotonic() + RECONNECT_S
                if state.ended:
                    if not complete and (rest := self.log(job)[seen:]):
                        write(rest)
                    return state
            except ClusterError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def stop(self, job: str) -> None:
        """Send SIGTERM to a job, and SIGKILL after `RAY_JOB_STOP_WAIT_TIME_S` of its environment."""
        answer = self._request("POST", f"jobs/{job}/stop", ANSWER_S)
        if answer.status_code != 200:
            raise ClusterError(f"cannot stop {job}: {_last_line(answer.text)}")

    async def _stream(self, job: str, skip: int, write: Callable[[str], object]) -> tuple[bool, int]:
        """Pass on what follows the first `skip` characters of a log.

        Returns:
            True if the log was read to its end, and the number of characters seen.
        """
        import aiohttp

        url, seen = f"{self.address.url}/api/jobs/{job}/logs/tail", 0  # each connection begins with the first character
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
            async with aiohttp.ClientSession(headers=self.headers) as session, session.ws_connect(url) as stream:
                while True:
                    message = await stream.receive(SILENT_S)
                    if message.type != aiohttp.WSMsgType.TEXT:
                        return stream.close_code == aiohttp.WSCloseCode.OK, max(seen, skip)
                    fresh = message.data[max(0, skip - seen) :]
                    seen += len(message.data)
                    if fresh:
                        write(fresh)
        return False, max(seen, skip)

    def _send(self, name: str, content: bytes) -> str:
        """Upload a package unless the cluster has it. Returns its URI."""
        path = f"packages/gcs/{name}"
        if self._request("GET", path, ANSWER_S).status_code != 200:
            answer = self._request("PUT", path, TRANSFER_S, data=content)
            if answer.status_code != 200:
                raise ClusterError(f"{self.address.url} rejected the upload: {_last_line(answer.text)}")
        return f"gcs://{name}"

    def _request(self, method: str, path: str, timeout_s: float, **body: Any) -> "requests.Response":
        import requests

        try:
            return _request(method, f"{self.address.url}/api/{path}", timeout_s, self.headers, **body)
        except requests.RequestException as error:
            raise ClusterError(f"{self.address.url} does not answer: {short_message(error)}") from error


def job_statuses(jobs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Ask clusters for the status of jobs: PENDING RUNNING STOPPED SUCCEEDED FAILED.

    Args:
        jobs: address and id of each job, from the records of runs. Clusters that are not trusted are asked without a
            token; a line on stderr names those that require one.

    Returns:
        Status by address and id, without the jobs of clusters that cannot be reached or do not know them.
    """
    from concurrent.futures import ThreadPoolExecutor

    jobs = set(jobs)
    addresses = sorted({address for address, _ in jobs})
    if not addresses:
        return {}
    with ThreadPoolExecutor(len(addresses)) as pool:
        known = dict(zip(addresses, pool.map(_statuses, addresses), strict=True))
    return {(address, job): known[address][job] for address, job in jobs if job in known[address]}


def _statuses(url: str, headers: Mapping[str, str] | None = None, timeout_s: float = LIST_S) -> dict[str, str]:
    """Status of every job of a cluster, by id; nothing if it cannot be reached."""
    url_of_jobs = f"{url}/api/jobs/"
    with contextlib.suppress(Exception):
        if headers is not None:
            answer = _request("GET", url_of_jobs, timeout_s, headers)
        elif is_trusted(url):
            answer, _, _ = _authorized_get(url_of_jobs, timeout_s)
        else:
            answer = _request("GET", url_of_jobs, timeout_s, {})
            if answer.status_code in UNAUTHORIZED:
                print(f"note: {untrusted_notice(printable(url))}", file=sys.stderr)
        return {item["submission_id"]: item["status"] for item in answer.json() if item.get("submission_id")}
    return {}


def _request(method: str, url: str, timeout_s: float, headers: Mapping[str, str], **body: Any) -> "requests.Response":
    import requests

    # With an `auth` of its own, requests does not look for a password in ~/.netrc.
    return requests.request(method, url, timeout=timeout_s, headers=dict(headers), auth=lambda request: request, **body)


def _authorized_get(url: str, timeout_s: float) -> tuple["requests.Response", dict[str, str], str | None]:
    """Request a URL, again with the user's token if it is unauthorized.

    Returns:
        The answer, the headers that were needed, and the source of the token if it was needed.
    """
    answer = _request("GET", url, timeout_s, {})
    if answer.status_code not in UNAUTHORIZED:
        return answer, {}, None
    token, source = find_token()
    if token is None:
        return answer, {}, None
    headers = {"Authorization": f"Bearer {token}"}
    return _request("GET", url, timeout_s, headers), headers, source


def _unreachable(problem: str, hint: str) -> ClusterError:
    error = ClusterError(problem)
    error.hint = hint
    return error


def _unauthorized(where: str, token_source: str | None) -> ClusterError:
    if token_source is None:
        hint = "Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to the file with it"
        return _unreachable(f"the cluster at {where} requires a token", hint)
    if token_source == str(ray_token_file()):
        token_source += ", which Ray writes for its clusters on this machine"
    problem = f"the cluster at {where} refuses the token from {token_source}"
    return _unreachable(problem, "Set RAY_AUTH_TOKEN to the token of this cluster")


def _connection_problem(error: "requests.ConnectionError") -> str:
    """Distinguish an unknown host from a closed port by the error underlying the one from requests."""
    from urllib3.exceptions import MaxRetryError, NameResolutionError

    cause = error.args[0] if error.args else None
    unknown = isinstance(cause, MaxRetryError) and isinstance(cause.reason, NameResolutionError)
    return "unknown host" if unknown else "nothing listens there"


def _last_line(text: str) -> str:
    """The useful line of an error message, which may end with a traceback of the server."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "no reason given"
