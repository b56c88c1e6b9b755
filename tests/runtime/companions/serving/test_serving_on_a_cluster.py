"""`mlx serve launch`, and Ray Serve on a head and a raylet on loopback, which need a token.

All tests share the cluster and its application, in the order in which a user would do these things.
"""

import json
import shutil
import threading
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
from faults import wait_for

from mlx_runtime import open_run

TOKEN = "token-of-the-serve-cluster-0123456789abcdef"
SECRET = "token-of-the-clients-of-the-model"

FIRST, SECOND = "epoch_0001", "epoch_0002"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ray_cluster(environment: dict[str, str]) -> Iterator[RayCluster]:
    with cluster(environment, TOKEN, raylets=1) as made:
        yield made


@dataclass
class Model:
    """An experiment whose run has two checkpoints, one of which is served."""

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

    def expected(self, checkpoint: str) -> list[list[float]]:
        """Return the answers of the local predictor to the example rows."""
        predictor = open_run(self.folder / "runs/digits/run_001").predictor(checkpoint)
        found: list[list[float]] = predictor(predictor.schema.example_rows())["probabilities"].tolist()
        return found


@pytest.fixture(scope="module")
def model(bound: Path, mlx: Mlx, ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = Path(shutil.copytree(bound, tmp_path_factory.mktemp("user") / "digits"))
    done = mlx(folder, "train", "run", "cfg.start_workers=0", "cfg.num_epochs=2", "cfg.keep_checkpoints=2")
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


def test_it_answers_like_predict_after_the_command_has_ended(model: Model) -> None:
    done = model.types("launch", "digits", "--checkpoint", FIRST, "--port", f"{model.port}", MLX_SERVE_TOKEN=SECRET)
    assert done.returncode == 0
    assert f"url       {model.url}\n" in done.stdout
    assert f"curl -s {model.url}/example" in done.stdout
    example = model.ask("/example")
    expected = model.expected(FIRST)
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


def test_another_launch_replaces_the_model_without_failing_a_request(model: Model) -> None:
    open_to_all = model.types("launch", "digits")
    assert (open_to_all.returncode, "clients of digits need a token: " in open_to_all.stderr) == (2, True)
    both = [model.expected(FIRST), model.expected(SECOND)]
    with load(model, both) as counts:
        wait_for(lambda: counts["0"] > 5)
        done = model.types("launch", "digits", "--checkpoint", SECOND, "--code", "stored", MLX_SERVE_TOKEN=SECRET)
        assert done.returncode == 0
        before = counts["1"]
        wait_for(lambda: counts["1"] > before + 5)
    assert counts.keys() == {"0", "1"}, counts


def test_it_stops_and_leaves_ray_serve_to_others(model: Model) -> None:
    unknown = model.types("stop", "digit")
    assert (unknown.returncode, "there are digits" in unknown.stderr) == (2, True)
    assert model.types("stop", "digits").stdout == "stopped digits\n"
    state = model.cluster.get("/api/serve/applications/")
    assert state["applications"] == {}
    assert [proxy["status"] for proxy in state["proxies"].values()] == ["HEALTHY"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        model.ask("/healthz")
    assert refused.value.code == 404
