"""A tree of tensors that behaves like one tensor, and what makes modules composable with it."""

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, unravel_key, unravel_key_list
from tdnn.tensordict import TensorDict

__all__ = ["NestedKey", "TensorDict", "TensorDictBase", "unravel_key", "unravel_key_list"]
