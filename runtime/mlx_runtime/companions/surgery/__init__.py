"""Work on the user's own project: proofs of exact resume, upgrades to a new template, and weights from elsewhere."""
