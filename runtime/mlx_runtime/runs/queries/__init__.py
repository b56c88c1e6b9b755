"""Questions about runs: listing, lookup, the best one, and reading one from Python."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    listing="STATUSES UNREADABLE AskJobs Row empty_message list_rows map_concurrently summarize table",
    lookup="NO_STORAGE StoragePath conf_value find_checkpoint reached resolve_checkpoint resolve_run storage_root",
    ranking="best best_lines",
    reader="Run matching_code open_run",
)
