"""Pretrained models of libraries, built without downloading their weights if a checkpoint will overwrite them.

A default such as `net: PreTrainedModel = AutoModel.from_pretrained("google-bert/bert-base-uncased")` is only declared
while `src` is imported, and called by workers.
"""

import contextlib
from typing import Any

from torch import nn

from mlx_runtime.config.constructors.declarations import library_of
from mlx_runtime.settings import Settings
from mlx_runtime.storage.local import one_at_a_time

BUILDING = {"attn_implementation", "dtype", "torch_dtype"}
"""Arguments of `from_pretrained` of transformers that `from_config` accepts, too."""

LOADING = {"disable_mmap", "ignore_mismatched_sizes", "low_cpu_mem_usage", "use_safetensors", "variant", "weights_only"}
"""Arguments that only affect the loading of weights; others may change the model."""

HUB = {"cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"}
"""Arguments that determine the source of files."""

DOWNLOADING = ("timm.", "torch.hub.", "torchvision.")
"""Modules in which several processes may download the same file; `huggingface_hub` has its own locks."""


def make(target: Any, weightless: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that loads pretrained weights; if `weightless`, build the model without them, if possible."""
    if weightless:
        library = library_of(target)
        with contextlib.suppress(Exception):  # after an error, build it with weights
            if library == "timm":
                return target(*args, **{**kwargs, "pretrained": False})
            if library == "transformers" and (made := _of_transformers(target.__self__, *args, **kwargs)) is not None:
                return made
    if not f"{target.__module__}.".startswith(DOWNLOADING):
        return target(*args, **kwargs)
    with one_at_a_time(Settings.read().cache / "locks", target.__name__):
        return target(*args, **kwargs)


def _of_transformers(cls: Any, pretrained_model_name_or_path: str, **kwargs: Any) -> nn.Module | None:
    """Return the model of `cls.from_pretrained(...)` with initial values; None if the models might differ.

    It is in eval mode, with the generation config of the repository, like that model.
    """
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel

    automatic, name = hasattr(cls, "from_config"), pretrained_model_name_or_path
    if (not automatic and not issubclass(cls, PreTrainedModel)) or kwargs.pop("config", None) is not None:
        return None  # a tokenizer or a processor, or a model of another config
    options = {key: value for key, value in kwargs.items() if value is not None and key not in BUILDING | LOADING}
    kept = {key: kwargs[key] for key in BUILDING & kwargs.keys() if kwargs[key] not in (None, "auto")}
    kind = AutoConfig if automatic else cls.config_class
    config, rest = kind.from_pretrained(name, return_unused_kwargs=True, **options)
    unknown = {key for key in rest if not key.startswith("_")} - HUB - {"name_or_path", "trust_remote_code"}
    if unknown or getattr(config, "quantization_config", None):
        return None
    if automatic and "trust_remote_code" in options:
        kept["trust_remote_code"] = options["trust_remote_code"]
    model: Any = cls.from_config(config, **kept) if automatic else cls._from_config(config, **kept)
    model.config.name_or_path = model.name_or_path = name
    if model.can_generate():
        with contextlib.suppress(OSError):  # the repository has none
            hub = {key: options[key] for key in HUB & options.keys()}
            model.generation_config = GenerationConfig.from_pretrained(name, **hub)
    return model.eval()  # type: ignore[no-any-return]
