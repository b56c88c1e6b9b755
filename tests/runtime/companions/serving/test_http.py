"""Models answer over real HTTP on this machine: in every format, within limits, and to hostile requests."""

import asyncio
import contextlib
import http.client
import io
import json
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from faults import wait_for
from hostile import BROKEN_JSON

from mlx_runtime.companions.serving.http import asgi as interface
from mlx_runtime.companions.serving.http import connections as slow_clients
from mlx_runtime.companions.serving.http import shadow
from mlx_runtime.companions.serving.http.access import Access, digest_of
from mlx_runtime.companions.serving.http.asgi import Limits, application
from mlx_runtime.companions.serving.http.batching import Batcher
from mlx_runtime.companions.serving.http.bodies import MAX_LISTS, MAX_VALUES, Part, RowParser
from mlx_runtime.companions.serving.http.counters import Counters
from mlx_runtime.companions.serving.http.negotiation import BodyError
from mlx_runtime.companions.serving.http.server import Server, access_for
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.serving.schema import Column, Schema

pytestmark = pytest.mark.process

JSON, NPY, ARROW = "application/json", "application/x-npy", "application/vnd.apache.arrow.stream"

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
    servers: list[Server] = []

    def start(
        function: Any = model, schema: Schema = SCHEMA, limits: Limits = Limits(), access: Access = Access()
    ) -> Client:
        models = {"first": Predictor(function, schema, "x/run_001 <b>"), "second": Predictor(function, schema, "y")}
        servers.append(Server(application(models, limits, access)).start())
        return Client(servers[-1])

    yield start
    for server in servers:
        server.stop()


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


def test_a_row_that_fails_has_an_error_in_its_place(serve: Serve) -> None:
    client = serve()
    good, poison = {"image": [[1, 2, 3], [4, 5, 6]]}, {"image": [[13, 0, 0], [0, 0, 0]]}
    status, answer = client.predict([good, {"image": [1]}, poison, {}, 5, good])
    assert status == 200
    assert [row.get("total") for row in answer["outputs"]] == [21, None, None, None, None, 21]
    errors = [row.get("error", "") for row in answer["outputs"]]
    assert errors[1] == "image has shape (1,); expected float32 (2, 3)"
    assert "no 13, please" in errors[2]
    assert errors[3] == "image is missing; expected float32 (2, 3)"
    assert client.predict([{}, {"image": [["a"]]}])[0] == 422
    assert client.predict([poison])[0] == 500
    assert client.predict([poison, {}])[0] == 500


def test_the_log_has_the_failure_of_the_model_and_not_rows_of_clients(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    status, _ = serve().predict([{"image": "a secret"}, {"image": [[13, 0, 0], [0, 0, 0]]}])
    assert status == 500
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "first: predict failed: ValueError: no 13, please"
    ]


def test_npy_and_arrow_in_and_out(serve: Serve) -> None:
    client, rows = serve(), images(4)
    expected = model({"image": rows})
    for array in (rows.numpy(), np.asfortranarray(rows.numpy()), rows.numpy().astype(">f8")):
        file = io.BytesIO()
        np.save(file, array)
        status, headers, body = client.ask(
            "POST", "/predict?output=twice", file.getvalue(), Content_Type=NPY, Accept=NPY
        )
        assert (status, headers["content-type"]) == (200, NPY)
        assert np.array_equal(np.load(io.BytesIO(body)), expected["twice"].numpy())
    status, _, body = client.ask("POST", "/predict", file.getvalue(), Content_Type=NPY, Accept=NPY)
    assert (status, "one of total, twice, largest" in str(body)) == (406, True)

    nested = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(rows.numpy().reshape(-1)), 3), 2
    )
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(rows.numpy())
    for column in (nested, tensors, pa.array(rows.tolist(), pa.list_(pa.list_(pa.float64())))):
        status, headers, body = client.ask(
            "POST", "/predict", stream(pa.table({"image": column})), Content_Type=ARROW, Accept=ARROW
        )
        assert (status, headers["content-type"]) == (200, ARROW)
        table = pa.ipc.open_stream(body).read_all()
        assert table["total"].to_pylist() == expected["total"].tolist()
        assert table["twice"].to_pylist() == expected["twice"].tolist()

    body = stream(pa.table({"image": nested}), compression="zstd")
    status, _, answer = client.ask("POST", "/predict", body, Content_Type=ARROW)
    assert (status, "without compression" in str(answer)) == (400, True)  # it could be a million times as large


def stream(table: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return file.getvalue()


def test_a_compressed_dictionary_of_arrow_is_refused(serve: Serve) -> None:
    """The rows of the stream are not compressed, and the column is ignored."""
    flat = pa.array(np.arange(6, dtype=np.float32))
    image = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)
    table = pa.table({"image": image, "label": pa.array(["x" * 100_000]).dictionary_encode()})
    messages = {}
    for compression in (None, "zstd"):
        file = io.BytesIO()
        with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
            stream.write_table(table)
        found = pa.ipc.MessageReader.open_stream(file.getvalue())
        messages[compression] = {message.type: message.serialize().to_pybytes() for message in found}
    client = serve()
    for compression, status in ((None, 200), ("zstd", 400)):
        pieces = messages[None] | {"dictionary": messages[compression]["dictionary"]}
        found_status, _, body = client.ask("POST", "/predict", b"".join(pieces.values()), Content_Type=ARROW)
        assert (found_status, b"compressed Arrow streams" in body) == (status, status == 400), body


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
    table = pa.table({"tokens": [row["tokens"] for row in rows], "text": [row["text"] for row in rows]})
    status, _, body = client.ask("POST", "/predict", stream(table), Content_Type=ARROW, Accept=ARROW)
    assert pa.ipc.open_stream(body).read_all()["echo"].to_pylist() == [row["tokens"] for row in rows]


def test_nulls_of_arrow_fail_their_rows(serve: Serve) -> None:
    client = serve()
    rows = np.arange(18, dtype=np.float32).reshape(3, 6).tolist()
    kind, storage = pa.fixed_shape_tensor(pa.float32(), (2, 3)), pa.list_(pa.float32(), 6)
    tensors = pa.ExtensionArray.from_storage(kind, pa.array([rows[0], None, [*rows[2][:5], None]], storage))
    lists = pa.array([[row[:3], row[3:]] for row in rows[:1]] + [None, [[1, 2, 3], [4, 5, None]]])
    for column in (tensors, lists):
        body = stream(pa.table({"image": column}))
        status, _, answer = client.ask("POST", "/predict", body, Content_Type=ARROW)
        assert status == 200, answer
        first, *others = json.loads(answer)["outputs"]
        assert first["total"] == 15
        assert others == [{"error": f"image{at} is null; expected float32 (2, 3)"} for at in ("", "[1][2]")]
    status, _, answer = client.ask("POST", "/predict", stream(pa.table({"image": [{"x": 1}]})), Content_Type=ARROW)
    assert (status, b"image has the type struct<x: int64>; expected numbers" in answer) == (400, True)


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
        wait_for(lambda: client.server.app.endpoints["first"].batcher.queued == 20, 60)
        release.set()
        assert first.result()[0] == 200
        answers = [future.result() for future in rest]
    assert sizes[:2] == [1, 16]
    totals = [answer["outputs"][0].get("total") for _, answer in answers]
    assert totals == [None if value == 13 else value for value in values]


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, SystemExit, GeneratorExit])
def test_an_exception_that_is_not_an_error_fails_its_row_only(serve: Serve, error: type[BaseException]) -> None:
    def function(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if (batch["image"] == 13).any():
            raise error("no 13")
        return model(batch)

    client = serve(function, limits=Limits(timeout_s=5))
    good, poison = {"image": [[1, 2, 3], [4, 5, 6]]}, {"image": [[13, 0, 0], [0, 0, 0]]}
    status, answer = client.predict([good, poison])
    assert (status, [row.get("total") for row in answer["outputs"]]) == (200, [21, None])
    assert f"{error.__name__}: no 13 (" in answer["outputs"][1]["error"]
    assert client.predict([good])[0] == 200


@pytest.fixture
def blocked(serve: Serve, request: pytest.FixtureRequest) -> Iterator[tuple[Client, threading.Event]]:
    """A server whose model is computing until the event is set, with room for two more rows.

    Before, it has answered many rows quickly. The parameter is the time in which requests are answered.
    """
    entered, release = threading.Event(), threading.Event()

    def function(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if batch["image"].any():
            entered.set()
            release.wait()
        return model(batch)

    client = serve(function, limits=Limits(max_queue=2, timeout_s=getattr(request, "param", 600)))
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
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        wait_for(lambda: app.endpoints["first"].batcher.queued == 1, 60)
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


@pytest.mark.parametrize("blocked", [1], indirect=True)
def test_a_model_that_hangs_does_not_keep_the_server(
    blocked: tuple[Client, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, release = blocked
    monkeypatch.setattr(interface, "CLOSE_S", 0.2)
    client.server.stop()  # it would wait forever for the model
    assert not release.is_set()


def test_a_shadow_that_hangs_does_not_keep_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    release, counters = threading.Event(), Counters()

    def function(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        release.wait()
        return model(batch)

    monkeypatch.setattr(shadow, "CLOSE_S", 0.2)
    other = shadow.Shadow("first", Predictor(function, SCHEMA, "x"), counters)
    for _ in range(shadow.WAITING + 2):  # one is computed, and the last one finds no room
        other([Part({"image": images(1)}, 1, [0], model({"image": images(1)}))])
    other.close()  # it would wait forever for the model
    assert not release.is_set()
    release.set()
    assert counters.total("mlx_shadow_rows_total", outcome="skipped")


def test_a_request_that_arrives_while_its_model_is_replaced_leaves_no_thread() -> None:
    async def work() -> set[threading.Thread]:
        before = set(threading.enumerate())
        batcher = Batcher(Predictor(model, SCHEMA, "x"), 4, 4)
        await batcher.drain()
        await batcher.submit(Part({"image": images(1)}, 1, [0]))
        until = time.monotonic() + 60
        while (added := set(threading.enumerate()) - before) and time.monotonic() < until:
            await asyncio.sleep(0.01)
        return added

    assert asyncio.run(work()) == set()


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
    assert client.ask("POST", "/predict", b"{}", Content_Type=JSON, Content_Encoding="gzip")[0] == 415
    assert client.ask("POST", "/predict", b"{}", Content_Type="text/plain")[0] == 415
    assert client.ask("GET", "/predict")[0] == 405
    assert client.ask("GET", "/models/third/predict")[0] == 404
    status, _, body = client.ask("GET", "/predictions")
    assert (status, body.endswith(b', /healthz, /metrics"}')) == (404, True)
    assert b" 431 " in client.raw(head + b"X: " + b"x" * 200_000)


def test_values_are_counted_before_they_become_objects() -> None:
    """5 million empty lists in 15 MB of JSON froze the server for 9 s."""
    parser = RowParser(Schema((Column("v", "float32", (None, None)),)), 1024)
    row = b'{"rows": [{"v": [[%s]]}]}'
    pictures = 7 * 3 * 224 * 224
    (part,), _ = parser.parse(row % b",".join([b"1"] * pictures), JSON)
    assert part.batch["v"].shape == (1, 1, pictures)
    ends = np.arange(MAX_LISTS + 2, dtype=np.int32).clip(max=MAX_LISTS)  # lists of one number, and an empty one
    lists = pa.ListArray.from_arrays(ends, np.zeros(MAX_LISTS, dtype=np.int8))
    table = pa.table({"v": pa.ListArray.from_arrays(np.array([0, MAX_LISTS + 1], dtype=np.int32), lists)})
    for kind, limit, body in (
        (JSON, MAX_VALUES, row % b",".join([b"[]"] * (MAX_VALUES // 5))),
        (ARROW, MAX_LISTS, stream(table)),
    ):
        with pytest.raises(BodyError, match=f", of at most {limit:,}; send fewer rows") as raised:
            parser.parse(body, kind)
        assert raised.value.status == 413


def test_slow_clients_are_disconnected(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that send nothing, half of the headers, or less than the body that they have announced."""
    monkeypatch.setattr(slow_clients, "READ_S", 2.5)
    client = serve()
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(client.raw, (b"", head, head + b"Content-Length: 100\r\n\r\n{"))]
    assert [b" 408 " in answer for answer in answers] == [True] * 3, answers


@pytest.mark.parametrize("stops", [False, True])
def test_an_answer_is_sent_as_slowly_as_it_is_read(serve: Serve, monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    """But not to a client that stops reading."""
    monkeypatch.setattr(slow_clients, "WRITE_S", 2.0 if stops else 3.5)
    client = serve(lambda batch: {"wide": torch.zeros(len(batch["image"]), 4 << 20)})
    body = json.dumps({"rows": [{"image": [[0, 0, 0], [0, 0, 0]]}]}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nAccept: {NPY}\r\n"
    received = 0
    with socket.socket() as connection, contextlib.suppress(ConnectionResetError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.connect(("127.0.0.1", client.server.port))
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(6 if stops else 0)
        while piece := connection.recv(1 << 20, socket.MSG_WAITALL):
            received += len(piece)
            time.sleep(0 if stops else 0.25)
    assert (received > 16 << 20) is not stops


def test_other_sites_and_programs_without_the_token_are_refused(serve: Serve) -> None:
    client = serve()
    assert client.ask("GET", "/healthz", Host="evil.example")[0] == 403
    assert client.ask("GET", "/schema", Origin="http://evil.example")[0] == 403
    assert client.ask("GET", "/schema", Origin="null")[0] == 403
    assert client.ask("GET", "/schema", Origin=client.server.url)[0] == 200
    client = serve(access=Access(digest_of("secret"), hosts=None))
    assert client.ask("GET", "/healthz", Host="models.example")[0] == 200
    for path in ("/schema", "/metrics", "/openapi.json", "/example", "/predict"):
        assert client.ask("GET", path)[0] == 401
        status, _, answer = client.ask("GET", path, Authorization="Bearer Secret")
        assert (status, b"not that of this server" in answer) == (401, True)
    assert client.ask("GET", "/schema", Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.2", "::1", "localhost"])
def test_a_server_on_any_loopback_address_is_called_by_it(host: str) -> None:
    access = access_for(host, None)
    shown = f"[{host}]" if ":" in host else host
    assert access.refusal({b"host": f"{shown}:8000".encode()}, public=False) is None
    assert access.refusal({b"host": b"evil.example"}, public=False) is not None


def test_documents(serve: Serve) -> None:
    client = serve()
    schema = json.loads(client.ask("GET", "/schema")[2])["models"]["first"]
    assert schema["columns"] == {"image": {"dtype": "float32", "shape": [2, 3]}}
    assert schema["examples"][1] == {"image": [[6, 7, 8], [9, 10, 11]]}
    assert client.ask("POST", "/predict", client.ask("GET", "/example")[2], Content_Type=JSON)[0] == 200
    document = json.loads(client.ask("GET", "/openapi.json")[2])
    body = document["paths"]["/models/first/predict"]["post"]["requestBody"]["content"][JSON]
    import jsonschema

    jsonschema.validate(body["example"], body["schema"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"rows": [{"image": [[1, 2], [3, 4]]}]}, body["schema"])
    text = client.ask("GET", "/metrics")[2].decode()
    assert 'mlx_rows_total{model="first",outcome="answered"} 1.0' in text
    assert 'mlx_requests_total{status="200"} 4.0' in text


def test_numbers_outside_of_their_type_and_texts_in_lists_are_refused(serve: Serve) -> None:
    """A long text among short ones must not make NumPy allocate its length for each of them."""
    client = serve(lambda batch: {"same": batch["count"]}, Schema((Column("count", "int64", (None,)),)))
    status, answer = client.predict([{"count": [2**63]}, {"count": [2**62]}, {"count": [-(2**63), 2**63]}])
    assert status == 200
    assert [row.get("same") for row in answer["outputs"]] == [None, [2**62], None]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert client.predict([{"count": ["x" * 100_000, *[""] * 20_000]}])[0] == 422  # 8 GB as an array
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    """Bodies that are not rows, with their types."""
    yield from ((JSON, text) for text in BROKEN_JSON)
    values = (
        *("NaN", "1e999", "9" * 400, '"x"', "null", "{}", "[]", "true", str(2**63), str(-(2**70))),
        "[" * 900 + "]" * 900,
    )
    for value in values:
        yield JSON, b'{"rows": [{"image": %s}]}' % value.encode()
        yield JSON, b'{"rows": [{"image": [[1,2,3],[4,5,%s]]}]}' % value.encode()
    yield JSON, b'{"rows": [{"image": [["%s"%s]]}]}' % (b"x" * 10_000, b', ""' * 2_000)
    yield JSON, b'{"rows": [{"image": 1, "image": [[1]]}]}'
    yield JSON, b'{"rows": {"image": 1}, "rows": 5}'
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    yield NPY, file.getvalue()
    for header in (
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 2, 3)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2, 3)}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': ()}",
        b"[" * 9_000,
        b"__import__('os')",
    ):
        yield NPY, b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    yield NPY, b"PK\x03\x04" + b"x" * 100
    yield ARROW, stream(pa.table({"image": [[1.0]]}), compression="zstd")
    yield ARROW, stream(pa.table({"image": pa.array(["x" * 1000] * 3).dictionary_encode()}))
    yield ARROW, stream(pa.table({"image": pa.nulls(100)}))
    yield ARROW, stream(pa.table({"label": [1]}))
    yield ARROW, stream(pa.table({"other": [1]}))
    good = bytearray(stream(pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(images(3).numpy())})))
    chance = random.Random(0)
    for _ in range(150):
        damaged = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        yield ARROW, bytes(damaged)
    yield from ((ARROW, bytes(good[:size])) for size in range(0, len(good), 41))


def test_hostile_requests_are_refused_in_one_line_with_constant_memory(serve: Serve) -> None:
    client = serve()
    bodies = list(hostile_bodies())
    for round_ in range(3):
        for kind, body in bodies:
            status, _, answer = client.ask("POST", "/predict", body, Content_Type=kind)
            document = json.loads(answer)
            assert status in (200, 400, 413, 415, 422), (status, kind, body[:200], answer)
            lines = [document.get("error", ""), *(row.get("error", "") for row in document.get("outputs", ()))]
            assert all("\n" not in line and "Traceback" not in line and len(line) < 500 for line in lines)
        if round_ == 0:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for text in (b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        assert b" 4" in client.raw(text)[:20]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # kB
    assert client.predict([{"image": [[1, 2, 3], [4, 5, 6]]}])[0] == 200
