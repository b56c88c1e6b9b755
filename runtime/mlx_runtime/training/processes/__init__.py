"""Processes that run in the background: forked from a server, and linked to the one that started them."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    background="RunJob conf_of load_bound_config work",
    children="die_with_parent exit_reason memory_kills unsafe_to_fork",
    fork_server="ForkServer",
    links="PRUNE Link RunProcess",
    standby="get_server",
)
