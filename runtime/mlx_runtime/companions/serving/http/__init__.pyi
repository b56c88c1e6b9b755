# Written by runtime/stubs.py.
from mlx_runtime.companions.serving.http.access import LOOPBACK as LOOPBACK
from mlx_runtime.companions.serving.http.access import MAKE_A_TOKEN as MAKE_A_TOKEN
from mlx_runtime.companions.serving.http.access import Access as Access
from mlx_runtime.companions.serving.http.access import digest_of as digest_of
from mlx_runtime.companions.serving.http.access import read_token as read_token
from mlx_runtime.companions.serving.http.asgi import NAME as NAME
from mlx_runtime.companions.serving.http.asgi import Application as Application
from mlx_runtime.companions.serving.http.asgi import Limits as Limits
from mlx_runtime.companions.serving.http.asgi import application as application
from mlx_runtime.companions.serving.http.server import is_loopback as is_loopback
from mlx_runtime.companions.serving.http.server import serve as serve
