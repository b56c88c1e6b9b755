"""The sections of docs/benchmarks.md, a module each: `TITLE`, and `section(rounds, only)` that measures and tells."""
