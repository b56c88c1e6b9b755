# Written by runtime/stubs.py.
from mlx_runtime.companions.prepared.columns import PreparedReader as PreparedReader
from mlx_runtime.companions.prepared.datasets import mark_used as mark_used
from mlx_runtime.companions.prepared.datasets import prepare_datasets as prepare_datasets
from mlx_runtime.companions.prepared.datasets import unprepared_streams as unprepared_streams
from mlx_runtime.companions.prepared.fingerprints import digest as digest
from mlx_runtime.companions.prepared.store import PreparedSet as PreparedSet
from mlx_runtime.companions.prepared.store import Store as Store
