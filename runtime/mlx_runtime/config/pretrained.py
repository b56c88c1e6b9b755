"""Pretrained models of libraries, built without downloading their weights if a checkpoint will overwrite them.

A default such as `net: PreTrainedModel = AutoModel.from_pretrained("google-bert/bert-base-uncased")` is only declared
while `src` is imported, and called by workers.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
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

_without_weights: ContextVar[bool] = ContextVar("without_weights", default=False)


@contextlib.contextmanager
def without_weights(active: bool = True) -> Iterator[None]:
    """Within the block, build models without downloading their weights, if the library can."""
    token = _without_weights.set(active)
    try:
        yield
    finally:
        _without_weights.reset(token)


def weightless() -> bool:
    """Return True inside `without_weights`."""
    return _without_weights.get()


def built_to_be_restored(make: Callable[[], Any]) -> Any:
    """Return the group of models that `make` builds, to be overwritten by a checkpoint.

    They are built without weights, unless checkpoints contain only some of their values, such as those of adapters.
    """
    with without_weights():
        group = make()
    models = [item for item in vars(group).values() if isinstance(item, nn.Module)]
    return group if all(map(_saves_all_values, models)) else make()


def _saves_all_values(model: nn.Module) -> bool:
    try:
        saved = {id(value) for value in model.state_dict(keep_vars=True).values()}
    except TypeError:  # of a method of the user's own
        return False
    return all(id(parameter) in saved for parameter in model.parameters())


def builder(target: Any) -> Callable[..., Any]:
    """Return a function to call in place of one that loads weights; it skips them inside `without_weights`."""
    return functools.partial(_built_without_weights if weightless() else _built_with_weights, target)


def _built_with_weights(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that loads weights, so that processes of this machine do not download the same file twice."""
    if not f"{target.__module__}.".startswith(DOWNLOADING):
        return target(*args, **kwargs)
    with one_at_a_time(Settings.read().cache / "locks", target.__name__):
        return target(*args, **kwargs)


def _built_without_weights(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    library, owner = library_of(target), getattr(target, "__self__", None)
    made = None
    with contextlib.suppress(Exception):  # after an error, build it with weights
        if library == "timm":
            made = target(*args, **{**kwargs, "pretrained": False})
        elif library == "transformers" and isinstance(owner, type):
            made = _of_transformers(owner, args, kwargs)
    return made if made is not None else _built_with_weights(target, *args, **kwargs)


def _of_transformers(cls: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> nn.Module | None:
    """Return the model of `cls.from_pretrained(...)` with initial values; None if the models might differ.

    It is in eval mode, with the generation config of the repository, like that model.
    """
    from transformers import AutoConfig, GenerationConfig, PreTrainedModel

    automatic = hasattr(cls, "from_config")
    if not automatic and not issubclass(cls, PreTrainedModel):
        return None  # a tokenizer or a processor
    defaults = {item.name: item.default for item in inspect.signature(cls.from_pretrained).parameters.values()}
    options = {key: value for key, value in kwargs.items() if key not in defaults or defaults[key] != value}
    name, *others = args or (options.pop("pretrained_model_name_or_path"),)
    if others or options.pop("config", None) is not None:
        return None
    hub = {key: options[key] for key in HUB & options.keys()}
    kept = {key: options.pop(key) for key in BUILDING & options.keys()}
    kept = {key: value for key, value in kept.items() if value not in (None, "auto")}
    options = {key: value for key, value in options.items() if key not in LOADING}
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
            model.generation_config = GenerationConfig.from_pretrained(name, **hub)
    return model.eval()  # type: ignore[no-any-return]
