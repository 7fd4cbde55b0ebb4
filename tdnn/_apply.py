"""A user's function over the leaves."""

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch

from tdnn._core import IsLeaf, TensorDictBase
from tdnn._declared import as_device, as_size
from tdnn._keys import Path, as_key
from tdnn._marks import KEEP, NO_DEFAULT
from tdnn._writes import Write, write

__all__ = ["Apply"]


class Apply(TensorDictBase):
    """apply, apply_ and named_apply."""

    __slots__ = ()

    def apply(
        self,
        fn: Callable[..., Any],
        *others: TensorDictBase,
        batch_size: Sequence[int] | None = None,
        device: Any = KEEP,
        names: Any = KEEP,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
    ) -> Self | None:
        """Return a tree of ``fn(leaf, *other_leaves)``.

        Args:
            fn: gives a tensor ``(*B, ...)``, or None to leave the entry out. With no ``others``
                it is called once for a leaf that stands under several names, and the results
                are tied as the leaves were.
            *others: trees with the same keys, paired by name.
            batch_size: the batch size ``B`` of the result; by default the one of this tree.
            device: the device of the result, or None for none.
            names: the names of the batch dims of the result.
            inplace: copy the results into this tree's leaves, and return this tree.
            default: passed to ``fn`` for a leaf that one of ``others`` lacks; what only they
                have is then passed over.
            filter_empty: drop empty branches from the result (True), keep them (False), or drop
                only those that ``fn`` emptied (None).
            propagate_lock: lock the result if this tree is locked.
            call_on_nested: call ``fn`` on the top-level entries, branches included.
            is_leaf: takes a type; ``fn`` is called on branches of a type for which it is true.

        Returns:
            A new tree, this tree with ``inplace``, or None if ``fn`` gave None for every leaf
            (and ``filter_empty`` is not False).

        Raises:
            MissingKeyError: one of ``others`` has other keys and there is no ``default``; all are
                listed, and ``fn`` was not called.
            ValueError: a result does not begin with the batch size.

        Example:
            >>> TensorDict({"a": {"b": torch.ones(2)}}).apply(lambda leaf: leaf + 1)["a", "b"]
            tensor([2., 2.])
        """
        run = _Run(
            lambda _, leaf, *rest: fn(leaf, *rest), default, filter_empty, call_on_nested, is_leaf
        )
        run.memo = None if others else {}
        return self._finish(run, others, batch_size, device, names, inplace, propagate_lock)

    def apply_(self, fn: Callable[..., Any], *others: TensorDictBase, **kwargs: Any) -> Self:
        """Copy ``fn(leaf, *other_leaves)`` into each leaf; see :meth:`apply`.

        Example:
            >>> TensorDict({"a": torch.ones(2)}).apply_(lambda leaf: leaf * 3)["a"]
            tensor([3., 3.])
        """
        return cast(Self, self.apply(fn, *others, inplace=True, **kwargs))

    def named_apply(
        self,
        fn: Callable[..., Any],
        *others: TensorDictBase,
        nested_keys: bool = False,
        batch_size: Sequence[int] | None = None,
        device: Any = KEEP,
        names: Any = KEEP,
        inplace: bool = False,
        default: Any = NO_DEFAULT,
        filter_empty: bool | None = None,
        propagate_lock: bool = False,
        call_on_nested: bool = False,
        is_leaf: IsLeaf | None = None,
    ) -> Self | None:
        """Return a tree of ``fn(key, leaf, *other_leaves)``.

        Args:
            fn: as in :meth:`apply`, with the key first; called for every name of a tied leaf.
            *others: as in :meth:`apply`, like the arguments below.
            nested_keys: give the whole key, a tuple below the top level; otherwise its last part.
            batch_size: see :meth:`apply`.
            device: see :meth:`apply`.
            names: see :meth:`apply`.
            inplace: see :meth:`apply`.
            default: see :meth:`apply`.
            filter_empty: see :meth:`apply`.
            propagate_lock: see :meth:`apply`.
            call_on_nested: see :meth:`apply`.
            is_leaf: see :meth:`apply`.

        Returns:
            As :meth:`apply`.

        Example:
            >>> td = TensorDict({"a": {"b": torch.ones(2)}, "c": torch.ones(2)})
            >>> kept = td.named_apply(lambda key, leaf: leaf if key == "b" else None)
            >>> list(kept.keys(True, True))
            [('a', 'b')]
        """

        def named(path: Path, leaf: Any, *rest: Any) -> Any:
            return fn(as_key(path) if nested_keys else path[-1], leaf, *rest)

        run = _Run(named, default, filter_empty, call_on_nested, is_leaf)
        return self._finish(run, others, batch_size, device, names, inplace, propagate_lock)

    def _finish(
        self,
        run: "_Run",
        others: tuple[TensorDictBase, ...],
        batch_size: Sequence[int] | None,
        device: Any,
        names: Any,
        inplace: bool,
        propagate_lock: bool,
    ) -> Self | None:
        for at, other in enumerate(others):
            if not isinstance(other, TensorDictBase):
                raise TypeError(
                    f"apply pairs this tree with other trees, not {type(other).__name__}"
                )
            if run.default is NO_DEFAULT and not run.matches(self, other):
                err = self._unpaired(other)
                err.add_note(f"the second is others[{at}]; pass default= for what a tree may lack")
                raise err
        if batch_size is not None:
            run.batch_size = as_size(batch_size)
        if device is not KEEP:
            run.device = None if device is None else as_device(device)
        if inplace:
            run.write(self, others)
            return self
        result = run.new(self, others, ())
        if result is None:
            return None
        if names is not KEEP:
            result.names = names
        if propagate_lock and self._lock is not None:
            result.lock_()
        return cast(Self, result)


class _Run:
    """One call of ``apply``: the function and how to call it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        default: Any,
        filter_empty: bool | None,
        call_on_nested: bool,
        is_leaf: IsLeaf | None,
    ) -> None:
        self.fn = fn
        self.default = default
        self.filter_empty = filter_empty
        self.call_on_nested = call_on_nested
        self.is_leaf = is_leaf
        self.memo: dict[Any, Any] | None = None
        self.batch_size: torch.Size | None = None
        self.device: Any = KEEP

    def enters(self, value: Any) -> bool:
        """Return whether ``value`` is a branch to go into, rather than something to call on."""
        return (
            isinstance(value, TensorDictBase)
            and not self.call_on_nested
            and not (self.is_leaf is not None and self.is_leaf(type(value)))
        )

    def call(self, path: Path, leaf: Any, rest: list[Any]) -> Any:
        """Return the function's value for a leaf, from the memo if the leaf was seen."""
        if self.memo is not None:
            if leaf not in self.memo:
                self.memo[leaf] = self.fn(path, leaf)
            return self.memo[leaf]
        return self.fn(path, leaf, *rest)

    def matches(self, node: TensorDictBase, other: Any) -> bool:
        """Return whether another tree has the keys of this one, wherever this one is entered."""
        if not isinstance(other, TensorDictBase) or other._data.keys() != node._data.keys():
            return False
        return all(
            [
                self.matches(value, other._data[key])
                if self.enters(value)
                else isinstance(value, TensorDictBase)
                is isinstance(other._data[key], TensorDictBase)
                for key, value in node._data.items()
            ]
        )

    def paired(self, key: str, others: tuple[Any, ...]) -> list[Any]:
        """Return what the other nodes have at a key."""
        return [
            other._data.get(key, self.default)
            if isinstance(other, TensorDictBase)
            else self.default
            for other in others
        ]

    def new(
        self, node: TensorDictBase, others: tuple[Any, ...], above: Path
    ) -> TensorDictBase | None:
        """Return the tree of results, or None if it is to be left out."""
        size = node._batch_size if self.batch_size is None else self.batch_size
        names = node._names if self.batch_size is None else None
        result = node._like({}, size, names)
        if self.device is not KEEP:
            result._device = self.device
        for key, value in node._data.items():
            path = (*above, key)
            rest = self.paired(key, others)
            if self.enters(value):
                below = self.new(value, tuple(rest), path)
                if below is not None:
                    result._data[key] = below
                continue
            given = self.call(path, value, rest)
            if given is not None:
                try:
                    result._data[key] = result._admit(given, as_key(path))
                except ValueError as err:
                    if size and self.batch_size is None:
                        err.add_note("if fn changes the batch dims, give apply(batch_size=...)")
                    raise
        emptied = not result._data and (bool(node._data) or self.filter_empty is True)
        return None if emptied and self.filter_empty is not False else result

    def write(self, node: TensorDictBase, others: tuple[Any, ...]) -> None:
        """Copy the results into the leaves of ``node``, once all of them are known and fit."""
        node._refuse_lost_writes()
        writes: list[Write] = []
        self._gather(node, others, (), writes)
        write(writes)

    def _gather(
        self, node: TensorDictBase, others: tuple[Any, ...], above: Path, writes: list[Write]
    ) -> None:
        for key, value in node._data.items():
            path = (*above, key)
            rest = self.paired(key, others)
            if self.enters(value):
                self._gather(value, tuple(rest), path, writes)
                continue
            given = self.call(path, value, rest)
            if given is not None and given is not value:
                writes += node._copies(as_key(path), value, given)
