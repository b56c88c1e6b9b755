"""Imported first by each process of an embedded Ray: torch and Ray import faster with fewer collections."""

import gc

gc.set_threshold(50_000, 10, 10)
