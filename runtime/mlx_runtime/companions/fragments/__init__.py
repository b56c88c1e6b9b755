"""Models cut into stages over several workers, which train them in a pipeline."""
