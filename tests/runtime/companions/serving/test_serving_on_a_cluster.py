"""`mlx serve launch`, and Ray Serve on a head and two raylets on loopback, which need a token.

All tests share the cluster and its application, in the order in which a user would do these things.
"""

import json
import os
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import RayCluster, cluster, free_ports
from conftest import Mlx

from mlx_runtime import open_run

TOKEN = "token-of-the-serve-cluster-0123456789abcdef"
SECRET = "token-of-the-clients-of-the-model"

WAIT_S = 300

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ray_cluster(environment: dict[str, str]) -> Iterator[RayCluster]:
    with cluster(environment, TOKEN) as made:
        yield made


@dataclass
class Model:
    """An experiment with two runs, and the application that serves one of them."""

    folder: Path
    mlx: Callable[..., Any]
    cluster: RayCluster
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/digits"

    def types(self, *words: str, **settings: str) -> Any:
        done = self.mlx(
            self.folder, "serve", *words, "--ray-address", self.cluster.url, RAY_AUTH_TOKEN=TOKEN, **settings
        )
        print(" ".join(words), "->", done.returncode, done.stdout[-3000:], done.stderr[-3000:])
        return done

    def ask(self, path: str, body: bytes | None = None, token: str = SECRET) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=120) as answer:
            return json.load(answer)

    def replicas(self) -> dict[int, str]:
        found = self.cluster.get("/api/serve/applications/")["applications"]["digits"]["deployments"]["digits"]
        return {item["pid"]: item["state"] for item in found["replicas"] if item.get("pid")}

    def expected(self, run: str) -> list[list[float]]:
        """Return the answers of the local predictor to the example rows."""
        predictor = open_run(self.folder / "runs" / "digits" / run).predictor()
        found: list[list[float]] = predictor(predictor.schema.example_rows())["probabilities"].tolist()
        return found


@pytest.fixture(scope="module")
def model(bound: Path, mlx: Mlx, ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("user") / "digits"))
    for seed in (1, 2):
        done = mlx(folder, "train", "run", "cfg.start_workers=0", "cfg.num_epochs=1", f"cfg.seed={seed}")
        assert done.returncode == 0, done.stderr
    return Model(folder, mlx, ray_cluster, free_ports(1)[0])


@pytest.fixture(autouse=True)
def here(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.folder)


@contextmanager
def load(model: Model, allowed: list[list[list[float]]]) -> Iterator[Counter[str]]:
    """Send requests from four clients during the block, and count the answers by number of the model, or `wrong`."""
    rows = json.dumps(
        {"rows": open_run(model.folder / "runs/digits/run_001").predictor().schema.example_rows()}
    ).encode()
    counts: Counter[str] = Counter()
    ended = threading.Event()

    def client() -> None:
        while not ended.is_set():
            try:
                outputs = model.ask("/predict", rows)["outputs"]
                found = torch.tensor([output["probabilities"] for output in outputs])
                same = [
                    str(n) for n, item in enumerate(allowed) if torch.allclose(found, torch.tensor(item), atol=1e-5)
                ]
                counts[same[0] if same else "wrong"] += 1
            except urllib.error.HTTPError as error:
                counts[f"status {error.code}"] += 1
            except OSError as error:
                counts[repr(error)] += 1
            ended.wait(0.1)  # leave the processors to what starts

    threads = [threading.Thread(target=client) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        print(counts)


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < end, f"not within {WAIT_S} s"
        time.sleep(0.2)
    return found


def test_it_answers_like_predict_after_the_command_has_ended(model: Model) -> None:
    done = model.types("launch", "digits", "1", "--replicas", "2", "--port", f"{model.port}", MLX_SERVE_TOKEN=SECRET)
    assert done.returncode == 0
    assert f"url       {model.url}\n" in done.stdout
    assert f"curl -s {model.url}/example" in done.stdout
    until(lambda: sorted(model.replicas().values()) == ["RUNNING", "RUNNING"])
    example = model.ask("/example")
    expected = model.expected("run_001")
    answers = model.ask("/predict", json.dumps(example).encode())["outputs"]
    assert torch.allclose(torch.tensor(answers[0]["probabilities"]), torch.tensor(expected[0]), atol=1e-5)


def test_clients_need_the_token_which_the_cluster_never_sees(model: Model) -> None:
    assert model.ask("/healthz", token="")["status"] == "ok"
    for wrong in ("", "x" * len(SECRET)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            model.ask("/schema", token=wrong)
        assert refused.value.code == 401
    known = json.dumps([model.cluster.get("/api/serve/applications/"), model.cluster.get("/api/jobs/")])
    assert "run_001" in known
    assert SECRET not in known
    read = 0
    for file in model.cluster.folder.rglob("*"):
        if file.is_file() and file.suffix in (".log", ".out", ".err"):
            text = file.read_text(errors="replace")
            read += len(text)
            assert SECRET not in text, file
    assert read > 1000


def test_it_is_listed_and_not_launched_twice(model: Model) -> None:
    done = model.types("ls", "--json")
    (found,) = json.loads(done.stdout)
    assert (found["name"], found["status"], found["running"]) == ("digits", "RUNNING", 2)
    assert found["url"] == model.url
    again = model.types("launch", "digits", "2")
    assert again.returncode == 2
    assert "digits is deployed already; type: mlx serve update digits RUN" in again.stderr
    elsewhere = model.types("launch", "digits", "2", "--route", "/other", "--port", "1")
    assert "Ray Serve listens on" in elsewhere.stderr
    local = model.mlx(model.folder, "serve", "ls", RAY_ADDRESS=model.cluster.url)
    assert f"models on the cluster in RAY_ADDRESS: mlx serve ls --ray-address {model.cluster.url}\n" in local.stderr
    unknown = model.types("stop", "digit")
    assert "there are digits" in unknown.stderr


def test_a_killed_replica_is_replaced_without_a_wrong_answer(model: Model) -> None:
    with load(model, [model.expected("run_001")]) as counts:
        until(lambda: counts["0"] > 20)
        victim = next(iter(model.replicas()))
        os.kill(victim, signal.SIGKILL)
        until(lambda: (found := model.replicas()) and victim not in found and [*found.values()] == ["RUNNING"] * 2)
        before = counts["0"]
        until(lambda: counts["0"] > before + 20)
    failures = {what: count for what, count in counts.items() if what != "0"}
    assert failures.keys() <= {"status 500", "status 503"}, counts
    assert sum(failures.values()) <= 4, counts  # at most what the replica was computing


def test_an_update_drops_no_request(model: Model) -> None:
    both = [model.expected("run_001"), model.expected("run_002")]
    with load(model, both) as counts:
        until(lambda: counts["0"] > 20)
        done = model.types("update", "digits", "2", "--code", "stored")
        assert done.returncode == 0
        before = counts["1"]
        until(lambda: counts["1"] > before + 20)
    assert counts.keys() == {"0", "1"}, counts
    with pytest.raises(urllib.error.HTTPError) as refused:
        model.ask("/schema", token="")
    assert refused.value.code == 401
    assert "run_002" in model.types("ls").stdout


def test_replicas_have_logs(model: Model) -> None:
    assert model.types("logs", "digits").stdout.count("Finished initializing replica") == 2


def test_it_stops(model: Model) -> None:
    assert model.types("stop", "digits").returncode == 0

    def is_refused() -> bool:
        try:
            model.ask("/healthz")
        except urllib.error.URLError as error:
            return "refused" in str(error)
        return False

    until(is_refused)
    until(lambda: model.cluster.get("/api/serve/applications/")["applications"] == {})
    assert model.types("ls").stdout == ""
