"""Launched jobs of any scheme; data jobs, which fill a folder of the storage completely or not at all; its contents."""
