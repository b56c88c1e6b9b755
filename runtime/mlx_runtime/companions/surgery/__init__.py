"""Upgrades of a project to a newer version of its template."""
