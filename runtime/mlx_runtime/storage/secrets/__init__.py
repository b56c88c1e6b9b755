"""Secrets: their detection in texts and settings, and their removal from what is written."""

from mlx_runtime.importing import door

__all__, __getattr__ = door(
    __name__,
    detection="HIDDEN LEFT_OUT find is_secret",
    redaction="FILES hidden_texts redact redact_override redact_tree secret_keys unredact",
)
