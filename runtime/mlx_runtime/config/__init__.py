"""From constructors to conf.yaml and back: bind, compose, check and build.

Writing: `nodes` describes the defaults of the code (with `signatures`, `expressions` and `literals`), `verification`
builds them again, and `binding` writes them (with `merging`, `text` and `schema`).

Reading: `composition` applies overrides and checks the result, and `building` and `optimizers` build it.

Neighbors import `projects`, `composition`, `building`, `interpolation` and `targets` as modules: this package exports
nothing, because most commands start without OmegaConf, Hydra and torch.
"""
