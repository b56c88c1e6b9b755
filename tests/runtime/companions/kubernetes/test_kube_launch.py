"""`mlx train launch --kube`: printed manifests, and those that kubectl applies, with its checks and refusals."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Mlx
from kube import ApiServer, problems
from packages import install

from mlx_runtime.companions.kubernetes.kubectl import Kubectl
from mlx_runtime.companions.kubernetes.manifest import Pods
from mlx_runtime.companions.kubernetes.preflight import check_cluster, check_options

pytestmark = pytest.mark.process

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

IMAGE = ("--image", "registry/digits:1")


def named(kind: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **fields}


OBJECTS = {
    "namespaces/team": named("Namespace", "team"),
    "namespaces/team/secrets/keys": named("Secret", "keys", data={"WANDB_API_KEY": "c2VjcmV0LXZhbHVl"}),
    "namespaces/team/persistentvolumeclaims/runs": named(
        "PersistentVolumeClaim", "runs", spec={"accessModes": ["ReadWriteMany"]}, status={"phase": "Bound"}
    ),
    "namespaces/team/persistentvolumeclaims/disk": named(
        "PersistentVolumeClaim", "disk", spec={"accessModes": ["ReadWriteOnce"]}, status={"phase": "Bound"}
    ),
}


@pytest.fixture(scope="module")
def launch(mlx: Mlx, bound: Path) -> Launch:
    """`launch(...)` types `mlx train launch --kube ...` in an experiment."""

    def run(*words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
        return mlx(bound, "train", "launch", "--kube", *words, **settings)

    return run


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(OBJECTS) as server:
        yield server


class TestPrinted:
    """`--dry-run` needs neither a cluster nor kubectl."""

    def test_a_run(self, launch: Launch) -> None:
        done = launch("--claim", "runs", "--dry-run", "optimizers.adam.lr=1e-3", MLX_KUBE_IMAGE="registry/digits:2")
        assert done.returncode == 0, done.stderr
        found = yaml.safe_load(done.stdout)
        assert problems(found) == []
        module = "mlx_runtime.companions.kubernetes.driver"
        assert found["spec"]["entrypoint"] == f"python -u -m {module} run_ /mnt/runs digits optimizers.adam.lr=1e-3"
        (container,) = found["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        assert container["image"] == "registry/digits:2"
        assert done.stderr == "note      the pods have no GPUs; cfg.use_gpu=true requests them\n"

    def test_only_the_manifest_is_printed(self, digits: Path, mlx: Mlx) -> None:
        """`bind` runs first, if there is no conf.yaml."""
        (digits / "src" / "conf.yaml").unlink()
        (digits / "src" / "tools.py").open("a").write('print("imported")\n')
        done = mlx(digits, "train", "launch", "--kube", *IMAGE, "--claim", "runs", "--dry-run")
        assert done.stdout.startswith("apiVersion: ray.io/v1\n"), done.stderr
        assert "wrote src/conf.yaml\n" in done.stderr
        assert "imported\n" in done.stderr

    def test_a_sweep(self, launch: Launch) -> None:
        words = ("optimizers.adam.lr=1e-3,1e-2", "--parallel", "2", "--name", "lr", "cfg.storage_path=s3://bucket/a")
        done = launch("--sweep", *IMAGE, "--dry-run", *words)
        assert done.returncode == 0, done.stderr
        found = yaml.safe_load(done.stdout)
        assert problems(found) == []
        assert found["metadata"]["name"].startswith("digits-lr-")
        words = "sweep_ s3://bucket/a digits optimizers.adam.lr=1e-3,1e-2"
        assert f".driver {words} " in found["spec"]["entrypoint"]
        assert " --parallel=2 " in found["spec"]["entrypoint"]
        assert found["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 4

    def test_the_guide_shows_it(self, launch: Launch) -> None:
        page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
        command = re.search(r"mlx train launch --kube ([^`]*--dry-run[^`]*) > digits.yaml", page)
        shown = re.search(r"```yaml\n(apiVersion.*?)```", page, re.DOTALL)
        assert command is not None
        assert shown is not None
        printed = launch(*shlex.split(command[1].replace("\\\n", " "))).stdout
        name = yaml.safe_load(printed)["metadata"]["name"]
        assert shown[1] == printed.replace(name, "digits-4f1c9a")

    def test_options_are_listed(self, launch: Launch) -> None:
        """The guide names all of them."""
        done = launch("--", "--help")
        assert done.returncode == 0
        assert "MLX_KUBE_IMAGE" in done.stdout
        page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
        options = {*re.findall(r"--[a-z][a-z-]+", done.stdout)} - {"--kube", "--sweep", "--help", "--service-account"}
        assert {option for option in options if f"`{option}" not in page} == set()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--claim", "runs"), 2, "Missing option '--image'"),
        ((*IMAGE, "--grace", "10s"), 2, "10s is too short for a checkpoint; the minimum is 30s"),
        ((*IMAGE, "--memory", "4"), 2, "'4' is not an amount of memory; write 4Gi"),
        ((*IMAGE, "--node", "gpus"), 2, "'gpus' is not a label; write KEY=VALUE"),
        ((*IMAGE, "--pip"), 2, "--pip is for a running cluster of Ray"),
        ((*IMAGE, "--clam"), 2, "there is no option --clam"),
        (
            (*IMAGE, "--claim", "runs", "+cfg.runtime_env={env_vars: {HF_TOKEN: hf_abcdefghijklmnopqrstuvwx}}"),
            1,
            "FAIL  secrets    cfg.runtime_env.env_vars.HF_TOKEN",
        ),
        (
            (*IMAGE, "--claim", "runs", "+cfg.runtime_env={pip: requirements.txt}"),
            1,
            "cfg.runtime_env.pip is requirements.txt, a file of this machine; install it in the image",
        ),
    ],
)
def test_bad_input_gets_one_line(launch: Launch, words: tuple[str, ...], code: int, message: str) -> None:
    done = launch("--dry-run", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "hf_abc" not in done.stderr


@pytest.mark.pure
@pytest.mark.parametrize(
    ("options", "root", "secrets", "line"),
    [
        ({}, "/mnt/runs", (), "FAIL  storage    /mnt/runs would end with the pods. Name a PersistentVolumeClaim with"),
        ({"image": "a/digits"}, "s3://b/a", (), "FAIL  image      a/digits names no version. Tag each build"),
        ({"image": "a:5000/digits:latest"}, "s3://b/a", (), "FAIL  image      a:5000/digits:latest names no version"),
        ({"claim": "runs"}, "s3://b/a", (), "FAIL  storage    s3://b/a is not on the claim runs. Leave out --claim"),
        ({}, "s3://b/a", ("KEY",), "FAIL  secrets    no Secret holds KEY of cfg.secrets. Create one: kubectl create"),
        ({"image": "a/digits@sha256:0"}, "s3://b/a", (), "ok    image      a/digits@sha256:0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], root: str, secrets: tuple[str, ...], line: str) -> None:
    checks = check_options(Pods(**{"image": "a:1", **options}), root, secrets)
    found = [check.line() for check in checks if not check.ok or options.get("image", "").count("@")]
    assert len(found) == 1
    assert found[0].startswith(line)


class TestApplied:
    """With kubectl and an API server."""

    @pytest.fixture(autouse=True)
    def kubeconfig(self, server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        """The variable by which kubectl finds the server."""
        install(["kubernetes-client"], ["kubectl"])
        config = {"KUBECONFIG": str(server.write_config(tmp_path / "config"))}
        for name, value in {**config, "HOME": str(tmp_path)}.items():  # its caches are in the home
            monkeypatch.setenv(name, value)
        return config

    def test_a_run(self, launch: Launch, server: ApiServer, kubeconfig: dict[str, str]) -> None:
        options = (*IMAGE, "--namespace", "team", "--claim", "runs", "--secret", "keys")
        done = launch(*options, "cfg.secrets=[WANDB_API_KEY]", **kubeconfig)
        assert done.returncode == 0, done.stderr
        (job,) = server.jobs
        name = job["metadata"]["name"]
        lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
        assert (lines["job"], lines["status"]) == (name, "PENDING")
        assert lines["folder"] == "/mnt/runs on the claim runs"
        assert lines["state"] == f"kubectl --namespace=team get rayjob {name}"
        assert "secret-value" not in str(job) + done.stdout + done.stderr
        assert "c2VjcmV0LXZhbHVl" not in str(job)

    def test_check_prints_everything_and_applies_nothing(
        self, launch: Launch, server: ApiServer, kubeconfig: dict[str, str]
    ) -> None:
        before = len(server.jobs)
        done = launch(*IMAGE, "--namespace", "team", "--claim", "runs", "--check", **kubeconfig)
        assert done.returncode == 0, done.stderr
        found = [line.split(None, 2)[1] for line in done.stderr.splitlines() if line.startswith("ok ")]
        assert found == ["config", "secrets", "image", "cluster", "kuberay", "claim", "manifest"]
        assert len(server.jobs) == before

    def test_a_namespace_that_does_not_exist(
        self, launch: Launch, server: ApiServer, kubeconfig: dict[str, str]
    ) -> None:
        before = len(server.jobs)
        done = launch(*IMAGE, "--namespace", "tema", "--claim", "runs", **kubeconfig)
        assert (done.returncode, done.stdout, len(server.jobs)) == (1, "", before)
        cure = "there is no namespace tema. Create it: kubectl create namespace tema"
        assert f"FAIL  namespace  {cure}\n" in done.stderr

    @pytest.mark.parametrize(
        ("options", "secrets", "line"),
        [
            ({"claim": "disk"}, (), "FAIL  claim      disk has the access modes ReadWriteOnce. All pods write to"),
            ({"claim": "ruins"}, (), "FAIL  claim      there is no PersistentVolumeClaim ruins. See: kubectl get"),
            ({"secret": ("keys",)}, ("HF_TOKEN",), "FAIL  secrets    HF_TOKEN is no key of keys. Add it to one of"),
            ({"secret": ("kyes",)}, (), "FAIL  secrets    there is no Secret kyes. See: kubectl -n team get secrets"),
            ({"service_account": "me"}, (), "FAIL  serviceaccount there is no serviceaccount me. See: kubectl -n"),
        ],
    )
    def test_missing_objects_are_named(self, options: dict[str, Any], secrets: tuple[str, ...], line: str) -> None:
        assert self.failure(Pods("a:1", namespace="team", **options), secrets).startswith(line)

    def failure(self, pods: Pods, secrets: tuple[str, ...] = (), manifest: str = "") -> str:
        """The only check that fails."""
        kubectl = Kubectl.of(pods.context, pods.namespace)
        (found,) = [check.line() for check in check_cluster(kubectl, pods, secrets, manifest) if not check.ok]
        return found

    def test_a_manifest_with_fields_that_kuberay_lacks(self) -> None:
        job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "a"}, "spec": {"authOptions": {}}}
        found = self.failure(Pods("a:1", namespace="team"), manifest=json.dumps(job))
        assert found.startswith("FAIL  manifest   the cluster rejects it: ")
        assert "authOptions" in found
        assert "Install KubeRay 1.5.1 or newer" in found

    def test_a_cluster_without_kuberay(self, tmp_path: Path) -> None:
        with ApiServer(OBJECTS, kuberay=False) as server:
            server.write_config(tmp_path / "config")
            found = self.failure(Pods("a:1"))
        assert found.startswith("FAIL  kuberay    the cluster has no RayJobs. Install KubeRay 1.5.1 or newer")

    def test_a_cluster_that_does_not_answer(self, tmp_path: Path) -> None:
        with ApiServer(OBJECTS) as server:
            server.write_config(tmp_path / "config")
        found = self.failure(Pods("a:1"))
        assert found.startswith("FAIL  cluster    ")
        assert found.endswith("See: kubectl config get-contexts")

    def test_without_kubectl(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        cure = "install kubectl, or print the manifest with --dry-run, for whoever has it"
        assert self.failure(Pods("a:1")) == f"FAIL  cluster    there is no kubectl on the PATH. {cure}"
