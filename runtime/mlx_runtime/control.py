"""What can end a run from outside: SIGTERM, a note in its folder (`mlx xp stop`), another driver that took it over."""

import _thread
import contextlib
import signal
import threading
import time
from types import TracebackType
from typing import Any

from mlx_runtime.errors import StorageError
from mlx_runtime.layout import RunFolder

GRACE_S = 25.0
"""How long workers have for the step under way and a checkpoint. Kubernetes kills 30 s after SIGTERM."""

LOOK_S = 1.0
"""How often the run folder is looked at; a tenth as often on an object store."""


class Terminated(KeyboardInterrupt):
    """The run was asked to end, and has."""


class Control:
    """Listens while a run lasts. At first SIGTERM ends it at once; once workers train it ends with a checkpoint.

    Args:
        folder: of the run.
        attempt: number of this driver.

    Attributes:
        lost: whether another driver has taken over the run.
    """

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self.lost = False
        self._folder, self._attempt = folder, attempt
        self._asked_at: float | None = None
        self._gentle = False
        self._done = threading.Event()
        self._before: Any = None

    def gentle(self) -> None:
        """From here on workers can save a checkpoint when they are asked to stop."""
        self._gentle = True

    def stop_asked(self) -> bool:
        return self._asked_at is not None

    def check(self) -> None:
        """Raise what must end the run at once.

        Raises:
            Terminated: the workers had their time to stop.
        """
        if self.lost or (self._asked_at is not None and time.monotonic() - self._asked_at > GRACE_S):
            raise Terminated

    def __enter__(self) -> "Control":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._terminate)
        threading.Thread(target=self._look, name="control", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self._folder.withdraw_stop()

    def _terminate(self, *_: Any) -> None:
        if self._asked_at is not None or not self._gentle:
            raise Terminated
        self._ask("SIGTERM")

    def _ask(self, why: str) -> None:
        self._asked_at = time.monotonic()
        print(f"stopping  after this step, with a checkpoint ({why})", flush=True)

    def _look(self) -> None:
        pause = LOOK_S * (10 if self._folder.uri else 1)
        while not self._done.wait(pause):
            if self._asked_at is None and self._folder.asked_to_stop():
                if self._gentle:
                    self._ask("mlx xp stop")
                else:
                    _thread.interrupt_main(signal.SIGTERM)
            with contextlib.suppress(StorageError):
                if self._folder.attempts() > self._attempt:
                    self.lost = True
                    _thread.interrupt_main()
                    return
