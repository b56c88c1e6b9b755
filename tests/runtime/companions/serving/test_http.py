"""Models answer over real HTTP on this machine: within limits, and to hostile requests."""

import asyncio
import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from faults import wait_for
from hostile import BROKEN_JSON
from starlette.exceptions import HTTPException

from mlx_runtime.companions.serving.http.access import Access, digest_of
from mlx_runtime.companions.serving.http.application import Application
from mlx_runtime.companions.serving.http.bodies import MAX_VALUES, parse
from mlx_runtime.companions.serving.http.limits import Limits
from mlx_runtime.companions.serving.http.server import Server
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.serving.schema import Column, Schema

pytestmark = pytest.mark.process

JSON = "application/json"

SCHEMA = Schema(
    (Column("image", "float32", (2, 3)),), ("label",), {"image": torch.arange(12, dtype=torch.float32).reshape(2, 2, 3)}
)

Serve = Callable[..., "Client"]


class Client:
    """Requests to a server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def ask(
        self, method: str, path: str, body: bytes | str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def predict(self, rows: Any, path: str = "/predict") -> tuple[int, Any]:
        status, _, body = self.ask("POST", path, json.dumps({"rows": rows}), Content_Type=JSON)
        return status, json.loads(body)

    def raw(self, text: bytes, *, timeout_s: float = 60) -> bytes:
        """Send bytes, and return everything that comes back until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=timeout_s) as connection:
            connection.sendall(text)
            answer = b""
            try:
                while piece := connection.recv(1 << 16):
                    answer += piece
            except (TimeoutError, ConnectionResetError):
                pass
            return answer


def model(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of several types. It fails on batches with the number 13."""
    image = batch["image"]
    if (image == 13).any():
        raise ValueError("no 13, please")
    return {"total": image.sum(dim=(1, 2)), "twice": image * 2, "largest": image.flatten(1).argmax(dim=1)}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(function)` serves a model until the end of the test."""
    with ExitStack() as servers:

        def start(
            function: Any = model, schema: Schema = SCHEMA, limits: Limits = Limits(), access: Access = Access()
        ) -> Client:
            models = {"first": Predictor(function, schema, "x/run_001 <b>"), "second": Predictor(function, schema, "y")}
            server = Server(Application(models, limits, access))
            servers.enter_context(server)
            return Client(server)

        yield start


ONE_ROW = json.dumps({"rows": [{"image": [[1, 2, 3], [4, 5, 6]]}]})


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 2, 3, generator=torch.Generator().manual_seed(seed))


def test_answers_are_those_of_the_predictor(serve: Serve) -> None:
    client, rows = serve(), images(5)
    expected = Predictor(model, SCHEMA, "x")({"image": rows})
    for path in ("/predict", "/models/first/predict", "/models/second/predict"):
        status, answer = client.predict([{"image": row.tolist(), "label": "ignored"} for row in rows], path)
        assert status == 200
        for name, value in expected.items():
            assert torch.equal(torch.tensor([row[name] for row in answer["outputs"]], dtype=value.dtype), value)
    assert client.predict([]) == (200, {"outputs": []})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_a_row_that_fails_has_an_error_in_its_place(serve: Serve, error: type[BaseException]) -> None:
    def function(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if (batch["image"] == 13).any():
            raise error("no 13, please")
        return model(batch)

    client = serve(function, limits=Limits(timeout_s=5))
    good, poison = {"image": [[1, 2, 3], [4, 5, 6]]}, {"image": [[13, 0, 0], [0, 0, 0]]}
    status, answer = client.predict([good, {"image": [1]}, poison, {}, 5, good])
    assert status == 200
    assert [row.get("total") for row in answer["outputs"]] == [21, None, None, None, None, 21]
    errors = [row.get("error", "") for row in answer["outputs"]]
    assert errors[1] == "image has shape (1,); expected float32 (2, 3)"
    assert errors[2].startswith(f"predict failed: {error.__name__}: no 13, please (serving/test_http.py:")
    assert errors[3] == "image is missing; expected float32 (2, 3)"
    assert client.predict([{}, {"image": [["a"]]}])[0] == 422
    assert client.predict([poison])[0] == 500
    assert client.predict([poison, {}])[0] == 500


def test_rows_of_different_lengths_and_texts(serve: Serve) -> None:
    """They are computed in separate batches, and their answers keep the order of the rows."""
    seen = []

    def function(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        seen.append(batch["tokens"].shape)
        lengths = torch.tensor([len(text) for text in batch["text"]])
        return {"sum": batch["tokens"].sum(dim=1), "length": lengths, "echo": batch["tokens"]}

    schema = Schema((Column("tokens", "int64", (None,)), Column("text", "string")))
    client = serve(function, schema)
    rows = [{"tokens": list(range(n)), "text": "x" * n} for n in (1, 3, 1, 2, 3)]
    status, answer = client.predict(rows)
    assert status == 200
    assert [row["sum"] for row in answer["outputs"]] == [0, 3, 0, 1, 3]
    assert [row["length"] for row in answer["outputs"]] == [1, 3, 1, 2, 3]
    assert sorted(seen) == [(1, 2), (2, 1), (2, 3)]
    assert [row["echo"] for row in answer["outputs"]] == [row["tokens"] for row in rows]


def test_requests_that_wait_are_computed_together(serve: Serve) -> None:
    """One with a poisonous row does not spoil the others of its batch."""
    sizes, entered, release = [], threading.Event(), threading.Event()

    def function(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes.append(len(batch["image"]))
        entered.set()
        release.wait(60)
        return model(batch)

    client = serve(function, limits=Limits(max_batch=16, timeout_s=120))
    with ThreadPoolExecutor(30) as pool:
        first = pool.submit(client.predict, [{"image": images(1)[0].tolist()}])
        assert entered.wait(60)
        values = [13 if number == 20 else number for number in range(14, 34)]
        rest = [pool.submit(client.predict, [{"image": [[value, 0, 0], [0, 0, 0]]}]) for value in values]
        wait_for(lambda: client.server.app.batchers["first"].rows == 21, 60)
        release.set()
        assert first.result()[0] == 200
        answers = [future.result() for future in rest]
    assert sizes[:2] == [1, 16]
    totals = [answer["outputs"][0].get("total") for _, answer in answers]
    assert totals == [None if value == 13 else value for value in values]


@pytest.fixture
def blocked(serve: Serve) -> Iterator[tuple[Client, threading.Event]]:
    """A server whose first model is computing until the event is set, with room for two more rows.

    Before, it has answered many rows quickly.
    """
    entered, release = threading.Event(), threading.Event()

    def function(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if batch["image"].any():
            entered.set()
            release.wait()
        return model(batch)

    client = serve(function, limits=Limits(max_queue=3, timeout_s=600))
    for _ in range(60):
        assert client.predict([{"image": [[0, 0, 0], [0, 0, 0]]}])[0] == 200
    thread = threading.Thread(target=client.ask, args=("POST", "/predict", ONE_ROW), kwargs={"Content_Type": JSON})
    thread.start()
    assert entered.wait(60)
    yield client, release
    release.set()
    thread.join()


def test_a_full_queue_refuses_and_a_slow_model_times_out(blocked: tuple[Client, threading.Event]) -> None:
    client, release = blocked
    app, ask = client.server.app, partial(client.ask, "POST", "/predict", ONE_ROW, Content_Type=JSON)
    assert client.ask("GET", "/healthz")[0] == 200
    assert client.predict([{"image": [[0, 0, 0], [0, 0, 0]]}], "/models/second/predict")[0] == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        wait_for(lambda: app.batchers["first"].rows == 2, 60)
        app.limits = replace(app.limits, timeout_s=0.2)
        assert ask()[0] == 503
        status, headers, body = ask()  # both wait until the model has computed its batch
        assert (status, headers["retry-after"]) == (429, "1"), body
        assert client.ask("GET", "/healthz")[0] == 503  # it has been computing for longer than a request may take
        app.limits = replace(app.limits, timeout_s=600)
        assert client.ask("GET", "/healthz")[0] == 200
        release.set()
        assert waiting.result()[0] == 200
    assert ask()[0] == 200


def test_limits_of_bodies(serve: Serve) -> None:
    client = serve(limits=Limits(max_body=10_000, max_rows=3))
    row = {"image": [[0, 0, 0], [0, 0, 0]]}
    assert client.predict([row] * 3)[0] == 200
    assert client.predict([row] * 4) == (413, {"error": "4 rows; a request may have 3"})
    assert client.ask("POST", "/predict", b" " * 10_001, Content_Type=JSON)[0] == 413
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert b" 413 " in client.raw(
        head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"1000\r\n" + b" " * 4096 + b"\r\n") * 4
    )
    assert client.ask("POST", "/predict", b"{}", Content_Type="text/plain")[0] == 415
    assert client.ask("GET", "/predict")[0] == 405
    assert client.ask("GET", "/models/third/predict")[0] == 404
    status, _, body = client.ask("GET", "/predictions")
    assert status == 404
    assert body.startswith(b'{"error": "there is no \'/predictions\'; there are /predict, /example, ')


def test_values_are_counted_before_they_become_objects() -> None:
    """5 million empty lists in 15 MB of JSON froze the server for 9 s."""
    schema = Schema((Column("v", "float32", (None, None)),))
    row = b'{"rows": [{"v": [[%s]]}]}'
    pictures = 7 * 3 * 224 * 224
    (part,), _ = parse(schema, row % b",".join([b"1"] * pictures), 1024, 32)
    assert part.batch["v"].shape == (1, 1, pictures)
    with pytest.raises(HTTPException, match=f", of at most {MAX_VALUES:,}; send fewer rows") as raised:
        parse(schema, row % b",".join([b"[]"] * (MAX_VALUES // 5)), 1024, 32)
    assert raised.value.status_code == 413


def test_a_body_that_is_expensive_to_parse_does_not_stop_others(serve: Serve) -> None:
    client = serve(lambda batch: {"first": batch["v"][:, 0]}, Schema((Column("v", "float32", (None,)),)))
    body = b'{"rows": [{"v": [%s, null]}]}' % b",".join([b"1"] * (MAX_VALUES // 2))
    durations: dict[str, list[float]] = {"/predict": [], "/healthz": []}

    def ask(method: str, path: str, status: int, body: bytes | None = None) -> None:
        began = time.monotonic()
        assert client.ask(method, path, body, Content_Type=JSON)[0] == status
        durations[path].append(time.monotonic() - began)

    ask("POST", "/predict", 422, body)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(ask, "POST", "/predict", 422, body) for _ in range(3)]
        while not all(future.done() for future in waiting):
            ask("GET", "/healthz", 200)
    assert max(durations["/healthz"]) < durations["/predict"][0]


def test_a_body_that_never_arrives_is_given_up(serve: Serve) -> None:
    client = serve(limits=Limits(timeout_s=0.5))
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert b" 503 " in client.raw(head + b"Content-Length: 100\r\n\r\n{")


def test_other_sites_and_programs_without_the_token_are_refused(serve: Serve) -> None:
    client = serve()
    assert client.ask("GET", "/healthz", Host="evil.example")[0] == 403
    assert client.ask("GET", "/schema", Origin="http://evil.example")[0] == 403
    assert client.ask("GET", "/schema", Origin="null")[0] == 403
    assert client.ask("GET", "/schema", Origin=client.server.url)[0] == 200
    client = serve(access=Access(digest_of("secret"), hosts=None))
    assert client.ask("GET", "/healthz", Host="models.example")[0] == 200
    for path in ("/schema", "/predict", "/nothing"):
        assert client.ask("GET", path)[0] == 401
        status, _, answer = client.ask("GET", path, Authorization="Bearer Secret")
        assert (status, b"not that of this server" in answer) == (401, True)
    assert client.ask("GET", "/schema", Authorization="Bearer secret")[0] == 200


def test_documents(serve: Serve) -> None:
    client = serve()
    schema = json.loads(client.ask("GET", "/schema")[2])["models"]["first"]
    assert schema["columns"] == {"image": {"dtype": "float32", "shape": [2, 3]}}
    assert schema["examples"][1] == {"image": [[6, 7, 8], [9, 10, 11]]}
    assert client.ask("POST", "/predict", client.ask("GET", "/example")[2], Content_Type=JSON)[0] == 200
    assert "/models/first/predict" in json.loads(client.ask("GET", "/openapi.json")[2])["paths"]


def test_numbers_outside_of_their_type_and_texts_in_lists_are_refused(serve: Serve) -> None:
    """A long text among short ones must not make NumPy allocate its length for each of them."""
    client = serve(lambda batch: {"same": batch["count"]}, Schema((Column("count", "int64", (None,)),)))
    status, answer = client.predict([{"count": [2**63]}, {"count": [2**62]}, {"count": [-(2**63), 2**63]}])
    assert status == 200
    assert [row.get("same") for row in answer["outputs"]] == [None, [2**62], None]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert client.predict([{"count": ["x" * 100_000, *[""] * 20_000]}])[0] == 422  # 8 GB as an array
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def hostile_bodies() -> Iterator[bytes]:
    """Bodies that are not rows."""
    yield from BROKEN_JSON
    for value in ("NaN", "1e999", "9" * 400, '"x"', "{}", str(2**63), "[" * 900 + "]" * 900):
        yield b'{"rows": [{"image": %s}]}' % value.encode()
    yield b'{"rows": [{"image": [["%s"%s]]}]}' % (b"x" * 10_000, b', ""' * 2_000)
    yield b'{"rows": [{"image": %snull%s}]}' % (b"[" * 900, b"]" * 900)
    yield b'{"rows": [{"%s": 1}]}' % (b"x" * 10_000)
    yield b'{"rows": [{"image": 1, "image": [[1]]}]}'
    yield b'{"rows": {"image": 1}, "rows": 5}'
    yield b"\x1f\x8b\x08\x00" + b"x" * 100


def test_hostile_requests_are_refused_in_one_line_with_constant_memory(serve: Serve) -> None:
    client = serve()
    bodies = list(hostile_bodies())
    for round_ in range(3):
        for body in bodies:
            status, _, answer = client.ask("POST", "/predict", body, Content_Type=JSON)
            document = json.loads(answer)
            assert status in (200, 400, 413, 422), (status, body[:200], answer)
            lines = [document.get("error", ""), *(row.get("error", "") for row in document.get("outputs", ()))]
            assert all("\n" not in line and "Traceback" not in line and len(line) < 500 for line in lines)
        if round_ == 0:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for text in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        assert b" 4" in client.raw(text)[:20]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # kB
    assert client.predict([{"image": [[1, 2, 3], [4, 5, 6]]}])[0] == 200
