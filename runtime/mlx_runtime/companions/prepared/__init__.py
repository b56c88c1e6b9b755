"""Datasets mapped through `ray_map_batches` once, as columns that later runs map into memory."""
