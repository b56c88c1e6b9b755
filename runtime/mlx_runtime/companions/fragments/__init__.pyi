# Written by runtime/stubs.py.
from mlx_runtime.companions.fragments.clusterizing import clusterize as clusterize
