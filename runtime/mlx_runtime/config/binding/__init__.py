"""From constructors to conf.yaml: the defaults of the code, merged into the file.

`nodes` describes the defaults (with `expressions`), and `conf_file` writes them (with `merging`, `text` and `schema`)
if they can be built again without a difference (`equality`).
"""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    conf_file="Binding bind",
    nodes="RESERVED Description",
    origins="dump",
    schema="argument_texts",
)
