"""Client for the REST API of a cluster's dashboard: submit, follow and stop jobs.

Ray's `JobSubmissionClient` takes seconds to import, has no timeouts, and prefers `RAY_ADDRESS` to its argument.
API: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html (Ray 2.60).
"""

import asyncio
import contextlib
import itertools
import re
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.jobs.launching import JobState
from mlx_runtime.companions.ray import addresses
from mlx_runtime.companions.ray.addresses import DASHBOARD_PORT, Address
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.errors import ClusterError, printable, short_message
from mlx_runtime.runs.logs import last_lines
from mlx_runtime.storage.documents import from_json

if TYPE_CHECKING:
    import requests

Timeout = float | tuple[float, float]
"""Timeouts in seconds to connect and to answer, or one number for both."""

ANSWER_S = 5.0  # timeout of a request
TRANSFER_S = 120.0  # timeout of a request that transfers a package or a log
STATE_S = 20.0  # timeout of a request that the dashboard passes on to actors
LIST_S = 2.0, 10.0  # timeouts to connect and to answer when runs are listed
RECONNECT_S = 60.0  # maximum silence of a cluster while following a log
SILENCE_S = 8.0  # maximum silence of a cluster while checking it
KEPT_S = 60.0  # time for which ended jobs of commands stay listed; Ray polls them once more
AGENT_S = 60.0  # maximum time for a cluster that has just started to become able to run jobs
SILENT_S = 30.0  # a log stream that is silent for this long may be dead, and is reopened

UNAUTHORIZED = (401, 403)


@dataclass(frozen=True)
class Dashboard:
    """The dashboard of a cluster that has answered. Its methods raise `ClusterError` if a request fails."""

    address: Address
    ray_version: str
    headers: Mapping[str, str]  # sent with each request
    token_source: str | None  # None if the cluster requires no token

    @classmethod
    def connect(cls, address: Address) -> "Dashboard":
        """Request the version of a cluster, with a token only if it requires one."""
        import requests

        where = f"{address.url} (from {address.source})"
        try:
            answer, headers, token_source = _authorized_get(f"{address.url}/api/version", ANSWER_S)
            if answer.status_code in UNAUTHORIZED:
                raise _unauthorized_error(where, token_source)
            version = str(answer.json()["ray_version"])
        except (requests.JSONDecodeError, KeyError, TypeError) as error:
            hint = f"Its default port is {DASHBOARD_PORT}"
            raise ClusterError(f"{where} answers, but is not a Ray dashboard", hint) from error
        except requests.RequestException as error:
            hint = f"Is the cluster up, and is this the host and port of its dashboard ({DASHBOARD_PORT})?"
            raise ClusterError(f"{where} {_problem(error, ANSWER_S)}", hint) from error
        return cls(address, version, headers, token_source)

    def unused_id(self, wanted: str) -> str:
        """Return a job id that the cluster does not use yet: the wanted id, or that id with a number appended."""
        wanted, taken = re.sub(r"[^A-Za-z0-9_.-]", "-", wanted), {facts["submission_id"] for facts in self.jobs()}
        names = itertools.chain([wanted], (f"{wanted}.{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def submit(self, job: str, spec: JobSpec) -> None:
        """Upload the files of a job and start its command, under an id returned by `unused_id`."""
        runtime_env = spec.pack(self._send)
        runtime_env["env_vars"] |= {"MLX_JOB": job, "MLX_JOB_ADDRESS": self.address.url}
        body = {"entrypoint": shlex.join(spec.command), "submission_id": job, "metadata": dict(spec.metadata)}
        body["runtime_env"] = runtime_env
        deadline = time.monotonic() + AGENT_S
        while (answer := self._request("POST", "jobs/", TRANSFER_S, json=body)).status_code != 200:
            # The only sign that the agent of the head node is still starting.
            if "No available agent" not in answer.text or time.monotonic() > deadline:
                raise ClusterError(f"{self.address.url} rejected the job: {_reason(answer)}")
            time.sleep(1)

    def ask(
        self, name: str, spec: JobSpec, *, marker: str, timeout_s: float, silence_s: float = SILENCE_S
    ) -> dict[str, Any]:
        """Run a short job that prints its answer as one line of JSON after a marker. Its id begins with `name`.

        Raises `ClusterError` if the job prints no answer, or if the cluster does not answer for `silence_s`.
        """
        job = f"{name}-{uuid.uuid4().hex[:8]}"
        self.submit(job, spec)
        self.forget_ended(f"{name}-", spec.metadata)
        deadline = time.monotonic() + timeout_s
        while not (state := self.state(job, min(deadline, time.monotonic() + silence_s))).ended:
            if time.monotonic() > deadline:
                self.stop(job)
                raise ClusterError(f"the job {job} did not end within {timeout_s:.0f} s")
            time.sleep(0.2)
        log = self.log(job)
        for line in log.splitlines():
            if line.startswith(marker):
                with contextlib.suppress(ValueError):  # damaged
                    return from_json(line.removeprefix(marker).encode(), {})
        reason = last_lines(log, 1).strip() or last_lines(state.message.strip(), 1)
        raise ClusterError(f"the job {job} failed: {reason}")

    def forget_ended(self, prefix: str, metadata: Mapping[str, str]) -> None:
        """Remove earlier jobs whose ids begin like this, with this metadata: the user has not submitted them."""
        with contextlib.suppress(ClusterError):  # it may be too busy to list its jobs
            for facts in self.jobs():
                ended = facts.get("end_time") or 0
                same = metadata.items() <= (facts.get("metadata") or {}).items()  # ids can be anything
                named = (facts.get("submission_id") or "").startswith(prefix)
                if named and same and 0 < ended < (time.time() - KEPT_S) * 1000:
                    self._request("DELETE", f"jobs/{facts['submission_id']}")

    def state(self, job: str, deadline: float = 0.0) -> JobState:
        """Return the state of a job. Raises if the cluster does not know it, or does not answer by the deadline."""
        answer = None
        while answer is None:
            try:
                answer = self._request("GET", f"jobs/{job}")
            except ClusterError:  # the cluster may be busy
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        if answer.status_code != 200:
            raise ClusterError(f"{self.address.url} has no job {job}")
        facts = answer.json()
        return JobState(
            facts["status"], facts.get("message") or "", facts.get("driver_exit_code"), facts.get("metadata") or {}
        )

    def log(self, job: str) -> str:
        """Return the output of a job so far."""
        answer = self._request("GET", f"jobs/{job}/logs", TRANSFER_S, refusal=f"{self.address.url} has no log of {job}")
        return str(answer.json()["logs"])

    def follow(self, job: str, write: Callable[[str], object], tail: int | None = None, seen: int = 0) -> JobState:
        """Write the output of a job until it ends, and return its last state. Lost connections are reopened.

        `tail` is the number of lines to begin with; None means all output after the first `seen` characters. Raises if
        the cluster does not answer for `RECONNECT_S`. If the node of an ended job is lost, the end of its output is,
        too.
        """
        ended = None
        if tail is not None:
            log = self.log(job)
            write(last_lines(log, tail))
            seen = len(log)
        deadline = time.monotonic() + RECONNECT_S
        while True:
            complete, seen = asyncio.run(self._stream(job, seen, write))
            try:
                state = self.state(job)
                if state.ended:
                    ended = state
                    if not complete and (rest := self.log(job)[seen:]):
                        write(rest)
                    return state
                deadline = time.monotonic() + RECONNECT_S
            except ClusterError:
                if time.monotonic() > deadline:
                    if ended is not None:
                        return ended
                    raise
            time.sleep(0.5)

    def stop(self, job: str) -> None:
        """Send SIGTERM to a job, and SIGKILL after the `RAY_JOB_STOP_WAIT_TIME_S` of its environment."""
        self._request("POST", f"jobs/{job}/stop", refusal=f"cannot stop {job}")

    def serve_state(self) -> dict[str, Any]:
        """Return the state of Ray Serve: its `applications` and `proxies`, and its `http_options` if it runs."""
        answer = self._request("GET", "serve/applications/", STATE_S)
        if answer.status_code == 501:  # https://docs.ray.io/en/latest/serve/api/index.html#serve-rest-api
            problem = f"the head node of {self.address.url} lacks the libraries of Ray Serve"
            raise ClusterError(problem, 'Install them in the environment of the nodes: pip install "ray[serve]"')
        if answer.status_code != 200:
            raise ClusterError(f"{self.address.url} cannot list the applications of Ray Serve: {_reason(answer)}")
        return dict(answer.json())

    def jobs(self) -> list[dict[str, Any]]:
        """Return the facts that the cluster knows about each job."""
        return list(self._request("GET", "jobs/", STATE_S, refusal=f"{self.address.url} cannot list its jobs").json())

    async def _stream(self, job: str, skip: int, write: Callable[[str], object]) -> tuple[bool, int]:
        """Write a log after its first `skip` characters, until the connection ends.

        Return True if the log was read to its end, and the number of characters seen.
        """
        import aiohttp

        url, seen = f"{self.address.url}/api/jobs/{job}/logs/tail", 0  # each connection begins with the first character
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
            async with aiohttp.ClientSession(headers=self.headers) as session, session.ws_connect(url) as stream:
                while (message := await stream.receive(SILENT_S)).type == aiohttp.WSMsgType.TEXT:
                    fresh = message.data[max(0, skip - seen) :]
                    seen += len(message.data)
                    if fresh:
                        write(fresh)
                return stream.close_code == aiohttp.WSCloseCode.OK, max(seen, skip)
        return False, max(seen, skip)

    def _send(self, name: str, read: Callable[[], bytes]) -> str:
        """Upload a package unless the cluster has it. Return its URI."""
        path = f"packages/gcs/{name}"
        if self._request("GET", path).status_code != 200:
            self._request("PUT", path, TRANSFER_S, refusal=f"{self.address.url} rejected the upload", data=read())
        return f"gcs://{name}"

    def _request(
        self, method: str, path: str, timeout_s: float = ANSWER_S, *, refusal: str | None = None, **body: Any
    ) -> "requests.Response":
        """Return the answer to a request. With `refusal`, an error status raises an error that begins with it."""
        import requests

        try:
            answer = _request(method, f"{self.address.url}/api/{path}", timeout_s, self.headers, **body)
        except requests.RequestException as error:
            raise ClusterError(f"{self.address.url} {_problem(error, timeout_s)}") from error
        if answer.status_code in UNAUTHORIZED:
            raise _unauthorized_error(f"{self.address.url} (from {self.address.source})", self.token_source)
        if refusal is not None and answer.status_code != 200:
            raise ClusterError(f"{refusal}: {_reason(answer)}")
        return answer


def client_of(job: Mapping[str, str], *, alive: bool) -> Dashboard | None:
    """Connect to the cluster of a job; None if it is not trusted, does not answer, or does not know the job."""
    if not addresses.is_named(job["address"]):
        if alive:  # the stored log of any other run is complete
            addresses.note_untrusted(job["address"])
        return None
    with contextlib.suppress(ClusterError):
        dashboard = Dashboard.connect(addresses.Address(job["address"], "its record"))
        dashboard.state(job["id"])
        return dashboard
    return None


def job_statuses(jobs: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return the status of jobs (see `JobState`) by address and id, without jobs that no cluster knows.

    Untrusted clusters are asked without a token; a line on stderr names those that require one.
    """
    clusters = sorted({address for address, _ in jobs})
    with ThreadPoolExecutor(max(1, len(clusters))) as pool:
        known = dict(zip(clusters, pool.map(_statuses, clusters), strict=True))
    return {(address, job): known[address][job] for address, job in jobs if job in known[address]}


def _statuses(url: str) -> dict[str, str]:
    """Return the status of every job of a cluster by id; empty if nothing answers there.

    A cluster that is too slow is named on stderr, because it may know jobs that are then missing here.
    """
    import requests

    url_of_jobs = f"{url}/api/jobs/"
    with contextlib.suppress(Exception):
        try:
            if addresses.is_named(url):
                answer, _, _ = _authorized_get(url_of_jobs, LIST_S)
            else:
                answer = _request("GET", url_of_jobs, LIST_S, {})
                if answer.status_code in UNAUTHORIZED:
                    addresses.note_untrusted(url)
        except requests.Timeout:
            note = f"note: {url} did not answer within {LIST_S[1]:g} s, so the states of its jobs are those of run.json"
            print(printable(note, one_line=True), file=sys.stderr)
            raise
        return {item["submission_id"]: item["status"] for item in answer.json() if item.get("submission_id")}
    return {}


def _request(method: str, url: str, timeout_s: Timeout, headers: Mapping[str, str], **body: Any) -> "requests.Response":
    import requests

    # With an explicit `auth`, requests does not search ~/.netrc for a password.
    return requests.request(method, url, timeout=timeout_s, headers=dict(headers), auth=lambda request: request, **body)


def _authorized_get(url: str, timeout_s: Timeout) -> tuple["requests.Response", dict[str, str], str | None]:
    """Request a URL, and again with the user's token if unauthorized.

    Return the answer, and the required headers and source of the token.
    """
    answer = _request("GET", url, timeout_s, {})
    token, source = addresses.find_token() if answer.status_code in UNAUTHORIZED else (None, None)
    if token is None:
        return answer, {}, None
    headers = {"Authorization": f"Bearer {token}"}
    return _request("GET", url, timeout_s, headers), headers, source


def _unauthorized_error(where: str, token_source: str | None) -> ClusterError:
    if token_source is None:
        problem = f"the cluster at {where} requires a token"
        hint = "Set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to the path of a file that contains it"
        return ClusterError(problem, hint)
    if not token_source.startswith("RAY_AUTH_TOKEN"):
        token_source += ", which Ray writes for its clusters on this machine"
    problem = f"the cluster at {where} refuses the token from {token_source}"
    return ClusterError(problem, "Set RAY_AUTH_TOKEN to the token of this cluster")


def _problem(error: "requests.RequestException", timeout_s: float) -> str:
    """Describe a request that failed: with a timeout, an unknown host, a closed port or another protocol."""
    import requests
    from urllib3.exceptions import NameResolutionError, ProtocolError

    cause = error.args[0] if error.args else None
    if isinstance(error, requests.Timeout):
        return f"did not answer within {timeout_s:g} s"
    if not isinstance(error, requests.ConnectionError):
        return f"does not answer: {short_message(error)}"
    if isinstance(cause, ProtocolError):
        return "closes the connection"
    unknown = isinstance(getattr(cause, "reason", None), NameResolutionError)
    return f"does not answer ({'unknown host' if unknown else 'nothing listens there'})"


def _reason(answer: "requests.Response") -> str:
    """Return the informative line of an error message, which may be a traceback of the server."""
    return last_lines(answer.text.strip(), 1)[:300] or "no reason given"
