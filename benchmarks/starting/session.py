"""Two runs from Python in one process, as in a notebook: session.py OUT writes the seconds that each took."""

import json
import sys
import time
from pathlib import Path

from mlx_runtime import run
from src.experiment import Experiment


def started(out: Path) -> tuple[float, float]:
    """Train one epoch. Returns the seconds from the call to the end of the first step, and to the end of the run."""
    out.unlink(missing_ok=True)
    begun = time.time()
    run(Experiment, ["cfg.start_workers=0", f"cfg.out={out}"]).result()
    return float(out.read_text().split()[0]) - begun, time.time() - begun


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = {name: started(out) for name in ("cold", "warm")}
    out.write_text(json.dumps(found))
