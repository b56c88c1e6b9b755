"""From constructors to conf.yaml: the defaults of the code, merged into the file."""
