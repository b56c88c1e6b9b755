"""The position of this worker among all workers, and collectives between them."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "randomness torch_private",
    collectives="agree broadcast data_parallel_group gather mean_of",
    handshake="listening_sockets",
    messages="decode encode",
    peers="lost_peer",
    topology="Topology current device_here get_device",
    wrapping="by_mesh is_sharded local_part prepare_model raised_by_sharded_tensors total_norm unwrap whole",
)
