"""Files in a folder or an object store: published whole or not at all, read within limits, free of secrets."""
