"""Metrics and events leaving a run: synchronization, trackers, callbacks and the console."""
