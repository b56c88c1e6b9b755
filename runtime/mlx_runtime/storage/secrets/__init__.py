"""Secrets: their detection in texts and settings, and their removal from what is written."""
