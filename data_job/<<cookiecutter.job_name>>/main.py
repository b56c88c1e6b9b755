"""The entry point of the job. You rarely need to edit it."""

import sys

from mlx_runtime import clean_exit, load_config, run_job

from src.job import Job


def main(overrides: list[str]) -> None:
    config = load_config(Job, overrides)  # src/conf.yaml and the overrides, all checked
    run_job(Job, config)  # Job.run fills a folder of the storage, completely or not at all


if __name__ == "__main__":
    with clean_exit():  # prints errors in one line and sets the exit code
        main(sys.argv[1:])
