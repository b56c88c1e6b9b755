# Written by runtime/stubs.py.
from mlx_runtime.storage.secrets.detection import HIDDEN as HIDDEN
from mlx_runtime.storage.secrets.detection import LEFT_OUT as LEFT_OUT
from mlx_runtime.storage.secrets.detection import find as find
from mlx_runtime.storage.secrets.detection import is_secret as is_secret
from mlx_runtime.storage.secrets.redaction import FILES as FILES
from mlx_runtime.storage.secrets.redaction import filled as filled
from mlx_runtime.storage.secrets.redaction import hidden_texts as hidden_texts
from mlx_runtime.storage.secrets.redaction import redacted as redacted
from mlx_runtime.storage.secrets.redaction import redacted_override as redacted_override
from mlx_runtime.storage.secrets.redaction import redacted_tree as redacted_tree
from mlx_runtime.storage.secrets.redaction import secret_keys as secret_keys
