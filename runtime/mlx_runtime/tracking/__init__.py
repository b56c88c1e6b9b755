"""Metrics and events leaving a run: synchronization, trackers, callbacks and the console."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    callbacks="HOOKS Listeners Report RunInfo hooks_in_workers",
    console="Display TimeLeft",
    epoch_table="EpochTable format_number",
    metric_sync="UPDATED_ON_SOME MetricSync Snapshot SyncMessage SyncedMetric numbers snapshots",
    report_writer="ReportWriter",
    tables="CSV",
    trackers="JSONL TensorBoard flatten read_or_create",
)
