"""The documents that describe a server: the columns of its models, and its OpenAPI description."""

from collections.abc import Mapping
from typing import Any

from mlx_runtime import __version__
from mlx_runtime.companions.serving.predictor import Predictor
from mlx_runtime.companions.serving.schema import STRING, Column, Schema

JSON = "application/json"

ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def example_row(schema: Schema) -> dict[str, Any]:
    """Return the first example row, or one of zeros and empty strings."""
    rows = schema.example_rows()
    return rows[0] if rows else {column.name: _zeros(column, column.shape) for column in schema.columns}


def _zeros(column: Column, shape: tuple[int | None, ...]) -> Any:
    if shape:
        return [_zeros(column, shape[1:])] * (1 if shape[0] is None else shape[0])
    return "" if column.dtype == STRING else False if column.dtype == "bool" else 0


def models_document(models: Mapping[str, Predictor]) -> dict[str, Any]:
    """Return the answer of `/schema`: title, columns and example rows of each model."""
    return {
        "models": {
            name: {"title": model.title, "device": str(model.device)}
            | model.schema.document()
            | {"examples": model.schema.example_rows() or [example_row(model.schema)]}
            for name, model in models.items()
        }
    }


def openapi_document(models: Mapping[str, Predictor]) -> dict[str, Any]:
    """Return the OpenAPI description of a server."""
    first = next(iter(models))
    plain = {"/healthz": "Health", "/schema": "Columns and example rows"}
    paths: dict[str, Any] = {
        path: {"get": {"summary": text, "responses": {"200": {"description": text}}}} for path, text in plain.items()
    }
    paths["/predict"] = _predict(first, models[first].schema)
    paths |= {f"/models/{name}/predict": _predict(name, model.schema) for name, model in models.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": ", ".join(model.title for model in models.values()), "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _predict(name: str, schema: Schema) -> dict[str, Any]:
    row = {
        "type": "object",
        "required": list(schema.names),
        "properties": {column.name: _type(column, column.shape) for column in schema.columns}
        | {ignored: {} for ignored in schema.ignored},
        "additionalProperties": False,
    }
    body = {"type": "object", "required": ["rows"], "properties": {"rows": {"type": "array", "items": row}}}
    content = {JSON: {"schema": body, "example": {"rows": [example_row(schema)]}}}
    answers = {"type": "object", "properties": {"outputs": {"type": "array", "items": {"type": "object"}}}}
    failures = {
        "400": "The body cannot be read",
        "413": "The body is too large, or has too many rows",
        "422": "No row fits the columns; each answer has an error",
        "429": "The queue is full; try again after Retry-After seconds",
        "503": "The model has not answered in time",
    }
    return {
        "post": {
            "summary": f"Answer rows with {name}",
            "operationId": f"predict_{name}",
            "security": [{}, {"token": []}],
            "requestBody": {"required": True, "content": content},
            "responses": {
                "200": {
                    "description": "The outputs or the error of each row, in order",
                    "content": {JSON: {"schema": answers}},
                }
            }
            | {
                status: {"description": text, "content": {JSON: {"schema": ERROR}}} for status, text in failures.items()
            },
        }
    }


def _type(column: Column, shape: tuple[int | None, ...]) -> dict[str, Any]:
    if shape:
        sizes = {} if shape[0] is None else {"minItems": shape[0], "maxItems": shape[0]}
        return {"type": "array", "items": _type(column, shape[1:])} | sizes
    if column.dtype in (STRING, "bool"):
        return {"type": "string" if column.dtype == STRING else "boolean"}
    return {"type": "number" if "float" in column.dtype else "integer"}
