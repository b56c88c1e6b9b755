"""Models on a cluster: deploys and stops applications of Ray Serve."""

import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlx_runtime.companions.ray import launch as jobs
from mlx_runtime.companions.ray.addresses import Address
from mlx_runtime.companions.ray.dashboard import Dashboard
from mlx_runtime.companions.ray.jobs import JobSpec
from mlx_runtime.companions.serving.cluster import replica
from mlx_runtime.companions.serving.cluster.replica import MARKER, TASK, Spec
from mlx_runtime.companions.serving.http.access import MAKE_A_TOKEN, curl, digest_of, is_loopback, read_token
from mlx_runtime.companions.serving.http.application import NAME
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

Write = Callable[[str], object]


def launch(
    address: str | None,
    folder: RunFolder,
    checkpoint: str | None,
    *,
    route: str | None,
    host: str | None,
    port: int | None,
    stored: bool,
    write: Write,
    **fields: Any,
) -> dict[str, str]:
    """Deploy a model, or replace one of the same route, and wait until it answers. Return lines for the user by title.

    The job with the code ends; the replicas remain. Former replicas answer until new ones do.

    Args:
        address: dashboard of the cluster, by default that in `RAY_ADDRESS`.
        folder: folder of the run. Its `predict` has to answer its example rows on this machine, too.
        checkpoint: checkpoint, by default the best.
        route: path below which the model answers, by default the name of the experiment. It names the application.
        host: address on which all nodes listen, for all applications, by default the present one.
        port: port, likewise.
        stored: use the code that the run has stored, instead of that in the working directory.
        write: called with lines about the progress.
        fields: further fields of `Spec`.

    Raises:
        UsageError: the run cannot be served, the route is taken, or Ray Serve listens elsewhere.
        ClusterError: the cluster does not answer, or the replicas cannot start.
    """
    token = read_token()
    route = f"/{folder.experiment}" if route is None else f"/{route.strip('/')}"
    name = route[1:].replace("/", "-") or folder.experiment
    if any(NAME.fullmatch(part) is None for part in (name, *filter(None, route.split("/")))):
        raise UsageError(f"--route is {route!r}; expected letters, digits, and . _ - after the /")
    dashboard, upload = jobs.connect(Address.parse(address), Path.cwd(), files=not stored)
    state = dashboard.serve_state()
    options = state.get("http_options")
    running = (options["host"], options["port"]) if options else None
    host, port = host or (running or (HOST,))[0], port or (running or (HOST, PORT))[1]
    if running not in (None, (host, port)):
        where = "{}:{}".format(*running)
        cure = f"end it and all its models: serve shutdown -a {shlex.quote(dashboard.address.url)}"
        raise UsageError(f"Ray Serve listens on {where}; leave out --host and --port, or {cure}")
    for other, application in state["applications"].items():
        former = _spec_in(application) if other == name else None
        if former is None and (other == name or application.get("route_prefix") == route):
            raise UsageError(f"{route} is taken by another application, {other}; choose another --route")
        if former is not None and former.digest is not None and token is None:
            raise UsageError(f"clients of {name} need a token: set MLX_SERVE_TOKEN to it, or to another one")
    public = not is_loopback(host)
    if public and token is None:
        raise UsageError(f"a server on {host} needs a token; {MAKE_A_TOKEN}")
    chosen = choose_checkpoint(folder, checkpoint).name
    Run(folder).predictor(chosen, device="cpu", trust=stored)
    fields |= {"public": public, "digest": None if token is None else digest_of(token)}
    spec = Spec(name, folder.title, folder.location, chosen, route, stored, **fields)
    command = f"mlx serve stop {name} --ray-address {shlex.quote(dashboard.address.url)}"
    write(f"deploying {spec.title} {spec.checkpoint}")
    try:
        runtime_env = open_run(spec.run).config["cfg"].get("runtime_env") or {}
        _run_job(dashboard, "deploy", upload, runtime_env, spec=dataclasses.asdict(spec), host=host, port=port)
        _wait(dashboard, spec, write)
    except KeyboardInterrupt:
        write(f"the cluster may continue to deploy {name}; to stop it: {command}")
        raise
    shown = urlsplit(dashboard.address.url).hostname if public else HOST
    url = f"http://{shown}:{port}{route.rstrip('/')}"
    lines = {"url": url, "try": curl(url, token=token is not None)}
    if not public:
        lines["listens"] = f"on the head node only; from elsewhere: ssh -L {port}:{HOST}:{port} HEAD"
    return lines | {"stop": command}


def stop(address: str | None, name: str) -> None:
    """Stop an application after its accepted requests. Ray Serve keeps running, because others may use it, too."""
    dashboard = Dashboard.connect(Address.parse(address))
    own = [other for other, item in dashboard.serve_state()["applications"].items() if _spec_in(item) is not None]
    if name not in own:
        known = f"there are {', '.join(sorted(own))}" if own else "no models are deployed there"
        raise UsageError(f"{dashboard.address.url} does not serve {name!r}; {known}")
    _run_job(dashboard, "stop", Upload(Path(), ()), {}, name=name)


def _spec_in(application: Mapping[str, Any]) -> Spec | None:
    """Return the spec of an application of Ray Serve, or None if it was not deployed by this package."""
    configs = [details.get("deployment_config") or {} for details in application["deployments"].values()]
    return next((spec for config in configs if (spec := Spec.parse(config.get("user_config"))) is not None), None)


def _wait(dashboard: Dashboard, spec: Spec, write: Write) -> None:
    """Wait until an application answers, and write the state of its replicas."""
    until, said = time.monotonic() + READY_S, ""
    while time.monotonic() < until:
        time.sleep(0.3)
        state: Mapping[str, Any] = {"applications": {}}
        with contextlib.suppress(ClusterError):  # the head node may be busy
            state = dashboard.serve_state()
        application = state["applications"].get(spec.name)
        if application is None or _spec_in(application) != spec:
            continue
        (details,) = application["deployments"].values()
        reason = last_lines((details.get("message") or application.get("message") or "").strip(), 1).strip()
        if application["status"] == "RUNNING" and details["status"] == "HEALTHY":
            if any(proxy["status"] == "HEALTHY" for proxy in state["proxies"].values()):
                return
            reason = "no node listens yet"
        if application["status"] == "DEPLOY_FAILED":
            raise ClusterError(f"{spec.name} cannot start: {reason}")
        running = sum(item["state"] == "RUNNING" for item in details["replicas"])
        line = f"replicas  {running} of {spec.replicas} running" + (f"; {reason}" if reason else "")
        if line != said:
            write(line)
            said = line
    raise ClusterError(f"{spec.name} has not started within {READY_S:g} s: {said}")


def _run_job(dashboard: Dashboard, task: str, upload: Upload, runtime_env: Mapping[str, Any], **fields: Any) -> None:
    environment = {TASK: json.dumps({"do": task, **fields})}
    spec = JobSpec(["python", "-m", replica.__name__], upload, environment, {"mlx": "serve"}, runtime_env)
    answer = dashboard.ask("mlx-serve", spec, marker=MARKER, timeout_s=JOB_S)
    if problem := answer.get("error"):
        raise ClusterError(problem)
