# Written by runtime/stubs.py.
from mlx_runtime.config.binding.conf_file import Binding as Binding
from mlx_runtime.config.binding.conf_file import bind as bind
from mlx_runtime.config.binding.nodes import RESERVED as RESERVED
from mlx_runtime.config.binding.nodes import Description as Description
from mlx_runtime.config.binding.origins import dump as dump
from mlx_runtime.config.binding.schema import argument_texts as argument_texts
