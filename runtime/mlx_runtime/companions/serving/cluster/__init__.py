"""Models on a Ray cluster: the same application in replicas of Ray Serve."""
