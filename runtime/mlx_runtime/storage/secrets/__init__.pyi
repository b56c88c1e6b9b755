# Written by runtime/stubs.py.
from mlx_runtime.storage.secrets.detection import HIDDEN as HIDDEN
from mlx_runtime.storage.secrets.detection import LEFT_OUT as LEFT_OUT
from mlx_runtime.storage.secrets.detection import find as find
from mlx_runtime.storage.secrets.detection import is_secret as is_secret
from mlx_runtime.storage.secrets.redaction import FILES as FILES
from mlx_runtime.storage.secrets.redaction import hidden_texts as hidden_texts
from mlx_runtime.storage.secrets.redaction import redact as redact
from mlx_runtime.storage.secrets.redaction import redact_override as redact_override
from mlx_runtime.storage.secrets.redaction import redact_tree as redact_tree
from mlx_runtime.storage.secrets.redaction import secret_keys as secret_keys
from mlx_runtime.storage.secrets.redaction import unredact as unredact
