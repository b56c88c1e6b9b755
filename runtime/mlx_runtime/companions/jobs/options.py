"""Settings of every data job."""

from dataclasses import dataclass, fields
from typing import Any

from mlx_runtime.sections import at_least
from mlx_runtime.storage.documents import name_problem


@dataclass
class DataConfig:
    """Settings of a data job, `cfg` in conf.yaml. Add your own by inheriting in `src/job.py`.

    Attributes:
        name: name of the job.
        path: folder in the storage that the job fills; None means `data/<name>`.
        overwrite: replace the result of an earlier data job in that folder when this one is done; otherwise, refuse to
            start.
        resume: start with the finished items of this job if it was interrupted, as `--resume` does.
        start_workers: maximum number of concurrent tasks; 0 runs them in this process, where a debugger works.
        cpus_per_worker: CPU cores per task.
        runtime_env: the same as for training.
        secrets: the same as for training.
        use_gpu: one GPU per task.
        storage_path: folder or URI; a relative folder is below the data job. `MLX_STORAGE` overrides it.
    """

    name: str = "data"
    path: str | None = None
    overwrite: bool = False
    resume: bool = False
    start_workers: int = at_least(0, 2)
    cpus_per_worker: int = at_least(1, 1)
    runtime_env: dict[str, Any] | None = None
    secrets: tuple[str, ...] = ()
    use_gpu: bool = False
    storage_path: str = "storage"

    @staticmethod
    def out_of_range(cfg: Any) -> list[str]:
        """Return one line per setting that is out of range."""
        problems = [item for item in [name_problem("cfg.name", cfg.name)] if item]
        for item in fields(DataConfig):
            value, least = getattr(cfg, item.name), item.metadata.get("minimum")
            if least is not None and value < least:
                problems.append(f"cfg.{item.name} is {value}; the minimum is {least}")
        return problems
