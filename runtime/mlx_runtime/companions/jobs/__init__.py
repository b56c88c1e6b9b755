"""Launched jobs and the ends of their drivers; data jobs, which fill a folder of the storage wholly or not at all."""
