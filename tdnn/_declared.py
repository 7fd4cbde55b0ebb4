"""What a tree says of its leaves: the batch dims, their names, and the device."""

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from tdnn._keys import NestedKey, Path, as_key, as_path
from tdnn._lock import Lockable, locked
from tdnn._node import Names, Node

__all__ = [
    "NO_BATCH",
    "Declared",
    "Device",
    "as_device",
    "as_size",
    "common_start",
    "negative",
    "on_device",
]

Device: TypeAlias = torch.device | str | int


class Declared(Lockable):
    """batch_size, auto_batch_size_, batch_dims, dim, size, numel, device, names, is_empty."""

    __slots__ = ()

    @property
    def batch_size(self) -> torch.Size:
        """The dims that every leaf begins with; set it to declare more or fewer of them.

        Raises:
            ValueError: a leaf does not begin with them; all are listed.
            LockedError: the tree, or a branch that would change, is locked.
        """
        return self._batch_size

    @batch_size.setter
    def batch_size(self, size: Sequence[int] | int) -> None:
        if self._lock is not None and as_size(size) != self._batch_size:
            raise locked("change the batch size of the tree")
        self._set_batch_size(as_size(size))

    shape = batch_size

    def _set_batch_size(self, size: torch.Size) -> None:
        """Declare ``size`` here, and below where a branch does not have it, after checking all."""
        depth = len(size)
        wrong = [
            f"{as_key(path)!r} of shape {tuple(leaf.shape)}"
            for path, leaf in self._leaves()
            if leaf.shape[:depth] != size
        ]
        if wrong:
            raise ValueError(f"batch size {tuple(size)} does not fit {', '.join(wrong)}")
        if any([branch._is_held_to_another(size) for branch in self._branches()]):
            raise locked("change the batch size of a branch")
        self._declare_size(size)

    def _is_held_to_another(self, size: torch.Size) -> bool:
        """Return whether this branch, or one below, is locked and would get another batch size."""
        if self._batch_size[: len(size)] == size:
            return False
        below = self._branches()
        return self._lock is not None or any([each._is_held_to_another(size) for each in below])

    def _declare_size(self, size: torch.Size) -> None:
        self._batch_size = size
        if self._names is not None:
            self._names = (*self._names, *[None] * len(size))[: len(size)]
        for branch in self._branches():
            if branch._batch_size[: len(size)] != size:
                branch._declare_size(size)

    def auto_batch_size_(
        self, batch_dims: int | None = None, keep_compliant_size: bool = False
    ) -> Self:
        """Declare all the dims that the entries share, here and in every branch.

        Args:
            batch_dims: the most dims that a node declares.
            keep_compliant_size: branches that declare ``batch_dims`` or more keep what they have.

        Returns:
            The tree itself. A branch without leaves takes the batch size of the tree around it;
            a tree without leaves keeps its own.

        Raises:
            LockedError: a batch size would change in a locked tree.
            ValueError: ``batch_dims`` is negative.

        Example:
            >>> td = TensorDict({"a": torch.zeros(3, 4, 5), "b": {"c": torch.zeros(3, 4, 6)}})
            >>> td.auto_batch_size_().batch_size, td["b"].batch_size
            (torch.Size([3, 4]), torch.Size([3, 4, 6]))
        """
        if batch_dims is not None and batch_dims < 0:
            raise ValueError(f"batch_dims is how many dims to declare, not {batch_dims}")
        self._refuse_lost_write()
        plan: list[tuple[Declared, torch.Size]] = []
        self._plan_sizes(batch_dims, batch_dims if keep_compliant_size else None, plan, top=True)
        if any([node._lock is not None and node._batch_size != size for node, size in plan]):
            raise locked("change the batch size of the tree")
        for node, size in plan:
            node._declare_size(size)
        return self

    def _plan_sizes(
        self,
        most: int | None,
        enough: int | None,
        plan: list[tuple["Declared", torch.Size]],
        top: bool = False,
    ) -> torch.Size | None:
        """Note the largest batch sizes from the bottom up; None where there is no leaf."""
        shapes = []
        for value in self._data.values():
            inner = isinstance(value, Declared)
            shape = value._plan_sizes(most, enough, plan) if inner else value.shape
            if shape is not None:
                shapes.append(shape)
        if not top and enough is not None and len(self._batch_size) >= enough:
            return self._batch_size
        if not shapes:
            return None
        size = common_start(shapes)[:most]
        plan.append((self, size))
        return size

    def _declare_everywhere(self, size: torch.Size, names: Names) -> None:
        """Take a batch size here and in every branch; there is no leaf to contradict it."""
        self._batch_size = size
        self._names = names
        for branch in self._branches():
            branch._declare_everywhere(size, names)

    @property
    def batch_dims(self) -> int:
        """The number of batch dims."""
        return len(self._batch_size)

    ndim = batch_dims

    def dim(self) -> int:
        """Return the number of batch dims.

        Example:
            >>> TensorDict({}, [3, 4]).dim()
            2
        """
        return len(self._batch_size)

    ndimension = dim

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the batch size, or its entry for ``dim``.

        Example:
            >>> TensorDict({}, [3, 4]).size(1)
            4
        """
        return self._batch_size if dim is None else self._batch_size[dim]

    def numel(self) -> int:
        """Return the number of batch elements, 1 without batch dims.

        Example:
            >>> TensorDict({}, [3, 4]).numel()
            12
        """
        return self._batch_size.numel()

    @property
    def device(self) -> torch.device | None:
        """The device that entries are moved to when they are set; None leaves them be."""
        return self._device

    def _declare_device(self, device: torch.device | None) -> None:
        """Declare the device here and below; the leaves are there already."""
        self._device = device
        for branch in self._branches():
            branch._declare_device(device)

    @property
    def names(self) -> list[str | None]:
        """The names of the batch dims, None for a dim without one; a new list each time.

        Raises:
            TypeError: (on setting) a name is neither a ``str`` nor None.
            ValueError: there is not one name for each dim, or one name twice.
        """
        return [None] * len(self._batch_size) if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        self._set_names(None if names is None else tuple(names))

    def _set_names(self, names: Names) -> None:
        """Name the dims here and, in branches, those that they share; after checking all."""
        plan: list[tuple[Declared, Names]] = []
        self._plan_names(names, plan)
        for node, chosen in plan:
            node._names = chosen

    def _plan_names(self, names: Names, plan: list[tuple["Declared", Names]]) -> None:
        depth = len(self._batch_size)
        given = [name for name in names or () if name is not None]
        if not all(isinstance(name, str) for name in given):
            raise TypeError(f"the name of a dim is a str or None, not as in {list(names or ())}")
        if names is not None and (len(names) != depth or len(set(given)) != len(given)):
            raise ValueError(
                f"{list(names)} cannot name {depth} batch dims: one name each, no name twice"
            )
        plan.append((self, names if given else None))
        for branch in self._branches():
            mine = (*(names or (None,) * depth), *(branch._names or ())[depth:])
            size = len(branch._batch_size)
            branch._plan_names((*mine, *[None] * size)[:size], plan)

    def _with_dim_names(self, names: tuple[str | None, ...], key: NestedKey) -> Self:
        """Return this tree with ``names`` for its first dims: itself, or new nodes.

        ``key`` is where it is going to stand.

        Raises:
            ValueError: a dim has another name, here or in a branch.
        """
        faults: list[str] = []
        made = self._name_dims(names, as_path(key), faults)
        if faults:
            raise ValueError(f"cannot set {'; '.join(faults)}; set its .names first, or to None")
        return made

    def _name_dims(self, names: tuple[str | None, ...], path: Path, faults: list[str]) -> Self:
        mine = self._names or (None,) * len(self._batch_size)
        pairs = list(zip(names, mine, strict=False))  # a branch below may have fewer dims
        first = [new or old for new, old in pairs]
        chosen = (*first, *mine[len(first) :])
        given = [name for name in chosen if name is not None]
        if any([new != old for new, old in pairs if new and old]) or len(set(given)) < len(given):
            faults.append(
                f"{as_key(path)!r}: its dims are named {list(mine)}, the tree's {list(names)}"
            )
        changed = {}
        for key, value in self._data.items():
            if isinstance(value, Declared):
                below = value._name_dims(chosen, (*path, key), faults)
                if below is not value:
                    changed[key] = below
        if chosen == mine and not changed:
            return self
        return self._like({**self._data, **changed}, self._batch_size, chosen)

    def is_empty(self) -> bool:
        """Return whether there is no leaf anywhere in the tree.

        Example:
            >>> TensorDict({"a": {}}).is_empty()
            True
        """
        return not self._leaves()

    def __len__(self) -> int:
        return self._batch_size[0] if self._batch_size else 0

    def __bool__(self) -> bool:
        raise RuntimeError(
            "a tree has no truth value; use td.is_empty(), len(td.keys()) or (a == b).all()"
        )


def as_size(size: Sequence[int] | int | None) -> torch.Size:
    """Return a batch size as a user may write it: several ints, one, or None for no dims.

    Raises:
        TypeError: it is anything else.
        ValueError: an entry is negative.

    Example:
        >>> as_size([3, 4]), as_size(3), as_size(None)
        (torch.Size([3, 4]), torch.Size([3]), torch.Size([]))
    """
    if type(size) is torch.Size:
        made = size
    elif size is None:
        return NO_BATCH
    else:
        try:
            made = torch.Size((size,) if isinstance(size, int) else size)
        except TypeError:
            made = _of_one(size)
    for n in made:  # one by one: min() compares two sizes, which torch.compile may not know
        if n < 0:
            raise negative(made)
    return made


def negative(size: torch.Size) -> ValueError:
    return ValueError(f"a batch size has no negative entries: {tuple(size)}")


NO_BATCH = torch.Size(())


def _of_one(size: Any) -> torch.Size:
    """Return the size of one dim for an integer of any kind, such as numpy's."""
    try:
        return torch.Size((operator.index(size),))
    except TypeError:
        raise TypeError(f"a batch size is an int or a sequence of ints, not {size!r}") from None


def common_start(shapes: Sequence[Sequence[int]]) -> torch.Size:
    """Return the longest beginning that all the shapes have; no dims, if there are none."""
    common = torch.Size(shapes[0]) if shapes else torch.Size(())
    for shape in shapes:
        while common != tuple(shape[: len(common)]):
            common = common[:-1]
    return common


def on_device(value: Any, device: torch.device, non_blocking: bool, memo: dict[Any, Any]) -> Any:
    """Return a value with its tensors moved to a device, each once, so that ties stay.

    Args:
        value: a tensor, or a tuple, mapping or tree of values; others are returned as they are.
        device: where to.
        non_blocking: as for ``Tensor.to``.
        memo: what was moved so far.
    """
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if value not in memo:
            memo[value] = value.to(device, non_blocking=non_blocking)
        return memo[value]
    if isinstance(value, Node):
        if value._device == device or type(value) is not value._kind:
            return value
        move = partial(on_device, device=device, non_blocking=non_blocking, memo=memo)
        return value._rebuild(move, value._batch_size, value._names)
    if isinstance(value, Mapping):
        return {key: on_device(each, device, non_blocking, memo) for key, each in value.items()}
    if type(value) is tuple:
        return tuple([on_device(each, device, non_blocking, memo) for each in value])
    return value


def as_device(device: Device) -> torch.device:
    """Return the device with its index, so that "cuda" and "cuda:0" are one."""
    made = torch.device(device)
    if made.type == "cuda" and made.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return made
