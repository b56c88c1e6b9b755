"""Servers written by hand: peers.py fastapi|ray|ray-batching images|words PORT."""

import asyncio
import sys
import time
from typing import Any

import torch

from src.networks import NETWORKS


def load(name: str) -> Any:
    torch.set_num_threads(1)
    return NETWORKS[name][0]().eval()


def fastapi(name: str, port: int) -> None:
    """FastAPI, whose thread pool calls the model for each request; uvicorn finds uvloop and httptools."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    model, column = load(name), NETWORKS[name][1]
    dtype = torch.float32 if name == "images" else torch.int64
    values = list[list[list[float]]] if name == "images" else list[int]

    class Row(BaseModel):
        __annotations__ = {column: values}

    class Request(BaseModel):
        rows: list[Row]

    app = FastAPI()

    @app.post("/predict")
    def predict(request: Request) -> dict[str, Any]:
        batch = torch.tensor([getattr(row, column) for row in request.rows], dtype=dtype)
        with torch.inference_mode():
            probabilities = model(batch).softmax(1)
        return {"outputs": [{"probabilities": row} for row in probabilities.tolist()]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


def ray(name: str, port: int, *, batching: bool) -> None:
    """Ray Serve, with one replica."""
    import ray
    from ray import serve
    from starlette.requests import Request

    column, dtype = NETWORKS[name][1], torch.float32 if name == "images" else torch.int64

    @serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
    class Model:
        def __init__(self) -> None:
            self.model = load(name)

        @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.002)
        async def many(self, rows: list[Any]) -> list[Any]:
            return self.compute(rows)

        def compute(self, rows: list[Any]) -> list[Any]:
            with torch.inference_mode():
                probabilities = self.model(torch.tensor(rows, dtype=dtype)).softmax(1)
            return [{"probabilities": row} for row in probabilities.tolist()]

        async def __call__(self, request: Request) -> dict[str, Any]:
            rows = [row[column] for row in (await request.json())["rows"]]
            if batching:
                return {"outputs": list(await asyncio.gather(*map(self.many, rows)))}
            return {"outputs": self.compute(rows)}

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Model.bind(), route_prefix="/predict")
    while True:
        time.sleep(1)


if __name__ == "__main__":
    contender, network, number = sys.argv[1:]
    if contender == "fastapi":
        fastapi(network, int(number))
    else:
        ray(network, int(number), batching=contender == "ray-batching")
