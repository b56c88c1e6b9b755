"""From constructors to conf.yaml: the defaults of the code, merged into the file.

`nodes` describes the defaults (with `expressions`), and `conf_file` writes them (with `merging`) and their schema
if they can be built again without a difference (`equality`).
"""
