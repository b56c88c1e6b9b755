"""The optional dependencies of this package, and the one error that names the extra to install."""

import importlib

from mlx_runtime.errors import MissingLibraryError

EXTRAS = {
    "botocore": "stores",
    "cloudpickle": "train",
    "datasets": "text",
    "flax": "jax",
    "huggingface_hub": "hub",
    "jax": "jax",
    "jinja2": "views",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "optax": "jax",
    "optuna": "sweeps",
    "orjson": "serving",
    "marimo": "ui",
    "mlflow": "mlflow",
    "numpy": "train",
    "pandas": "train",
    "plotly": "views",
    "ray": "train",
    "safetensors": "export",
    "scipy": "sweeps",
    "sklearn": "sweeps",
    "starlette": "serving",
    "tensorboard": "train",
    "tensorflow": "tensorflow",
    "torch": "train",
    "torchmetrics": "train",
    "transformers": "text",
    "uvicorn": "serving",
    "wandb": "wandb",
}
"""The extra that installs each library, by the name to import."""


def require(library: str, user: str) -> None:
    """Import a library of an extra, for a `user` such as "a report".

    Raises:
        MissingLibraryError: It is not installed. The message has the command to type.
    """
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:  # the library is there, but one of its own dependencies is not
            raise
        raise MissingLibraryError(f"{user} needs {library}; {cure(error)}") from error


def cure(error: BaseException) -> str | None:
    """Return the command that installs the library missing in a failed import, if it belongs to an extra."""
    library = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f'type: pip install "mlx-runtime[{EXTRAS[library]}]"' if library in EXTRAS else None
