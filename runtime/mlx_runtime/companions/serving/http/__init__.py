"""Servers on this machine: one ASGI application with dynamic batching, and the commands that control it."""
