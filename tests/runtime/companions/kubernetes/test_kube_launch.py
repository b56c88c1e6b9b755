"""`mlx train launch --kube`: printed manifests, and those that kubectl applies, with its checks and refusals."""

import os
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

from mlx_runtime.companions.jobs import launching
from mlx_runtime.companions.kubernetes.kubectl import Kubectl, client_of, job_statuses
from mlx_runtime.companions.kubernetes.launch import check_options
from mlx_runtime.companions.kubernetes.manifest import Pods
from mlx_runtime.errors import ClusterError

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
        done = launch("--sweep", *IMAGE, "--dry-run", *words, MLX_STORAGE="s3://bucket/b")  # an override replaces it
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
        shown = (ROOT / "docs" / "examples" / "rayjob.yaml").read_text()
        assert command is not None
        printed = launch(*shlex.split(command[1].replace("\\\n", " "))).stdout
        name = yaml.safe_load(printed)["metadata"]["name"]
        assert shown == printed.replace(name, "digits-4f1c9a")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((*IMAGE, "--memory", "4"), 2, "'4' is not an amount of memory; write 4Gi"),
        ((*IMAGE, "--template", "pods.yaml"), 1, "error: --template: cannot read pods.yaml: [Errno 2] No such file"),
        ((*IMAGE, "--clam"), 2, "there is no option --clam"),
        (
            (*IMAGE, "--claim", "runs", "+cfg.runtime_env={env_vars: {HF_TOKEN: hf_abcdefghijklmnopqrstuvwx}}"),
            1,
            "FAIL  secrets    cfg.runtime_env.env_vars.HF_TOKEN",
        ),
        (
            (*IMAGE, "--claim", "runs", "+cfg.runtime_env={pip: requirements.txt}"),
            1,
            "cfg.runtime_env.pip is not supported on Kubernetes; install packages in the image",
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
        (
            {},
            "/mnt/runs",
            (),
            "FAIL  storage    /mnt/runs would be deleted with the pods. Name a PersistentVolumeClaim with",
        ),
        ({"image": "a/digits"}, "s3://b/a", (), "FAIL  image      a/digits has no version tag. Tag each build"),
        (
            {},
            "s3://b/a",
            ("KEY",),
            "FAIL  secrets    no Secret was passed for KEY in cfg.secrets. Create one: kubectl create",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], root: str, secrets: tuple[str, ...], line: str) -> None:
    checks = check_options(Pods(**{"image": "a:1", **options}), root, secrets)
    found = [check.line() for check in checks if not check.ok]
    assert len(found) == 1
    assert found[0].startswith(line)


PROGRAM = """\
#!/usr/bin/env -S python3 -IS
import json, pathlib, subprocess, sys
root, words = pathlib.Path({root!r}), sys.argv[1:]
if (root / "busy").exists():
    (root / "busy").unlink()
    sys.exit("Unable to connect to the server: i/o timeout")
if (root / "deleted").exists():
    sys.exit('Error from server (NotFound): rayjobs.ray.io "a-1" not found')
if "get" in words and "rayjob/a-1" in words:
    ended = (root / "ended").exists()
    print(json.dumps({{"status": {{"jobDeploymentStatus": "Complete" if ended else "Running"}}}}))
elif "get" in words:
    assert "--selector=mlx-runtime/job=a-1,ray.io/node-type=head" in words
    print("".join(f"pod/{{pod.name}}\\n" for pod in root.glob("head-*")))
else:
    pod, file, start = words[words.index("exec") + 1], words[-2], words[-1]
    assert file == "/tmp/ray/session_latest/logs/job-driver-a-1.log"
    script = words[words.index("-c") + 1]
    log = root / pod.removeprefix("pod/")
    sys.exit(subprocess.run(["/bin/sh", "-c", script, "sh", log, start]).returncode)
"""
"""A kubectl whose pods are files with the output of the job."""


@pytest.mark.pure
def test_the_output_of_a_job_is_followed_also_in_the_pod_of_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(PROGRAM.format(root=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launching, "FOLLOW_S", 0.0)
    written = list[str]()

    def write(text: str) -> None:
        """Let the driver print more, then KubeRay start the job again."""
        written.append(text)
        if text == "one\n":
            first.write_text("one\ntwo é\n")
        elif text == "two é\n":
            first.unlink()
            (tmp_path / "busy").touch()
            (tmp_path / "head-2").write_text("resuming\n")
            (tmp_path / "ended").touch()

    client = Kubectl()
    with pytest.raises(ClusterError, match="no output of a-1 yet, or no more"):
        client.log("a-1")
    (first := tmp_path / "head-1").write_text("one\n")
    assert client.follow("a-1", write).exit_code == 0
    assert written == ["one\n", "two é\n", "resuming\n"]
    assert client.log("a-1") == "resuming\n"
    monkeypatch.setattr(Kubectl, "read", lambda *_: (tmp_path / "deleted").touch() or b"")
    (tmp_path / "ended").unlink()
    with pytest.raises(ClusterError, match="NotFound"):  # at once
        client.follow("a-1", write)


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
        assert found == ["config", "secrets", "image", "cluster"]
        assert len(server.jobs) == before

    def test_a_namespace_that_does_not_exist(
        self, launch: Launch, server: ApiServer, kubeconfig: dict[str, str]
    ) -> None:
        before = len(server.jobs)
        done = launch(*IMAGE, "--namespace", "tema", "--claim", "runs", **kubeconfig)
        assert (done.returncode, done.stdout, len(server.jobs)) == (1, "", before)
        assert (
            'FAIL  cluster    rejected the job: (NotFound): error when creating "STDIN": namespaces "tema" not'
            in done.stderr
        )
        assert done.stderr.endswith("error: preflight failed: 1 check, see above\n")

    @pytest.mark.parametrize(
        ("status", "ours"),
        [
            ({"jobDeploymentStatus": "Retrying", "jobStatus": "FAILED"}, "PENDING (Retrying)"),
            ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "STOPPED"),
        ],
    )
    def test_states_of_jobs(self, server: ApiServer, status: dict[str, str], ours: str) -> None:
        """A job of a record, which may name one that is gone, or something else."""
        path = "/apis/ray.io/v1/namespaces/team/rayjobs/a-1"
        server.objects[path] = {**named("RayJob", "a-1", status=status), "apiVersion": "ray.io/v1"}
        keys = {("kube://team/a-1", "a-1"), ("kube://team/gone", "gone"), ("kube://other/a-1", "a-1")}
        assert job_statuses(keys) == {("kube://team/a-1", "a-1"): ours}
        client = client_of({"id": "a-1", "address": "kube://team/a-1"}, alive=True)
        assert client is not None
        assert str(client.state("a-1")) == ours
        for job in ("gone", "--help"):
            assert client_of({"id": job, "address": "kube://team/a-1"}, alive=True) is None
        client.stop("a-1")
        assert path not in server.objects
