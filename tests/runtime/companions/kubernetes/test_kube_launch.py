"""`mlx train launch --kube`: printed manifests, and those that kubectl applies, with its checks and refusals."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Mlx
from kube import ApiServer, problems

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
        command = re.search(
            r"^mlx train launch --kube (.*--dry-run .*?) > digits.yaml$", page, re.MULTILINE | re.DOTALL
        )
        shown = re.search(r"```yaml\n(apiVersion.*?)```", page, re.DOTALL)
        assert command is not None
        assert shown is not None
        printed = launch(*shlex.split(command[1])).stdout
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
        ((*IMAGE,), 1, "FAIL  storage    /mnt/runs would end with the pods. Name a PersistentVolumeClaim with --claim"),
        (("--image", "digits", "--claim", "runs"), 1, "FAIL  image      digits names no version. Tag each build"),
        ((*IMAGE, "--claim", "runs", "cfg.storage_path=s3://b/a"), 1, "s3://b/a is not on the claim runs. Leave out"),
        (
            (*IMAGE, "--claim", "runs", "cfg.secrets=[WANDB_API_KEY]"),
            1,
            "FAIL  secrets    no Secret holds WANDB_API_KEY of cfg.secrets. Create one: kubectl create secret",
        ),
        ((*IMAGE, "--claim", "runs", "--grace", "10s"), 2, "10s is too short for a checkpoint; the minimum is 30s"),
        ((*IMAGE, "--claim", "runs", "--memory", "4"), 2, "'4' is not an amount of memory; write 4Gi"),
        ((*IMAGE, "--claim", "runs", "--pip"), 2, "--pip is for a running cluster of Ray"),
        ((*IMAGE, "--claim", "runs", "--clam"), 2, "there is no option --clam"),
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


def test_without_kubectl(launch: Launch, tmp_path: Path) -> None:
    done = launch(*IMAGE, "--claim", "runs", PATH=str(tmp_path))
    assert done.returncode == 1
    cure = "install kubectl, or print the manifest with --dry-run"
    assert f"FAIL  cluster    there is no kubectl on the PATH. {cure}" in done.stderr


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
class TestApplied:
    """With kubectl and an API server."""

    @pytest.fixture(scope="class")
    def server(self) -> Iterator[ApiServer]:
        with ApiServer(OBJECTS) as server:
            yield server

    @pytest.fixture
    def apply(self, server: ApiServer, launch: Launch, tmp_path: Path) -> Launch:
        """`apply(...)` launches with kubectl, and returns the process."""

        def run(*words: str, **settings: str) -> "subprocess.CompletedProcess[str]":
            config = str(server.write_config(tmp_path / "config"))
            return launch(*IMAGE, *words, KUBECONFIG=config, HOME=str(tmp_path), **settings)

        return run

    def test_a_run(self, apply: Launch, server: ApiServer) -> None:
        options = ("--namespace", "team", "--claim", "runs", "--secret", "keys")
        done = apply(*options, "cfg.secrets=[WANDB_API_KEY]")
        assert done.returncode == 0, done.stderr
        (job,) = server.jobs
        name = job["metadata"]["name"]
        lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
        assert (lines["job"], lines["status"]) == (name, "PENDING")
        assert lines["folder"] == "/mnt/runs on the claim runs"
        assert lines["state"] == f"kubectl --namespace=team get rayjob {name}"
        assert "secret-value" not in str(job) + done.stdout + done.stderr
        assert "c2VjcmV0LXZhbHVl" not in str(job)

    def test_check_prints_everything_and_applies_nothing(self, apply: Launch, server: ApiServer) -> None:
        before = len(server.jobs)
        done = apply("--namespace", "team", "--claim", "runs", "--check")
        assert done.returncode == 0, done.stderr
        found = [line.split(None, 2)[1] for line in done.stderr.splitlines() if line.startswith("ok ")]
        assert found == ["config", "secrets", "image", "cluster", "kuberay", "claim", "manifest"]
        assert len(server.jobs) == before

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ("--namespace", "tema", "--claim", "runs"),
                "FAIL  namespace  there is no namespace tema. Create it: kubectl create namespace tema",
            ),
            (
                ("--namespace", "team", "--claim", "disk"),
                "FAIL  claim      disk has the access modes ReadWriteOnce. All pods write to the storage",
            ),
            (("--namespace", "team", "--claim", "ruins"), "FAIL  claim      there is no PersistentVolumeClaim ruins"),
            (
                ("--namespace", "team", "--claim", "runs", "--secret", "keys", "cfg.secrets=[HF_TOKEN]"),
                "FAIL  secrets    HF_TOKEN is no key of keys. Add it to one of them",
            ),
            (
                ("--namespace", "team", "--claim", "runs", "--secret", "kyes"),
                "FAIL  secrets    there is no Secret kyes. See: kubectl -n team get secrets",
            ),
        ],
    )
    def test_missing_objects_are_named(self, apply: Launch, words: tuple[str, ...], message: str) -> None:
        done = apply(*words)
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr

    def test_a_cluster_without_kuberay(self, launch: Launch, tmp_path: Path) -> None:
        with ApiServer(OBJECTS, kuberay=False) as server:
            config = str(server.write_config(tmp_path / "config"))
            done = launch(*IMAGE, "--claim", "runs", KUBECONFIG=config, HOME=str(tmp_path))
        assert (done.returncode, done.stdout) == (1, "")
        assert "FAIL  kuberay    the cluster has no RayJobs. Install KubeRay 1.5.1 or newer" in done.stderr

    def test_a_cluster_that_does_not_answer(self, launch: Launch, tmp_path: Path) -> None:
        with ApiServer(OBJECTS) as server:
            config = str(server.write_config(tmp_path / "config"))
        done = launch(*IMAGE, "--claim", "runs", KUBECONFIG=config, HOME=str(tmp_path))
        assert (done.returncode, done.stdout) == (1, "")
        assert "FAIL  cluster    " in done.stderr
        assert "See: kubectl config get-contexts" in done.stderr
