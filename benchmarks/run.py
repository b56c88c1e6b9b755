"""Compares mlx with other frameworks in one run, by medians of alternating rounds: `make bench`.

Writes docs/benchmarks.md. Nothing here passes or fails; the figures are for the reader.
"""

import argparse
import os
import signal
import sys

import page
import rounds
from parts import (
    bucketing,
    checkpoints,
    clusters,
    compression,
    encryption,
    fragments,
    functions,
    imports,
    links,
    logging,
    memory,
    mirror,
    nnx,
    planning,
    reading,
    replicas,
    serving,
    sharding,
    starting,
    sweeps,
    training,
)

PARTS = {
    "starting": starting,
    "functions": functions,
    "clusters": clusters,
    "imports": imports,
    "training": training,
    "nnx": nnx,
    "reading": reading,
    "bucketing": bucketing,
    "logging": logging,
    "checkpoints": checkpoints,
    "mirror": mirror,
    "sharding": sharding,
    "memory": memory,
    "planning": planning,
    "links": links,
    "encryption": encryption,
    "fragments": fragments,
    "compression": compression,
    "replicas": replicas,
    "serving": serving,
    "sweeps": sweeps,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, help="measure and write only this section")
    parser.add_argument(
        "--only", nargs="*", metavar="CONTENDER", help="measure only these and the first; write nothing"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that parts remove what they have made
    for name in [options.part] if options.part else PARTS:
        rounds.failures.clear()
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        text = PARTS[name].section(options.rounds, options.only)
        if rounds.failures:
            repeated = ", ".join(f"{count} of {contender}" for contender, count in rounds.failures.items())
            text += f"\nRuns that failed and were repeated: {repeated}.\n"
        if text and load > cores:
            text += f"\nThe machine was shared with other work: its load was {load:.0f} when measurements began.\n"
        print(text, flush=True)
        if text and not options.only:
            page.write(PARTS[name].TITLE, text, order=[part.TITLE for part in PARTS.values()])


if __name__ == "__main__":
    main()
