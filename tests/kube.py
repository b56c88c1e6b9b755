"""A cluster of Kubernetes for kubectl: an API server on loopback that knows some objects, and validates RayJobs."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema


def _fields(required: str = "", **fields: Any) -> dict[str, Any]:
    """An object with these fields and no others, as kubectl and the API server treat unknown ones."""
    properties = {name: item if isinstance(item, dict) else {"type": item} for name, item in fields.items()}
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
SECONDS = {"type": "integer", "minimum": 0}
POD_TEMPLATE = {"type": "object"}  # kubernetes-validate has its schema

RAY_JOB = _fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_fields(
        "name",
        name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 47},
        namespace="string",
        labels=TEXTS,
        annotations=TEXTS,
    ),
    spec=_fields(
        backoffLimit=SECONDS,
        entrypoint="string",
        jobId="string",
        metadata=TEXTS,
        rayClusterSpec=_fields(
            "headGroupSpec",
            authOptions=_fields(mode={"enum": ["disabled", "token"]}),
            autoscalerOptions=_fields(version={"enum": ["v1", "v2"]}),
            enableInTreeAutoscaling="boolean",
            headGroupSpec=_fields(
                "rayStartParams template",
                rayStartParams=TEXTS,
                template=POD_TEMPLATE,
            ),
            rayVersion="string",
            workerGroupSpecs={
                "type": "array",
                "items": _fields(
                    "groupName maxReplicas minReplicas rayStartParams template",
                    groupName="string",
                    maxReplicas=SECONDS,
                    minReplicas=SECONDS,
                    rayStartParams=TEXTS,
                    replicas=SECONDS,
                    template=POD_TEMPLATE,
                ),
            },
        ),
        runtimeEnvYAML="string",
        shutdownAfterJobFinishes="boolean",
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        ttlSecondsAfterFinished=SECONDS,
    ),
)
"""Fields of a RayJob in KubeRay 1.7.0, with the types and limits of its CRD and of the operator's own checks.

Source: docs/reference/api.md and ray-operator/controllers/ray/utils/validation.go of ray-project/kuberay. Fields of
the CRD that no manifest of ours could have are left out.
"""


def problems(job: Mapping[str, Any]) -> list[str]:
    """Return what KubeRay would reject in a RayJob."""
    found = [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(RAY_JOB).iter_errors(job)
    ]
    spec = job["spec"]
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        found.append("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
    return found


class ApiServer:
    """An API server that answers kubectl, with objects by path, like `namespaces/team/secrets/keys`.

    It stores the RayJobs that are applied, and validates them strictly, like a server with KubeRay's CRD.
    """

    def __init__(self, objects: Mapping[str, Mapping[str, Any]]) -> None:
        self.objects: dict[str, Any] = {f"/api/v1/{path}": dict(item) for path, item in objects.items()}

    def __enter__(self) -> "ApiServer":
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*outer.read(self.path.partition("?")[0]))

            def do_DELETE(self) -> None:
                found = outer.objects.pop(self.path.partition("?")[0], None)
                self.answer(*((200, found) if found is not None else (404, _failure(404, "NotFound", "not found"))))

            def do_POST(self) -> None:
                path, _, query = self.path.partition("?")
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(*outer.create(path, query, body))

            def answer(self, code: int, content: Mapping[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def write_config(self, file: Path) -> Path:
        """Write a kubeconfig for this cluster."""
        cluster = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
        user = {"name": "test", "user": {}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": [user]}
        file.write_text(json.dumps(config | {"current-context": "test"}))
        return file

    def read(self, path: str) -> tuple[int, Mapping[str, Any]]:
        group = {"groupVersion": "ray.io/v1", "version": "v1"}
        groups = [{"name": "ray.io", "versions": [group], "preferredVersion": group}]
        known: dict[str, Any] = {
            "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.1"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
            "/api/v1": _resources(
                "v1",
                namespaces="Namespace",
                secrets="Secret",
                persistentvolumeclaims="PersistentVolumeClaim",
                serviceaccounts="ServiceAccount",
            ),
            "/apis/ray.io/v1": _resources("ray.io/v1", rayjobs="RayJob"),
            "/openapi/v3": {"paths": {"apis/ray.io/v1": {"serverRelativeURL": "/openapi/v3/apis/ray.io/v1"}}},
            "/openapi/v3/apis/ray.io/v1": OPENAPI,
        }
        below = [item for name, item in self.objects.items() if name.rpartition("/")[0] == path]
        if path.endswith("/rayjobs"):
            known[path] = {"apiVersion": "ray.io/v1", "kind": "RayJobList", "metadata": {}, "items": below}
        found = known.get(path) or self.objects.get(path)
        return (200, found) if found is not None else (404, _failure(404, "NotFound", f"{path} not found"))

    def create(self, path: str, query: str, job: dict[str, Any]) -> tuple[int, Mapping[str, Any]]:
        job["metadata"].get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
        namespace = path.split("/")[5]
        if namespace != "default" and f"/api/v1/namespaces/{namespace}" not in self.objects:
            return 404, _failure(404, "NotFound", f'namespaces "{namespace}" not found')
        if found := problems(job):
            return 400, _failure(400, "BadRequest", f"strict decoding error: {'; '.join(found)}")
        if "dryRun=All" not in query:
            self.objects[f"{path}/{job['metadata']['name']}"] = job
        return 201, job

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The RayJobs that were applied."""
        return [item for path, item in self.objects.items() if "/rayjobs/" in path]


def _resources(version: str, **kinds: str) -> dict[str, Any]:
    """A list of resources for discovery."""
    verbs = {"verbs": ["create", "delete", "get", "list", "patch"]}
    resources = [
        {"name": name, "singularName": kind.lower(), "namespaced": kind != "Namespace", "kind": kind} | verbs
        for name, kind in kinds.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


def _failure(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "code": code,
        "message": message,
    }


_PATCH = {
    "x-kubernetes-group-version-kind": {"group": "ray.io", "version": "v1", "kind": "RayJob"},
    "parameters": [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in ("dryRun", "fieldValidation")
    ],
    "responses": {},
}
OPENAPI = {
    "openapi": "3.0.0",
    "info": {"title": "Kubernetes", "version": "v1.33.1"},
    "paths": {"/apis/ray.io/v1/namespaces/{namespace}/rayjobs/{name}": {"patch": _PATCH}},
}
"""Tells kubectl that this server validates fields."""
