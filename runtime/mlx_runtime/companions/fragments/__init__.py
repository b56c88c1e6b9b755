"""Models cut into fragments for several workers or unequal machines, and replicas that are averaged."""
