"""Metrics and events leaving a run: trackers, callbacks and the console."""
