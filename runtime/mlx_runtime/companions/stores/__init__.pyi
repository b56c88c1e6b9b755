# Written by runtime/stubs.py.
from mlx_runtime.companions.stores.object_store import ObjectStore as ObjectStore
