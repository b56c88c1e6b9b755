"""Processes that run in the background: forked from a server, and linked to the one that started them."""
