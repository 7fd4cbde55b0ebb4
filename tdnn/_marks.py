"""Objects that stand for no value, none of which a user could mean."""

from enum import Enum
from typing import Any

__all__ = ["ABSENT", "KEEP", "NO_DEFAULT"]


class _Mark(Enum):  # dynamo of torch 2.14 knows an Enum as a default, not any other class
    NO_DEFAULT = "no default"
    KEEP = "as it is"

    def __repr__(self) -> str:
        """Return the meaning, as ``help()`` shows it."""
        return f"<{self.value}>"


NO_DEFAULT: Any = _Mark.NO_DEFAULT
KEEP: Any = _Mark.KEEP
ABSENT: Any = object()  # what is not there, where None may be
