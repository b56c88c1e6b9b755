"""`make test-gpu`: run the tests of the ring `gpu` on a machine with GPUs, and print figures for docs/benchmarks.md.

It needs no network, and exits with 2 if there is no GPU, or if packages are missing, which it then names.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

FILE = ROOT / "tests" / "runtime" / "workers" / "test_gpu.py"

TESTS = ("pytest", "pytest-timeout")
"""What the tests need besides the runtime."""


def missing() -> list[str]:
    """Return the requirements of the runtime and its tests that are not installed, as pip takes them."""
    text = (ROOT / "runtime" / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    lacking = []
    for requirement in (*re.findall(r'^ *"(.+?)",', text, flags=re.MULTILINE), *TESTS):
        try:
            importlib.metadata.version(re.split(r"[\[<>=]", requirement)[0])
        except importlib.metadata.PackageNotFoundError:
            lacking.append(requirement)
    return lacking


def problem() -> str | None:
    """Return why the tests cannot run with this Python, or None."""
    lacking = missing()
    if any(item.startswith("torch>") for item in lacking):
        return f"torch is not installed for {sys.executable}"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} finds no GPU; see nvidia-smi"
    return f"missing for {sys.executable}: {' '.join(lacking)}" if lacking else None


def main(arguments: list[str]) -> int:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if reason := problem():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    import torch

    tested = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    if tested and not torch.__version__.startswith(tested[1]):
        print(f"warning: torch is {torch.__version__}, and the runtime is tested with {tested[1]}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.jsonl")
        variables = {"PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--durations=5"]
        command += [str(FILE), *arguments]
        environment = os.environ | variables | {"MLX_GPU_FIGURES": str(figures)}
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        rows = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    if rows:
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        print(f"\n{len(names)} x {names[0]}, torch {torch.__version__}\n\n{table(rows)}")
    return code


def table(rows: list[dict[str, str]]) -> str:
    """Return a table in Markdown with a line for each row; all have the same keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
