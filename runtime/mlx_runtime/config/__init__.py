"""From constructors to conf.yaml and back: bind, compose, check and build.

`binding/` writes the file. `composition` reads it: it applies variants (`variants`) and overrides and checks the result
(`checks`), and `building` builds it. Both use `constructors/`, which knows the classes and functions of the code.
"""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "pretrained projects variants",
    building="DUMMY_PARAMS Tree build build_cfg build_group build_optimizers declare declare_group",
    checks="Checker",
    composition="Composition Config check parse_overrides quote raise_if read storage_override",
    interpolation="escape parse_config resolve_config unset_variables",
    overrides="override",
)
