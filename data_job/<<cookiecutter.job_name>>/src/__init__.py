"""The data job. Edit src/job.py; then `make bind` and `make run`."""
