"""The whole flow of the job. You rarely edit this file."""

import sys

from mlx_runtime import clean_exit, connect, load_config, run_job

from src.job import Job


def main(overrides: list[str]) -> None:
    config = load_config(Job, overrides)  # src/conf.yaml, then the overrides, all checked
    with connect(config.cfg) as cluster:  # Ray: started here, or the cluster that this job runs on
        run_job(Job, config, cluster)  # Job.run fills a folder of the storage, whole or not at all


if __name__ == "__main__":
    with clean_exit():  # errors become one line and an exit code
        main(sys.argv[1:])
