"""Limits of a server, which keep requests of one client from exhausting it."""

import math
from dataclasses import dataclass

from mlx_runtime.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        max_batch: Rows that are computed at once.
        max_wait_s: Time that a batch waits for further rows. At 0, only rows that arrive while the model computes are
            batched.
        max_queue: Rows that wait or are being computed, from which further requests are refused with the status 429.
        max_rows: Rows per request.
        max_body: Bytes per request.
        timeout_s: Time in which a request arrives and is answered, otherwise its status is 503.
    """

    max_batch: int = 32
    max_wait_s: float = 0.0
    max_queue: int = 1024
    max_rows: int = 1024
    max_body: int = 16 << 20
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.timeout_s < math.inf:
            raise UsageError(f"timeout_s is {self.timeout_s}; expected a number of seconds")
        if not self.max_wait_s < self.timeout_s:
            raise UsageError(f"max_wait_s is {self.max_wait_s}; expected less than timeout_s, {self.timeout_s}")
