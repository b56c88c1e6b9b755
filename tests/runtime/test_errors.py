"""How a process ends: one line, the right code, and nothing changed in a process that goes on."""

import signal
import subprocess
import sys

import pytest

from mlx_runtime.errors import RunStopped, UsageError, clean_exit

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("no such run"), UsageError.exit_code), (KeyboardInterrupt(), RunStopped.exit_code)]
)
def test_a_process_that_goes_on_can_still_be_interrupted(error: BaseException, code: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as exits, clean_exit():
        raise error
    assert exits.value.code == code
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.process
def test_a_second_interrupt_disturbs_nothing_that_others_do_at_the_end() -> None:
    script = (
        "import atexit, os, signal, time; from mlx_runtime.errors import clean_exit\n"
        "def shut_down():\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1); print('shut down')\n"
        "atexit.register(shut_down)\n"
        "with clean_exit(): raise KeyboardInterrupt"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (RunStopped.exit_code, "shut down\n")
    assert done.stderr == "error: interrupted\n"
