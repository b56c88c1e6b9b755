"""The generated experiment, as used by its owner: linted, type-checked, bound, trained by make, and tested."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Mlx, Start, edit
from faults import differences, final_state, reports, wait_for

pytestmark = pytest.mark.process


MYPY_CACHE = str(ROOT / ".mypy_cache" / "templates")
"""The cache of mypy for torch and other libraries, which both templates import; filling it takes most of the time."""

UNTYPED = ("transformers.*",)
"""TorchMetrics imports it if it is installed, as it is here; reading it would take mypy half a minute."""


def make(folder: Path, environment: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["make", "-s", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=560
    )


@pytest.fixture(scope="module")
def trained(
    mlx: Mlx, baked: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The experiment after the command of `make bind` and `make run`, with the output of the latter."""
    folder = Path(shutil.copytree(baked, tmp_path_factory.mktemp("trained") / "digits"))
    assert make(folder, environment, "-n", "bind").stdout.splitlines()[-1].endswith(" -m mlx_runtime train bind")
    assert mlx(folder, "train", "bind").stdout == "wrote src/conf.yaml\n"
    done = make(folder, environment, "run")
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done.stdout


@pytest.mark.local
def test_it_reaches_the_promised_accuracy(trained: tuple[Path, str]) -> None:
    accuracy = re.search(r"^test/accuracy +(\d\.\d{4})$", trained[1], re.MULTILINE)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.96


@pytest.mark.examples
@pytest.mark.timeout(900)
def test_an_interrupted_run_ends_like_one_that_was_not(
    trained: tuple[Path, str], mlx: Mlx, start: Start, tmp_path: Path
) -> None:
    """Stop in the middle of the fourth epoch, then abort between the last epoch and the test."""
    whole = trained[0] / "runs" / "digits" / "run_001"
    folder = Path(shutil.copytree(trained[0], tmp_path / "digits", ignore=shutil.ignore_patterns("runs")))
    run, code = folder / "runs" / "digits" / "run_001", folder / "src" / "experiment.py"
    text = code.read_text()

    edit(code, "self.scheduler.step()", "self.scheduler.step(), __import__('time').sleep(self.global_step > 60)")
    process = start(folder, "train", "run", "cfg.checkpoint_every_steps=2")
    wait_for(lambda: list(run.glob("checkpoints/epoch_0004_step_*")) or process.poll() is not None, seconds=400)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 143, output + errors
    assert re.fullmatch(r"epoch_0004_step_\d+", max(path.name for path in (run / "checkpoints").iterdir()))

    code.write_text(text)
    edit(code, "self.tools.best.restore(", "raise ValueError('on purpose')\n        self.tools.best.restore(")
    done = mlx(folder, "train", "run", "--resume")
    assert "error: ValueError: on purpose" in done.stderr
    code.write_text(text)
    done = mlx(folder, "train", "run", "--resume")
    assert (done.returncode, done.stderr) == (0, "")

    state = final_state(whole)
    assert differences(state, final_state(run)) == []
    assert reports(run) == reports(whole)
    assert state["own"]["scheduler"]["last_epoch"] == state["global_step"]
    assert state["tools"]["early_stopping"]["waited"] == 5
    best = json.loads((whole / "run.json").read_text())["best"]
    assert state["tools"]["best"]["epoch"] == best["epoch"] < state["epoch"]
    kept = torch.load(best["path"] + "/state.pt", weights_only=True)["models"]["net"]
    assert differences(dict(kept), state["tools"]["best"]["weights"]) == []


def test_overrides_reach_the_run_through_make(
    digits: Path, environment: dict[str, str], mlx: Mlx, tmp_path: Path
) -> None:
    options = "cfg.start_workers=0 cfg.num_epochs=1 optimizers.adam.lr=1e-4 cfg.name=other"
    typed = make(digits, environment, "-n", "run", f"ARGS={options}").stdout.splitlines()[-1]
    done = mlx(digits, *typed.partition(" -m mlx_runtime ")[2].split(), MLX_STORAGE=f"{tmp_path}/elsewhere")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "elsewhere" / "other" / "run_001"
    assert (run / "run.json").is_file()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line).get("lr/adam", 0) for line in lines) <= 1e-4
    assert "  lr: 0.0001" in (run / "conf.yaml").read_text()


def test_conf_yaml_may_name_one_of_torchs_schedules(digits: Path, mlx: Mlx) -> None:
    """Use the example from the experiment's README, bind again and override it."""
    conf = digits / "src" / "conf.yaml"
    shown = re.search(r"```yaml\n(  schedule:\n.*?)```", (digits / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    before, _, written = conf.read_text().partition("  schedule:\n")
    assert written == "    _target_: src.tools.warmup_cosine\n    _partial_: true\n    warmup_steps: 20\n"
    conf.write_text(before + shown[1])
    assert "added" not in mlx(digits, "train", "bind").stdout
    assert shown[1] in conf.read_text()
    options = ("cfg.start_workers=0", "cfg.num_epochs=1", "tools.schedule.max_lr=0.02", "cfg.log_every_steps=1")
    done = mlx(digits, "train", "run", *options)
    assert done.returncode == 0, done.stderr
    lines = (digits / "runs" / "digits" / "run_001" / "metrics.jsonl").read_text().splitlines()
    rates = [line["lr/adam"] for line in map(json.loads, lines) if "lr/adam" in line]
    assert max(rates) == pytest.approx(0.02, rel=0.01)
    assert rates[-1] < 1e-4


@pytest.mark.examples
def test_its_own_tests_pass(digits: Path, environment: dict[str, str]) -> None:
    done = make(digits, environment, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def check(folder: Path, *untyped: str) -> None:
    """Lint a project, and check its formatting and its types, without those of some libraries."""
    with (folder / "pyproject.toml").open("a") as settings:
        settings.write(
            f'\n[[tool.mypy.overrides]]\nmodule = {json.dumps([*UNTYPED, *untyped])}\nfollow_imports = "skip"\n'
        )
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy", "--cache-dir", MYPY_CACHE]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.examples
def test_it_is_linted_formatted_and_typed(digits: Path) -> None:
    check(digits)


def test_it_reads_in_ten_minutes(digits: Path) -> None:
    lines = sum(len(file.read_text().splitlines()) for file in [digits / "main.py", *(digits / "src").glob("*.py")])
    assert lines <= 400


def test_help_explains_every_target(digits: Path, environment: dict[str, str]) -> None:
    listed = {line.split()[0] for line in make(digits, environment, "help").stdout.splitlines()}
    phony = re.search(r"^\.PHONY: (.*)$", (digits / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert listed == set(phony[1].split())


def test_every_setting_of_the_example_reaches_the_commands(digits: Path, environment: dict[str, str]) -> None:
    example = (digits / ".env.example").read_text()
    assert {"HF_TOKEN", "HF_HOME", "WANDB_API_KEY"} < {*re.findall(r"^# ([A-Z_]+)=", example, re.MULTILINE)}
    lines = re.findall(r"^# ([A-Z_]+=.*)", example, re.MULTILINE)
    names = {line.partition("=")[0] for line in lines}
    (digits / ".env").write_text("\n".join(lines))
    (digits / "show.mk").write_text("include Makefile\nshow:\n\t@env\n")
    kept = {name: value for name, value in environment.items() if name not in names}
    shown = make(digits, kept, "-f", "show.mk", "show").stdout.splitlines()
    assert {line for line in shown if line.partition("=")[0] in names} == {*lines}
    (digits / ".env").unlink()
    shown = make(digits, kept, "-f", "show.mk", "show").stdout.splitlines()
    assert [line for line in shown if line.partition("=")[0] in names] == []  # not even empty


def test_bind_checks_without_writing(digits: Path, mlx: Mlx) -> None:
    (digits / "src" / "conf.yaml").unlink()
    done = mlx(digits, "train", "bind", "--check")
    assert done.returncode == 1
    assert done.stderr.startswith("error: src/conf.yaml is not up to date; run: mlx train bind\n")
    assert not (digits / "src" / "conf.yaml").exists()
    mlx(digits, "train", "bind")
    assert mlx(digits, "train", "bind", "--check").stdout == "src/conf.yaml is up to date\n"
    edit(digits / "src" / "tools.py", "patience: int = 5", "patience: int = 6")
    before = (digits / "src" / "conf.yaml").read_text()
    done = mlx(digits, "train", "bind", "--check")
    assert (done.returncode, "updated  tools.early_stopping.patience" in done.stderr) == (1, True)
    assert (digits / "src" / "conf.yaml").read_text() == before
