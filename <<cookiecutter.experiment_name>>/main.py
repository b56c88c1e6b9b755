"""The entry point of a run. You rarely need to edit it."""

import sys

from mlx_runtime import clean_exit, connect, fit, load_config

from src.experiment import Experiment


def main(overrides: list[str]) -> None:
    config = load_config(Experiment, overrides)  # src/conf.yaml and the overrides, all checked
    with connect(config.cfg) as cluster:  # this machine, or the cluster that this job runs on
        fit(Experiment, config, cluster)  # calls worker_loop on every worker


if __name__ == "__main__":
    with clean_exit():  # prints errors in one line and sets the exit code
        main(sys.argv[1:])
