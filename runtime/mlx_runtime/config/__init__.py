"""From constructors to conf.yaml and back: bind, compose, check and build.

Writing: `nodes` describes the defaults of the code (with `signatures` and `expressions`), and `binding` writes them
(with `merging`, `text` and `schema`) if they can be built again without a difference (`equality`).

Reading: `composition` applies variants (`variants`) and overrides and checks the result (`checks`), and `building`
builds it.

This package exports nothing: most commands start without OmegaConf, Hydra and torch.
"""
