"""Words of command lines, and the printing of stored text."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_runtime.cli import mlx, train
from mlx_runtime.cli.xp import echo_stored, group
from mlx_runtime.companions.views.report import read_curves

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "words",
    [
        ["rm", "digits", "", "--yes"],
        ["stop", "digits", " "],
        ["logs", ""],
        ["consolidate", "digits", "--output", ""],
        ["best", "digits", "--metric", ""],
    ],
)
def test_an_empty_word_names_nothing(words: list[str]) -> None:
    done = CliRunner().invoke(group, words)
    assert (done.exit_code, "it is empty; perhaps a shell variable is not set" in done.output) == (2, True)


@pytest.mark.parametrize("words", [["run", "--num_epochs", "3"], ["sweep", "--overfit=5"]])
def test_an_unknown_option_is_refused_with_the_way_to_set_a_value(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "experiment.py").touch()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(train.group, words)
    cure = f"see: mlx train {words[0]} --help; settings are overrides, like cfg.start_workers=2"
    assert str(done.exception) == f"there is no option {words[1]}; {cure}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("xp logs a --rank -1", "Invalid value for '--rank': -1 is not in the range x>=0; see: mlx xp logs --help"),
        ("nope", "No such command 'nope'; see: mlx --help"),
        ("xp rm", "Missing argument 'NAME'; see: mlx xp rm --help"),
    ],
)
def test_a_usage_error_is_one_line(words: str, told: str) -> None:
    done = CliRunner().invoke(mlx, words, prog_name="mlx")
    assert (done.exit_code, done.output) == (2, f"error: {told}\n")


@pytest.mark.parametrize("typed", ["", "n\n"])
def test_without_a_yes_nothing_is_removed(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STORAGE", str(tmp_path))
    folder = tmp_path / "digits/run_001"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "FAILED"}')
    (tmp_path / "data").mkdir()
    for words in ("xp rm digits run_001", "data rm data"):
        done = CliRunner().invoke(mlx, words, prog_name="mlx", input=typed)
        assert (done.exit_code, folder.exists(), (tmp_path / "data").exists()) == (1, True, True)
        assert done.output.splitlines()[-1] == "error: nothing was removed; add -y to skip this question"


def test_of_a_log_only_colors_and_progress_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    echo_stored("\x1b]52;c;aGk=\x07\x1b[2Jrank 0\r50 %\n\x9b31m")
    assert capsys.readouterr().out == "rank 0\r50 %\n\ufffd31m"


def test_damaged_lines_of_metrics_are_counted_but_not_the_last_one_of_a_live_run() -> None:
    problems: list[str] = []
    curves = read_curves('{"step": 1, "epoch": 0, "loss": 0.5}\nbroken\n{"step": 2, "ep', problems)
    assert curves == {"loss": [(1, 0.5, 1, None)]}
    assert problems == ["1 line of metrics.jsonl cannot be read"]
