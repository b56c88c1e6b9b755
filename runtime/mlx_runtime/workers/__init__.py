"""Processes that train: engines, the fork server, the worker, and the detection of deadlocks."""
