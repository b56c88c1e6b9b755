"""The worker of a run: the experiment, its loop and its steps, and messages to the driver."""
