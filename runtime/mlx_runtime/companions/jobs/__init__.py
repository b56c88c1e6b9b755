"""Data jobs, which fill a folder of the storage completely or not at all; sizes in the storage, and removal from it."""
