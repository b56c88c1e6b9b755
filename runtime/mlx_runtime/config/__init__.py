"""From constructors to conf.yaml and back: bind, compose, check and build.

`binding/` writes the file. `composition` reads it: it applies variants and overrides and checks the result
(`checks`), and `building` builds it. Both use `constructors/`, which knows the classes and functions of the code.
"""
