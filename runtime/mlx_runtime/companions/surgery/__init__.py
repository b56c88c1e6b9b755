"""Proofs and upgrades of the user's own project: whether its runs resume exactly, and what is new in its template."""
