"""Models on a cluster: deploys, lists, updates and stops applications of Ray Serve."""

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlx_runtime.companions.ray import launch
from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.companions.serving.cluster import replica
from mlx_runtime.companions.serving.cluster.replica import MARKER, TASK, Spec
from mlx_runtime.companions.serving.http.access import MAKE_A_TOKEN, digest_of
from mlx_runtime.companions.serving.http.asgi import NAME
from mlx_runtime.companions.serving.http.server import is_loopback
from mlx_runtime.companions.serving.loading import choose_checkpoint
from mlx_runtime.errors import ClusterError, UsageError
from mlx_runtime.runs.folder import RunFolder
from mlx_runtime.runs.logs import last_lines
from mlx_runtime.runs.queries.reader import Run, open_run
from mlx_runtime.runs.snapshots import Upload

HOST, PORT = "127.0.0.1", 8000
"""Address on which each node listens, by default."""

JOB_S = 300.0
"""Time in which a cluster has to accept a task."""

READY_S = 1800.0
"""Time in which replicas have to start, on nodes that may have to start first."""

ROOM_S = 4.0
"""Time after which a replica without a process is reported to wait for room."""

PROXY_S = 40.0
"""Time in which a node has to listen once replicas run."""

Write = Callable[[str], object]


@dataclass(frozen=True)
class Deployment:
    """A model that is deployed on a cluster.

    Attributes:
        spec: the model.
        url: URL of the application on the head node.
        status: RUNNING, DEPLOYING, DEPLOY_FAILED, UNHEALTHY or DELETING.
        details: state of its deployment, in the form of Ray Serve.
        reason: why it has that status, in one line; may be empty.
        listening: False if no node can accept requests.
    """

    spec: Spec
    url: str
    status: str
    details: Mapping[str, Any]
    reason: str
    listening: bool

    @property
    def replicas(self) -> list[Mapping[str, Any]]:
        """State of each replica: `state`, `pid`, `node_id`, `log_file_path`, …"""
        return list(self.details.get("replicas", ()))

    @property
    def running(self) -> int:
        return sum(item["state"] == "RUNNING" for item in self.replicas)

    @property
    def wanted(self) -> int:
        return int(self.details["target_num_replicas"])

    @property
    def experiment(self) -> str:
        return self.spec.title.partition("/")[0]

    @property
    def title(self) -> str:
        """The model, like `digits/run_003 epoch_0018`."""
        return f"{self.spec.title} {self.spec.checkpoint}"

    def document(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        facts = {"name": self.spec.name, "url": self.url, "status": self.status, "reason": self.reason}
        model = {"run": self.spec.run, "checkpoint": self.spec.checkpoint, "token": self.spec.digest is not None}
        replicas = [{key: item.get(key) for key in ("replica_id", "state", "pid", "node_ip")} for item in self.replicas]
        return facts | model | {"wanted": self.wanted, "running": self.running, "replicas": replicas}

    def facts(self) -> dict[str, str]:
        """Return lines for the user by title: the URL, and the commands to type."""
        token = ' -H "Authorization: Bearer $MLX_SERVE_TOKEN"' if self.spec.digest else ""
        send = f"curl {self.url}/predict -H 'Content-Type: application/json'{token} -d @-"
        found = {"url": self.url, "try": f"curl -s {self.url}/example{token} | {send}"}
        parts = urlsplit(self.url)
        if not self.spec.public:
            found["listens"] = f"on the head node only; from elsewhere: ssh -L {parts.port}:{parts.netloc} HEAD"
        return found


class Cluster:
    """Ray Serve on a cluster.

    Args:
        dashboard: dashboard of the cluster.
    """

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self.option = f"--ray-address {shlex.quote(dashboard.address.url)}"

    @classmethod
    def connect(cls, address: str | None) -> "Cluster":
        """Connect to a cluster, by default that in `RAY_ADDRESS`, to read or change its models."""
        return cls(Dashboard.connect(Address.parse(address)))

    def deployments(self) -> dict[str, Deployment]:
        """Return the models that are deployed, by the name of their application."""
        state = self.dashboard.serve_state()
        host, port = listens_on(state) or (HOST, PORT)
        listening = any(proxy["status"] == "HEALTHY" for proxy in state["proxies"].values())
        found = {}
        for name, application in state["applications"].items():
            for details in application["deployments"].values():
                spec = Spec.parse((details.get("deployment_config") or {}).get("user_config"))
                if spec is None:
                    continue
                shown = HOST if is_loopback(host) else urlsplit(self.dashboard.address.url).hostname
                url = f"http://{shown}:{port}{spec.route.rstrip('/')}"
                message = details.get("message") or application.get("message") or ""
                reason = last_lines(message.strip(), 1).strip()
                found[name] = Deployment(spec, url, application["status"], details, reason, listening)
        return found

    def find(self, name: str) -> Deployment:
        """Return a model by the name of its application."""
        found = self.deployments()
        if name not in found:
            known = f"there are {', '.join(sorted(found))}" if found else "no models are deployed there"
            raise UsageError(f"{self.dashboard.address.url} does not serve {name!r}; {known}")
        return found[name]

    def launch(
        self, spec: Spec, upload: Upload, host: str | None, port: int | None, write: Write = print
    ) -> Deployment:
        """Deploy a model, and wait until it answers. The job with the code ends; the replicas remain.

        Args:
            spec: the model.
            upload: the code of its experiment.
            host: address on which all nodes listen, for all applications, by default the present one.
            port: port, likewise.
            write: called with lines about the progress.

        Raises:
            UsageError: the name or route is taken, or Ray Serve listens elsewhere.
            ClusterError: the cluster does not answer, or the replicas cannot start.
        """
        state = self.dashboard.serve_state()
        running = listens_on(state)
        host, port = host or (running or (HOST,))[0], port or (running or (HOST, PORT))[1]
        if running not in (None, (host, port)) and (others := ", ".join(sorted(state["applications"]))):
            where = "{}:{}".format(*running)
            raise UsageError(
                f"Ray Serve listens on {where} for {others}; leave out --host and --port, or stop {others}"
            )
        for name, application in state["applications"].items():
            if name == spec.name:
                raise UsageError(f"{name} is deployed already; type: mlx serve update {name} RUN {self.option}")
            if application.get("route_prefix") == spec.route:
                raise UsageError(f"{spec.route} is the route of {name}; choose another --route")
        public = not is_loopback(host)
        if public and spec.digest is None:
            raise UsageError(f"a server on {host} needs a token; {MAKE_A_TOKEN}")
        restart = running not in (None, (host, port))
        return self._deploy(dataclasses.replace(spec, public=public), upload, host, port, write, restart=restart)

    def update(self, name: str, spec: Spec, upload: Upload, write: Write = print) -> Deployment:
        """Replace the model of an application. New replicas answer before the former ones stop.

        Args:
            name: name of the application.
            spec: a spec with the new run, checkpoint and code; the rest remains as it is.
            upload: the code of its experiment.
            write: called with lines about the progress.
        """
        former = self.find(name)
        new: dict[str, Any] = {
            "title": spec.title,
            "run": spec.run,
            "checkpoint": spec.checkpoint,
            "stored": spec.stored,
        }
        host, port = listens_on(self.dashboard.serve_state()) or (HOST, PORT)
        return self._deploy(dataclasses.replace(former.spec, **new), upload, host, port, write)

    def stop(self, name: str) -> Deployment:
        """Stop an application after its accepted requests, and Ray Serve with the last one. Return it."""
        deployment = self.find(name)
        self._run("stop", Upload(Path(), ()), {}, name=deployment.spec.name)
        return deployment

    def logs(self, name: str, lines: int = 100) -> Iterator[str]:
        """Yield the last lines of the log of each replica of an application, after a line with its process."""
        for item in self.find(name).replicas:
            if item.get("node_id") and item.get("log_file_path"):
                yield f"replica {item['replica_id']}, process {item['pid']} on {item['node_ip']}"
                yield self.dashboard.node_log(item["node_id"], item["log_file_path"].lstrip("/"), lines)

    def _deploy(
        self, spec: Spec, upload: Upload, host: str, port: int, write: Write, *, restart: bool = False
    ) -> Deployment:
        write(f"deploying {spec.title} {spec.checkpoint}")
        runtime_env = open_run(spec.run).config["cfg"].get("runtime_env") or {}
        self._run("deploy", upload, runtime_env, spec=spec.document(), host=host, port=port, restart=restart)
        began, said, found, healthy = time.monotonic(), "", None, 0.0
        while time.monotonic() < began + READY_S:
            with contextlib.suppress(ClusterError):  # the head node may be busy
                found = self.deployments().get(spec.name)
            if found is not None and found.spec == spec:
                if found.status == "RUNNING" and found.details["status"] == "HEALTHY":
                    if found.listening:
                        return found
                    healthy = healthy or time.monotonic()
                    if time.monotonic() > healthy + PROXY_S:
                        cure = f"mlx serve stop {spec.name} {self.option}, and launch it with another --port"
                        raise ClusterError(f"no node can listen on {host}:{port}; {cure}")
                if found.status == "DEPLOY_FAILED":
                    former = f" ({found.running} of the former replicas keep answering)" * (found.running > 0)
                    raise ClusterError(f"{spec.name} cannot start{former}: {found.reason}")
                line = self._progress(found, time.monotonic() - began)
                if line and line != said:
                    write(line)
                    said = line
            time.sleep(0.3)
        raise ClusterError(f"{spec.name} has not started within {READY_S:g} s; see: mlx serve ls {self.option}")

    def _progress(self, found: Deployment, seconds: float) -> str:
        needed = {name: number for name, number in found.details.get("required_resources", {}).items() if number}
        if seconds > ROOM_S and len(found.replicas) > found.running:
            with contextlib.suppress(ClusterError):
                usage, waiting = self.dashboard.resources()
                if any(demand.items() >= needed.items() for demand in waiting):
                    return f"waiting   no node has room for a replica, which needs {_resources(needed, usage)}"
        starting = sum(item["state"] != "RUNNING" for item in found.replicas)
        return f"replicas  {found.running} running, {starting} starting or stopping" if starting else ""

    def _run(self, task: str, upload: Upload, runtime_env: Mapping[str, Any], **fields: Any) -> None:
        """Run the job of a task."""
        command = ["python", "-m", replica.__name__]
        environment = {TASK: json.dumps({"do": task, **fields})}
        spec = JobSpec(command, upload, environment, {"mlx": "serve"}, runtime_env)
        answer = self.dashboard.ask("mlx-serve", spec, marker=MARKER, timeout_s=JOB_S)
        if problem := answer.get("error"):
            raise ClusterError(problem)


def _resources(needed: Mapping[str, float], usage: Mapping[str, tuple[float, float]]) -> str:
    """Return `1 CPU (0 of 4 are free)`."""
    texts = []
    for name, number in needed.items():
        used, total = usage.get(name, (0.0, 0.0))
        texts.append(f"{number:g} {name} ({f'{total - used:g} of {total:g} are free' if total else 'there is none'})")
    return " and ".join(texts)


def spec_of(
    folder: RunFolder,
    checkpoint: str | int | None,
    *,
    route: str | None = None,
    token: str | None = None,
    stored: bool = False,
    **fields: Any,
) -> Spec:
    """Return the spec of a run whose `predict` answers its example rows on this machine.

    Args:
        folder: folder of the run.
        checkpoint: checkpoint, by default the best.
        route: path below which the model answers, by default the name of the experiment. It names the application.
        token: token that requests need.
        stored: use the code that the run has stored.
        fields: further fields of `Spec`.

    Raises:
        UsageError: the run cannot be served, or the route cannot be used.
    """
    route = f"/{folder.experiment}" if route is None else f"/{route.strip('/')}"
    name = route[1:].replace("/", "-") or folder.experiment
    if NAME.fullmatch(name) is None or any(NAME.fullmatch(part) is None for part in route[1:].split("/") if route[1:]):
        raise UsageError(f"--route is {route!r}; expected letters, digits, and . _ - after the /")
    chosen = choose_checkpoint(folder, checkpoint).name
    Run(folder).predictor(chosen, device="cpu", trust=stored)
    digest = None if token is None else digest_of(token)
    return Spec(name, folder.title, folder.location, chosen, route, stored, digest=digest, **fields)


def connect(address: str | None, *, stored: bool) -> tuple[Cluster, Upload]:
    """Connect to a cluster, and collect the code for its replicas: that in this folder, unless it is `stored`.

    The address is by default that in `RAY_ADDRESS`.
    """
    dashboard, upload = launch.connect(Address.parse(address), Path.cwd(), files=not stored)
    return Cluster(dashboard), upload


def listens_on(state: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the host and port on which Ray Serve listens, or None if it does not run."""
    options = state.get("http_options")
    return (options["host"], options["port"]) if options else None
