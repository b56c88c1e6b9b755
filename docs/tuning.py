"""Tunes the template's experiment: writes the table in README.md, and a picture of the report to docs/sweep.png."""

import subprocess
import tempfile
from pathlib import Path

import readme
from screenshot import MLX, ROOT, Browser

from mlx_runtime.companions.sweeps.report import render_sweep
from mlx_runtime.companions.sweeps.results import SweepResult
from mlx_runtime.runs.folder import run_folder

SHORT = ("cfg.start_workers=0", "cfg.num_epochs=5")
SPACE = (
    "optimizers.adam.lr=tag(log,interval(1e-3,5e-2))",
    "models.net.dropout=interval(0,0.5)",
    "datasets.train.batch_size=8,16,32",
    "tools.schedule.warmup_steps=int(interval(1,50))",
)
SEARCH = ("--trials", "40", "--scheduler", "asha")
METRIC = ("--metric", "val/cross_entropy", "--mode", "min")
SEEDS = "cfg.seed=1,2,3,4,5,6,7,8,9,10"  # not that of the search


def sweep(folder: Path, name: str, *words: str) -> SweepResult:
    """Run a sweep of an experiment by its command."""
    command = [*MLX, "train", "sweep", "--name", name, *SHORT, *METRIC, *words]
    subprocess.run(command, cwd=folder, check=True)
    return SweepResult(run_folder(str(folder / "runs"), "digits", f"sweep_{name}"))


def row(title: str, result: SweepResult) -> str:
    """Return a line with mean and standard deviation over the trials."""
    table = result.table()
    found = [table[name] for name in ("val/cross_entropy", "val/accuracy")]
    return "  ".join([f"{title:<14}", *(f"{item.mean():.4f} ± {item.std():.4f}" for item in found)])


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        subprocess.run([*MLX, "train", "new", "digits", "-o", parent], check=True, stdout=subprocess.DEVNULL)
        folder = Path(parent, "digits")
        tuned = sweep(folder, "tuning", *SPACE, *SEARCH)
        defaults = sweep(folder, "defaults", SEEDS)
        best = sweep(folder, "best", SEEDS, *tuned.best.overrides)
        lines = [
            f"best of {len(tuned.trials)} trials: {' '.join(tuned.best.overrides)}",
            "",
            f"{'10 seeds':<14}  val/cross_entropy  val/accuracy",
            row("defaults", defaults),
            row("best trial", best),
        ]
        readme.replace("tuning", "\n".join(lines) + "\n")
        (folder / "report.html").write_text(render_sweep(tuned))
        (folder / "browser").mkdir()
        with Browser(folder / "browser") as browser:
            page = browser.page(width=1200, height=1000)
            page.open(folder / "report.html")
            page.evaluate("document.querySelector('dl').parentElement.remove()")  # paths of this machine
            page.evaluate("document.querySelector('.wide').previousElementSibling.remove()")
            page.evaluate("document.querySelector('.wide').remove()")  # the table of all trials
            page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
            page.picture(ROOT / "docs" / "sweep.png")


if __name__ == "__main__":
    main()
