"""Files in a folder or an object store: published whole or not at all, read within limits, free of secrets."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    "documents leases local",
    files=(
        "DOCUMENT_BYTES LocalStorage Storage Stored is_uri join_path parent_of prepared_root size_text split_options "
        "storage_at storage_errors storage_root to_json"
    ),
    hashing="HashingReader HashingWriter",
    publishing="Publication create_whole leftovers recover unpublish",
)
