"""Imported first by each process of an embedded Ray. Fewer garbage collections make importing torch and Ray faster."""

import gc

gc.set_threshold(50_000, 10, 10)
