"""Launched jobs, and what follows their end; data jobs, which fill a folder of the storage completely or not at all."""
