"""The position of this worker among all workers, and collectives between them."""
