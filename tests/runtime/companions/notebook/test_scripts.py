"""Functions in the script that starts their runs, which calls `Trainer.run` at its top level."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Mlx

from mlx_runtime import Trainer, open_run
from mlx_runtime.companions.notebook import scripts
from mlx_runtime.errors import MlxError
from mlx_runtime.runs.queries.listing import map_concurrently

pytestmark = pytest.mark.local

SCRIPT = """
import sys
import torch
from torch import nn
from mlx_runtime import Trainer, load_checkpoint, report, save_checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(1, 16)

    def forward(self, x):
        return self.fc1(x)


class Losses(list):
    pass


def train_func(config):
    model, losses = Net(), Losses()
    for epoch in range((load_checkpoint() or {"epoch": -1})["epoch"] + 1, 3):
        if epoch == 2 and config["fails"]:
            raise ValueError("on purpose")
        losses.append(model(torch.ones(4, 1)).square().mean().item())
        report(loss=losses[-1])
        save_checkpoint(epoch=epoch)
    return losses


trainer = Trainer(backend="torch", num_workers=2)
trainer.start()
first, second = trainer.run(train_func, {"fails": sys.argv[1] == "fail"}, resume="auto")
print(len(first), type(first) is Losses, len(second))


def late():
    pass


try:
    trainer.run(late)
finally:
    trainer.shutdown()
"""


@pytest.mark.examples
def test_a_script_without_a_package_trains_fails_changes_and_resumes(python: Mlx, tmp_path: Path) -> None:
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)

    def run(argument: str) -> "subprocess.CompletedProcess[str]":
        return python(tmp_path, "scripts/train.py", argument)

    failed = run("fail")
    assert "ValueError: on purpose (raised on rank" in failed.stderr
    assert "scripts/train.py:" in failed.stderr
    (folder,) = (tmp_path / "runs" / "train_func").glob("run_*")
    assert zipfile.ZipFile(folder / "code.zip").namelist() == ["scripts/train.py"]

    script.write_text(SCRIPT.replace("square()", "abs()"))
    done = run("train")
    assert done.stdout.splitlines()[-1] == "1 True 1"  # one epoch was left
    run_of_both = open_run(str(folder))
    assert run_of_both.record["status"] == "SUCCEEDED"
    assert len(run_of_both.metrics()) == 3
    changes = (folder / "logs" / "driver.log").read_text()
    assert "scripts/train.py" in changes
    assert done.stderr.splitlines()[-1] == (
        "mlx_runtime.errors.ConfigError: function is 'scripts.train.late', which cannot be imported: "
        "scripts.train defines it below the first call that starts a run; define it above, or start runs below "
        'if __name__ == "__main__"'
    )
    assert not (tmp_path / "runs" / "late").exists()


def _raising(item: object) -> None:
    return undefined  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.pure
@pytest.mark.parametrize(
    ("call", "last", "frames"),
    [
        (lambda: Trainer(num_workers=0), "mlx_runtime.errors.UsageError: num_workers is 0; ", ["<lambda>"]),
        (
            lambda: map_concurrently(_raising, [1]),
            "NameError: name 'undefined' is not defined",
            ["<lambda>", "_raising"],
        ),
    ],
)
def test_errors_have_only_the_frames_of_the_user(
    call: Callable[[], object],
    last: str,
    frames: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises((MlxError, NameError)) as caught:
        call()
    Trainer()
    assert sys.excepthook is sys.__excepthook__  # only a run changes it
    scripts.show_own_frames()
    for debug in (False, True):
        monkeypatch.setenv("MLX_DEBUG", str(int(debug)))
        sys.excepthook(caught.type, caught.value, caught.tb)
        shown = capsys.readouterr().err
        assert shown.splitlines()[-1].startswith(last)
        assert ("/mlx_runtime/" in shown) == debug
        assert [name for name in re.findall(r"in (\S+)$", shown, re.MULTILINE) if name in frames] == frames


@pytest.mark.parametrize(
    ("name", "cwd", "message"),
    [
        ("my-script.py", ".", "from my-script.py, which is not the name of a module; rename it"),
        ("src.py", ".", "from src.py, because another module has its name; rename it"),
        ("train.py", "elsewhere", "start the script in its folder: cd"),
    ],
)
def test_a_script_that_workers_cannot_import_is_refused(
    python: Mlx, tmp_path: Path, name: str, cwd: str, message: str
) -> None:
    for folder in ("elsewhere", "src"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "__init__.py").touch()
    (tmp_path / name).write_text(SCRIPT)
    done = python(tmp_path / cwd, str(tmp_path / name), "train")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mlx_runtime.errors.UsageError: workers cannot import train_func from ")
    assert message in last
    assert "mlx_runtime/companions" not in done.stderr
    assert not (tmp_path / cwd / "runs").exists()
