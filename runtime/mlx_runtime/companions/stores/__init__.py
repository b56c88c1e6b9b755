"""Runs and prepared datasets on object stores."""
