"""An extension of runs: `+cfg.callbacks.heartbeat._target_=more_mlx.heartbeat.Heartbeat`."""

import contextlib
import threading
import time

from mlx_runtime.events import CheckpointSaved, Notice


class Heartbeat:
    """Touches a file in the run folder, for an external watchdog, and reports the number of checkpoints at the end.

    Args:
        every_s: seconds between two touches.
    """

    def __init__(self, every_s: float = 10.0):
        self.every_s = every_s

    @contextlib.contextmanager
    def accompany(self, run):
        checkpoints, ended = [], threading.Event()

        def beat():
            while True:
                (run.record.folder.path / "heartbeat").write_text(f"{time.time()}\n")
                if ended.wait(self.every_s):
                    return

        def listen(event):
            if isinstance(event, CheckpointSaved):
                checkpoints.append(event.path)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        yield listen
        ended.set()
        thread.join()
        run.notify(Notice(f"{run.record['status']} after {len(checkpoints)} checkpoints"))
