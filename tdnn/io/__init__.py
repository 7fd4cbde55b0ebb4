"""Trees on disk."""
