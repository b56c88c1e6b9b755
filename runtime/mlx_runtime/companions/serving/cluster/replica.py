"""Replicas of a model in Ray Serve, and the job that deploys or removes them.

The job runs on the head node, and ends when Ray Serve has accepted its task. It prints `MARKER` and a JSON object,
which has the error for the user, if there is one. Only replicas import torch, which takes seconds.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_runtime.companions.serving.http.access import LOOPBACK, Access
from mlx_runtime.companions.serving.http.limits import Limits
from mlx_runtime.errors import MlxError, full_message, short_message
from mlx_runtime.importing import add_to_path
from mlx_runtime.runs.queries import lookup

if TYPE_CHECKING:
    from mlx_runtime.companions.serving.http.application import Application

TASK = "MLX_SERVE_TASK"
"""Variable of the job with its task as JSON."""

OWN_VARIABLES = {TASK, "MLX_JOB", "MLX_JOB_ADDRESS"}
"""Variables of the job that its replicas do not have."""

MARKER = "mlx-serve: "

MAX_ONGOING = 256
"""Requests that a replica answers at the same time. The rows that wait for its model are limited by `Limits`."""

MAX_QUEUED = 1024
"""Requests that wait for a replica, for each proxy; Ray Serve refuses more with the status 503."""

BUSY_REQUESTS = 32
"""Requests per replica from which another one is started, if there may be more."""

START_S = 60.0
"""Time in which a proxy has to start. A busy node would kill and start it repeatedly after Ray's 5 s."""

PROXY_S = 60.0
"""Time in which a request is answered, even if it has to wait for a replica; otherwise its status is 408."""


@dataclass(frozen=True)
class Spec:
    """Model and replicas of an application of Ray Serve, stored there as the `user_config` of its deployment.

    Attributes:
        name: name of the application, and of its model.
        title: name of the run, like `digits/run_003`.
        run: folder or URI of the run.
        checkpoint: name of the checkpoint.
        route: path below which the application answers.
        stored: True if replicas use the code that the run has stored, instead of the uploaded code.
        replicas: replicas, or their minimum.
        max_replicas: their maximum under load; None if their number is fixed.
        gpus: GPUs of each replica.
        digest: `digest_of` the token that requests must have; None for none.
        public: True if requests may come from other machines.
    """

    name: str
    title: str
    run: str
    checkpoint: str
    route: str
    stored: bool = False
    replicas: int = 1
    max_replicas: int | None = None
    gpus: float = 0
    digest: str | None = None
    public: bool = False

    @classmethod
    def parse(cls, document: Any) -> "Spec | None":
        """Return the spec in a `user_config`, or None if it is not one of a model of this package."""
        known = {item.name for item in fields(cls)}
        if (
            not isinstance(document, Mapping)
            or not {"name", "title", "run", "checkpoint", "route"} <= document.keys() <= known
        ):
            return None
        return cls(**document)


class Replica:
    """One process that answers, built by Ray Serve. Its working directory has the code of the experiment."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        from mlx_runtime.companions.serving.http.application import Application
        from mlx_runtime.runs.queries.reader import open_run

        spec = Spec(**document)
        add_to_path(Path.cwd())
        device = "cuda" if spec.gpus else "cpu"  # without GPUs, Ray may not hide those of the node
        predictor = open_run(spec.run).predictor(spec.checkpoint, device=device, trust=spec.stored)
        access = Access(spec.digest, None if spec.public else LOOPBACK)
        self.application = Application({spec.name: predictor}, access=access)

    def __serve_build_asgi_app__(self) -> "Application":
        return self.application

    def reconfigure(self, document: Mapping[str, Any]) -> None:
        """Accept the `user_config`, which Ray Serve only keeps: other models need other replicas."""

    def check_health(self) -> None:
        """Raise if the model has been computing a batch for so long that Ray Serve should replace this replica."""
        for name, batcher in self.application.batchers.items():
            if batcher.busy_s > 2 * self.application.limits.timeout_s:
                raise RuntimeError(f"{name} does not answer")


def deploy(document: Mapping[str, Any], host: str, port: int) -> None:
    """Start replicas, or replace those of an application of this name one by one. Called in the job."""
    spec = Spec(**document)
    try:
        lookup.resolve_run(spec.run)
    except MlxError as error:
        cure = "set MLX_STORAGE to a folder that every node mounts, or to s3://BUCKET/PATH, and train there"
        raise MlxError(f"the cluster cannot read {spec.run}: {short_message(error)}; {cure}") from error
    import ray
    from ray import serve

    environment = dict(ray.get_runtime_context().runtime_env)
    variables = environment.get("env_vars", {})
    environment["env_vars"] = {name: value for name, value in variables.items() if name not in OWN_VARIABLES}

    options = {"host": host, "port": port, "request_timeout_s": PROXY_S}
    patient = {"env_vars": {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(START_S)}}
    try:
        # Other nodes listen for load balancers, which notice that a node is about to stop to listen.
        where = "EveryNode" if spec.public else "HeadOnly"
        serve.start(proxy_location=where, http_options=options, controller_options={"runtime_env": patient})
    except RuntimeError as error:  # of a proxy
        cure = "end Ray Serve, which keeps this port, with `serve shutdown`, and choose another --port"
        raise MlxError(f"the nodes cannot listen on {host}:{port}; {cure}") from error
    number: dict[str, Any] = {"num_replicas": spec.replicas}
    if spec.max_replicas is not None:
        limits = {"min_replicas": spec.replicas, "max_replicas": spec.max_replicas}
        number = {"autoscaling_config": limits | {"target_ongoing_requests": BUSY_REQUESTS}}
    timeout_s = Limits().timeout_s
    deployment = serve.deployment(serve.ingress()(Replica)).options(
        name=spec.name,
        user_config=document,
        ray_actor_options={"num_cpus": 1, "num_gpus": spec.gpus, "runtime_env": environment},
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=MAX_QUEUED,
        max_surge_percent=100,  # a new replica answers before an old one is stopped
        max_constructor_retry_count=2,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=timeout_s + 5,
        health_check_period_s=2,
        health_check_timeout_s=timeout_s,
        logging_config={"enable_access_log": False},  # otherwise, a line per request
        **number,
    )
    target = serve.RunTarget(deployment.bind(document), spec.name, spec.route)
    serve.run_many([target], wait_for_applications_running=False)


def main() -> None:
    """Do the task of this job, and print its result."""
    task = json.loads(os.environ.pop(TASK))
    result = {}
    try:
        import ray
        from ray import serve

        ray.init(log_to_driver=False)
        if task["do"] == "deploy":
            deploy(task["spec"], task["host"], task["port"])
        else:
            serve.delete(task["name"])  # and not Ray Serve: somebody else could be deploying to it
    except MlxError as error:
        result = {"error": full_message(error)}
    print(f"{MARKER}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    main()
