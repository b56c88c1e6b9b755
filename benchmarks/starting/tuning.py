"""Trials of the plain script: `tuning.py trial RATE`, `tuning.py optuna|tune RATES`, `tuning.py -m rate=RATES`."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from peers import train
from torch.utils.data import DataLoader

from src.workload import BATCH, Images, Net


def trial(rate: float, out: Path = Path("stepped")) -> None:
    network, loader = Net(), DataLoader(Images(), BATCH, shuffle=True)
    optimizer = torch.optim.Adam(network.parameters(), rate)
    for _ in range(int(os.environ["EPOCHS"])):
        train(network, optimizer, loader, torch.Tensor.backward, out.absolute())


def optuna(rates: list[str]) -> None:
    """Optuna with a subprocess per trial, two at a time."""
    import optuna

    def objective(item: optuna.Trial) -> float:
        command = [sys.executable, __file__, "trial", item.suggest_categorical("rate", rates)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"rate": rates}), direction="maximize")
    study.optimize(objective, n_trials=len(rates), n_jobs=2)


def tune(rates: list[str]) -> None:
    """Ray Tune on an embedded Ray, two trials at a time."""
    from ray import tune

    folder = Path.cwd()

    def function(config: dict[str, str]) -> dict[str, int]:
        trial(float(config["rate"]), folder / "stepped")
        return {"done": 1}

    tuner = tune.Tuner(
        tune.with_resources(function, {"CPU": 1}),
        param_space={"rate": tune.grid_search(rates)},
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), verbose=0),
    )
    assert not tuner.fit().errors


def hydra() -> None:
    """Hydra's multirun with its basic launcher: one process, one trial after another."""
    import hydra
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("tuning", {"rate": 1e-3, "out": str(Path("stepped").absolute())})
    hydra.main(version_base=None, config_name="tuning")(lambda config: trial(config.rate, Path(config.out)))()


if __name__ == "__main__":
    if sys.argv[1] == "trial":
        trial(float(sys.argv[2]))
    elif sys.argv[1] == "optuna":
        optuna(sys.argv[2].split(","))
    elif sys.argv[1] == "tune":
        tune(sys.argv[2].split(","))
    else:
        hydra()
