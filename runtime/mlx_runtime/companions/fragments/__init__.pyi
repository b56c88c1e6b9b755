# Written by runtime/stubs.py.
