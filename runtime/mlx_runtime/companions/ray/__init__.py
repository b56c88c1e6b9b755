"""Ray: the engine that places workers on a cluster, streams of rows, preflight checks, uploads and jobs."""

from mlx_runtime.importing import door
from mlx_runtime.settings import prepare_ray

prepare_ray()  # before anything in this companion imports Ray

__all__, __getattr__ = door(
    __name__,
    "addresses cluster_storage commands jobs launch preflight private",
    addresses="Address",
    dashboard="Dashboard job_statuses",
    datajob="DataJob refuse_present run_job",
    doctor="checks",
    node_names="named_nodes",
    reservation="release",
    start="on_ray start_ray",
    stream_reader="StreamReader stream_readers",
    streams="columns_of keep_order make_dataset rows_of_stream stream_blocks stream_of",
)
