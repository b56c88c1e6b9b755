"""Manifests of RayJobs: valid for KubeRay and Kubernetes, and with the resources that the config asks for."""

import math
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kube import problems

from mlx_runtime.companions.kubernetes.manifest import GRACE_S, Pods, job_name, merge, rayjob
from mlx_runtime.loop.options import TrainConfig
from mlx_runtime.sections import Elastic
from mlx_runtime.storage.documents import to_yaml
from mlx_runtime.workers import stop_requests

pytestmark = pytest.mark.pure

KUBERNETES = "1.33"


def job(
    cfg: TrainConfig | None = None, trials: int | None = None, template: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Return a manifest, as read from its YAML."""
    pods, command = Pods(image="registry/digits:1", **options), ["python", "main.py", "data.path=a b", "$HOME"]
    made = rayjob(
        "digits-1",
        pods,
        cfg or TrainConfig(),
        "/mnt/runs",
        command,
        {"mlx": "train"},
        ray_version="2.60.0",
        trials=trials,
        template=template,
    )
    found: dict[str, Any] = yaml.safe_load(to_yaml(made))
    assert found == made
    return found


def head(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    return found


def workers(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return dict(found)


def sizes(job: dict[str, Any]) -> tuple[int, int, int]:
    group = workers(job)
    return group["minReplicas"], group["replicas"], group["maxReplicas"]


def amounts(template: dict[str, Any]) -> dict[str, str]:
    resources = template["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    return dict(resources["limits"])


TEMPLATE = yaml.safe_load("""
metadata:
  labels: {kueue.x-k8s.io/queue-name: team}
spec:
  backoffLimit: 5
  rayClusterSpec:
    headGroupSpec:
      template:
        spec:
          serviceAccountName: trainer
          imagePullSecrets: [{name: registry}]
""")
EVERYTHING = {"namespace": "team", "claim": "runs", "secret": ("keys", "more-keys"), "template": TEMPLATE}


@pytest.mark.parametrize("options", [{}, EVERYTHING])
@pytest.mark.parametrize(
    "cfg",
    [
        TrainConfig(),
        TrainConfig(start_workers=0),
        TrainConfig(start_workers=4, elastic=Elastic(min_workers=2, max_workers=8)),
        TrainConfig(runtime_env={"pip": ["einops"], "env_vars": {"NCCL_DEBUG": "INFO"}}),
    ],
)
def test_kuberay_and_kubernetes_accept_it(cfg: TrainConfig, options: dict[str, Any]) -> None:
    found = job(cfg, **options)
    assert problems(found) == []
    templates = [
        head(found),
        *(group["template"] for group in found["spec"]["rayClusterSpec"].get("workerGroupSpecs", [])),
    ]
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **{"spec": template["spec"]}}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_workers_of_a_pod_share_it() -> None:
    cfg = TrainConfig(start_workers=6, use_gpu=True, gpus_per_worker=2, cpus_per_worker=3)
    found = job(cfg, workers_per_pod=4, memory="1536Mi")
    assert sizes(found) == (2, 2, 2)
    assert amounts(workers(found)["template"]) == {"cpu": "12", "memory": "6144Mi", "nvidia.com/gpu": "8"}
    assert workers(found)["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert amounts(head(found)) == {"cpu": "1", "memory": "4Gi"}


def test_an_elastic_run_lets_the_cluster_grow() -> None:
    found = job(TrainConfig(start_workers=4, elastic=Elastic(min_workers=2, max_workers=7)), workers_per_pod=2)
    assert sizes(found) == (1, 2, 4)
    assert found["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True
    assert found["spec"]["rayClusterSpec"]["autoscalerOptions"] == {"version": "v2"}


def test_a_run_in_one_process_trains_on_the_head() -> None:
    found = job(TrainConfig(start_workers=0, use_gpu=True, cpus_per_worker=8), memory="16Gi")
    assert "workerGroupSpecs" not in found["spec"]["rayClusterSpec"]
    assert amounts(head(found)) == {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "1"}
    assert head(found)["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_a_sweep_has_room_for_its_trials() -> None:
    assert sizes(job(TrainConfig(start_workers=3), trials=4, workers_per_pod=2)) == (8, 8, 8)
    assert amounts(head(job(trials=2))) == {"cpu": "1", "memory": "5Gi"}
    assert amounts(head(job(trials=40))) == {"cpu": "1", "memory": "9Gi"}


def test_a_template_is_merged_like_by_kubectl() -> None:
    """Mappings by key and lists by name, where null removes; anything else is replaced."""
    template = yaml.safe_load("""
        spec:
          backoffLimit: 5
          ttlSecondsAfterFinished: null
          rayClusterSpec:
            workerGroupSpecs:
            - groupName: workers
              template:
                spec:
                  nodeSelector: {pool: gpus}
                  tolerations: []
                  containers:
                  - name: ray-worker
                    resources: {limits: {nvidia.com/gpu: null, amd.com/gpu: 1}}
                  - {name: sidecar, image: "a:1"}
    """)
    cfg = TrainConfig(use_gpu=True)
    plain, found = job(cfg), job(cfg, template=template)
    assert (found["spec"]["backoffLimit"], "ttlSecondsAfterFinished" in found["spec"]) == (5, False)
    pod, before = workers(found)["template"]["spec"], workers(plain)["template"]["spec"]
    assert (pod["nodeSelector"], pod["tolerations"]) == ({"pool": "gpus"}, [])
    assert pod["containers"][1] == {"name": "sidecar", "image": "a:1"}
    assert pod["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "4Gi", "amd.com/gpu": 1}
    assert pod["containers"][0]["lifecycle"] == before["containers"][0]["lifecycle"]
    assert head(found) == head(plain)
    assert merge({"a": [1]}, {"a": [2], "b": {"c": None}}) == {"a": [2], "b": {}}


@pytest.mark.parametrize("title", ["My_Experiment.v2", "9lives", "x-" * 30])
def test_names_are_labels(title: str) -> None:
    names = {job_name(title) for _ in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 47 for name in names)


def test_a_pod_lives_long_enough_for_a_checkpoint() -> None:
    assert math.ceil(stop_requests.GRACE_S) + 5 <= GRACE_S
