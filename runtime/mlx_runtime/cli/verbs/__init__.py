"""The work of the commands. Each module is imported when one of its commands runs."""
