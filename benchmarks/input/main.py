"""The whole flow of a run. You rarely edit this file."""

import sys

from mlx_runtime import clean_exit, connect, fit, load_config
from src.experiment import Experiment


def main(overrides: list[str]) -> None:
    config = load_config(Experiment, overrides)  # src/conf.yaml, then the overrides, all checked
    with connect(config.cfg) as cluster:  # Ray: started here, or the cluster that this job runs on
        fit(Experiment, config, cluster)  # worker_loop on every worker, into a new run folder


if __name__ == "__main__":
    with clean_exit():  # errors become one line and an exit code
        main(sys.argv[1:])
