"""Classes and functions of the code: their paths, signatures and declared calls."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "declarations",
    signatures=(
        "MISSING alternatives base_of choices convert groups is_factory item_hint own_default parameters plain "
        "plain_defaults settings_of statements takes_any_keyword try_convert type_name"
    ),
    suggestions="describe_move import_problem",
    targets="loaded_object_at named_class names_repositories object_at path_of targets_of",
)
