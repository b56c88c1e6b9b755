"""Updates the blocks of README.md that show the output of commands, between comments that name them."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SECTION = "<!-- {name} -->\n```text\n{text}```\n<!-- end of {name} -->"


def section(name: str) -> str:
    """Return the text between the comments of a section of README.md.

    Raises:
        ValueError: README.md has no such section.
    """
    found = re.search(SECTION.format(name=re.escape(name), text="(.*?)"), README.read_text(), re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no section {name!r}")
    return found[1]


def replace(name: str, text: str) -> None:
    """Replace the text between the comments of a section."""
    old, new = (SECTION.format(name=name, text=part) for part in (section(name), text))
    README.write_text(README.read_text().replace(old, new))


def experiment_help(experiment: Path) -> str:
    """Return the output of `make help` in a generated experiment."""
    done = subprocess.run(["make", "-s", "help"], cwd=experiment, capture_output=True, text=True, check=True)
    return done.stdout


def experiment_tree(experiment: Path) -> str:
    """Return the files of a generated experiment, each Python file with the first line of its docstring."""
    files = sorted(path for path in experiment.rglob("*") if path.is_file())
    lines = []
    for path in sorted(files, key=lambda path: (len(path.relative_to(experiment).parts) > 1, path)):
        name = str(path.relative_to(experiment))
        first = path.read_text().splitlines()[0].strip('"# ')
        lines.append(f"{name:<26} {first}" if path.suffix == ".py" else name)
    return "\n".join(lines) + "\n"


def demo_output() -> str:
    """Return the output of a second `make demo`, without paths of this machine and without most epochs."""
    done = subprocess.run(["make", "-s", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.replace(str(ROOT), "~/mlx").splitlines()
    epochs = [index for index, line in enumerate(lines) if re.match(r" *\d+/\d+ ", line)]
    return "\n".join([*lines[: epochs[2]], "…", *lines[epochs[-3] :]]) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mlx_runtime", "train", "new", "digits", "-o", folder]
        subprocess.run(command, check=True, capture_output=True)
        replace("experiment help", experiment_help(Path(folder) / "digits"))
        replace("experiment tree", experiment_tree(Path(folder) / "digits"))
    shutil.rmtree(ROOT / "demo", ignore_errors=True)
    replace("demo output", demo_output())


if __name__ == "__main__":
    main()
