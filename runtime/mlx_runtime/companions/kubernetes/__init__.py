"""Kubernetes: runs and sweeps as RayJobs of KubeRay, which start their own cluster and resume after failures."""
