"""Checkpoints: saving and restoring everything that changes while an experiment trains.

A checkpoint is a folder that is published atomically:

checkpoints/epoch_0004/
    state.pt           everything, as plain values and tensors: reading it never runs code (`weights_only=True`)
    checkpoint.json    its description, its numbers, and the SHA-256 of state.pt

If the models of a run are sharded over the workers, each worker writes its parts:

    index.json                  name, type and shape of each sharded tensor, and the position of its parts
    shard_00000.safetensors     parts held by rank 0, in pieces of about 8 MiB
    shard_00001.safetensors     ...

`state.pt` then refers to tensors by their name in the index. `checkpoint.json` contains the SHA-256 of the index, and
the index those of all pieces. Any number of workers can load a checkpoint: see `layouts`.

`state.pt` is a dict; `ranks` has one entry per worker, replica by replica:

    {"epoch": 3, "finished": True, "global_step": 180, "seed": 0, "world_size": 2, "replica_sizes": [1, 1],
     "config": saved conf.yaml,
     "models": {name: state}, "optimizers": {name: state}, "tools": {name: state}, "own": {name: state},
     "loaders": {name: position in its pass}, "numbers": {"latest": ..., "unreported": ...},
     "tracking": {"sizes": {file: length in bytes}, "reports": count, "seconds": trained}, "scaler": state,
     "on_device": [attribute of a tool that was on a GPU, ...],
     "ranks": [{"random": ..., "metrics": {name: state}, "losses": {name: state}}, ...]}
"""
