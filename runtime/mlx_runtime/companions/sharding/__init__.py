"""Models sharded by FSDP2, and their checkpoints, written and read in parts."""
