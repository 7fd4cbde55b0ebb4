"""How many names modules have registered so far.

A parameter or buffer that is registered again goes to the end of its module's names. As long as
the number is the same, the names of every module are in the order that they had.
"""

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

__all__ = ["registrations"]

_count = 0


def registrations() -> int:
    """Return the number of registrations of parameters and buffers since the import."""
    return _count


def _note(module: nn.Module, name: str, value: object) -> None:
    global _count
    if not is_compiling():  # where the number would be a guard, and every call a recompile
        _count += 1


register_module_parameter_registration_hook(_note)
register_module_buffer_registration_hook(_note)
