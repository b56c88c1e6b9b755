"""The sections of docs/benchmarks.md, one module each: `TITLE`, and `section(rounds, only)`, which returns a text."""
