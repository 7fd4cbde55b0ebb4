"""The exceptions that tdnn adds to Python's own.

A type stands here only when a caller would catch it apart from its base, or when the base prints
badly (``KeyError`` shows the ``repr`` of its message). Everything else is a plain ``ValueError``,
``TypeError`` or ``RuntimeError``.
"""

__all__ = ["FileFormatError", "KeyConflictError", "LockedError", "MissingKeyError", "SwapError"]


class _ReadableKeyError(KeyError):
    """A ``KeyError`` that prints its message as it is."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MissingKeyError(_ReadableKeyError):
    """A key is not in the tree; the message names the nearest one that is."""


class KeyConflictError(_ReadableKeyError):
    """Two entries would stand at one key, or a key would be both a leaf and a branch."""


class LockedError(RuntimeError):
    """A locked tree was asked to add, remove, rename or replace an entry."""


class SwapError(RuntimeError):
    """A swap cannot begin, or what its block assigned cannot be kept."""


class FileFormatError(ValueError):
    """A file is not one that ``save`` wrote, or it was cut or altered."""
