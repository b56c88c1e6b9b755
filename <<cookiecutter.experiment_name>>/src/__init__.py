"""The experiment. Edit models, datasets and experiment; then `make bind` and `make run`."""
