"""A tree as a ``state_dict``, in the format of ``nn.Module``."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor

from tdnn._core import TensorDictBase, locked
from tdnn._keys import Path, as_key, listing
from tdnn.errors import KeyConflictError

__all__ = ["States"]

Found: TypeAlias = tuple[dict[Path, Any], dict[Path, torch.Size]]  # values, batch sizes of nodes


class States(TensorDictBase):
    """state_dict and load_state_dict."""

    __slots__ = ()

    def state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = True,
    ) -> "OrderedDict[str, Any]":
        """Return the leaves by name in an ``OrderedDict``, as ``nn.Module.state_dict`` does.

        The attribute ``_metadata`` of the result has, for each node, a dict of its batch size and
        device under the node's name (``""`` for the tree itself).

        Args:
            destination: an ``OrderedDict`` to add the entries to.
            prefix: put before every name.
            keep_vars: keep the tensors as they are, not detached from autograd.
            flatten: join the parts of a key with dots; otherwise a branch is an ``OrderedDict``
                too, with its own ``_metadata``.

        Returns:
            Views of the tensors, or the tensors with ``keep_vars``; a tie stays one tensor.

        Raises:
            KeyConflictError: two entries would have one name; all such names are listed.

        Example:
            >>> td = TensorDict({"0": {"weight": torch.zeros(2)}}, [2])
            >>> dict(td.state_dict())
            {'0.weight': tensor([0., 0.])}
        """
        tree = self if keep_vars else self._rebuild(Tensor.detach, self._batch_size, self._names)
        state: OrderedDict[str, Any] = OrderedDict()
        known: OrderedDict[str, Any] = OrderedDict()
        twice: list[str] = []
        _add(tree, prefix, flatten, state, known, twice)
        if destination is None:
            destination = OrderedDict()
        twice += [name for name in state if name in destination]
        if twice:
            raise KeyConflictError(
                f"two entries would have one name in the state dict: {listing(twice)}; rename "
                "one of each, or use flatten=False"
            )
        if not hasattr(destination, "_metadata"):
            destination._metadata = OrderedDict()
        destination._metadata.update(known)
        destination.update(state)
        return cast("OrderedDict[str, Any]", destination)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        from_flatten: bool | None = None,
    ) -> Self:
        """Copy the values of a state dict into the tree and return the tree. All or nothing.

        A batch size that the state dict has for a node becomes that of the node.

        Args:
            state_dict: what :meth:`state_dict` returned, or any mapping from names to tensors.
            strict: a missing and an unknown name are errors; otherwise entries without a value
                stay as they are, and unknown names become new entries.
            assign: hold the tensors of the state dict instead of copying their values.
            from_flatten: names are joined with dots (True), or mappings are branches (False); by
                default, the first if no value is a mapping.

        Raises:
            RuntimeError: names are missing or unknown; all are listed.
            LockedError: the tree is locked, and an entry would be added or replaced.
            ValueError: a value does not fit its leaf or the batch size.

        Example:
            >>> td = TensorDict({"0": {"weight": torch.zeros(2)}}, [2])
            >>> td.load_state_dict({"0.weight": torch.ones(2)})["0", "weight"]
            tensor([1., 1.])
        """
        if from_flatten is None:
            from_flatten = not any([isinstance(value, Mapping) for value in state_dict.values()])
        values, sizes = _flat(self, state_dict) if from_flatten else _nested(state_dict)
        mine = {path for path, _ in self._leaves()}
        lost = [as_key(path) for path, _ in self._leaves() if path not in values]
        new = [as_key(path) for path in values if path not in mine]
        if strict and (lost or new):
            raise RuntimeError(
                f"cannot load the state dict: only the tree has {listing(lost)}, "
                f"only the state dict {listing(new)}"
            )
        nodes = dict(_nodes(self, ()))
        before = [(node, node._batch_size, node._names) for node in nodes.values()]
        _refuse_sizes(nodes, sizes, values if assign else {})
        try:
            for path in nodes:
                if path in sizes:
                    nodes[path]._declare_size(sizes[path])
            with torch.no_grad():
                cast(Any, self).update(values, inplace=not assign)
        except BaseException:
            for node, size, names in before:
                node._batch_size, node._names = size, names
            raise
        return self


# -- saving ----------------------------------------------------------------------------------


def _add(
    node: TensorDictBase,
    prefix: str,
    flatten: bool,
    state: "OrderedDict[str, Any]",
    known: "OrderedDict[str, Any]",
    twice: list[str],
) -> None:
    """Add the entries of a node to ``state``, what it declares to ``known``."""
    if prefix[:-1] in known:
        twice.append(prefix[:-1])
    known[prefix[:-1]] = {"batch_size": node._batch_size, "device": node._device}
    for key, value in node._data.items():
        name = prefix + key
        if isinstance(value, TensorDictBase) and flatten:
            _add(value, f"{name}.", flatten, state, known, twice)
            continue
        if name in state:
            twice.append(name)
        if isinstance(value, TensorDictBase):
            branch: Any = OrderedDict()
            branch._metadata = OrderedDict()
            _add(value, "", flatten, branch, branch._metadata, twice)
            value = branch
        state[name] = value


# -- loading ---------------------------------------------------------------------------------


def _nodes(node: TensorDictBase, path: Path) -> Iterator[tuple[Path, TensorDictBase]]:
    """Yield the nodes of a tree and their paths, the ones above before those below."""
    yield path, node
    for key, value in node._data.items():
        if isinstance(value, TensorDictBase):
            yield from _nodes(value, (*path, key))


def _flat(tree: TensorDictBase, state: Mapping[str, Any]) -> Found:
    """Return the values of joined names, at the paths that have these names in the tree."""
    paths: dict[str, Path] = {}
    twice = []
    for path, _ in tree._leaves():
        name = ".".join(path)
        if paths.setdefault(name, path) is not path:
            twice.append(name)
    if twice:
        raise KeyConflictError(
            f"two leaves of the tree have one name in a state dict: {listing(twice)}; rename one "
            "of each, or save with flatten=False"
        )
    values = {paths.get(name) or tuple(name.split(".")): value for name, value in state.items()}
    known = getattr(state, "_metadata", {})
    sizes = {path: _size(known.get(".".join(path))) for path, _ in _nodes(tree, ())}
    return values, {path: size for path, size in sizes.items() if size is not None}


def _nested(state: Mapping[str, Any], above: Path = ()) -> Found:
    """Return the values of nested mappings."""
    values: dict[Path, Any] = {}
    size = _size(getattr(state, "_metadata", {}).get(""))
    sizes = {} if size is None else {above: size}
    for key, value in state.items():
        if isinstance(value, Mapping):
            more = _nested(value, (*above, key))
            values |= more[0]
            sizes |= more[1]
        else:
            values[*above, key] = value
    return values, sizes


def _size(known: Any) -> torch.Size | None:
    """Return the batch size in an entry of the metadata; those of a module have none."""
    found = known.get("batch_size") if isinstance(known, Mapping) else None
    return None if found is None else torch.Size(found)


def _refuse_sizes(
    nodes: dict[Path, TensorDictBase], sizes: dict[Path, torch.Size], replaced: dict[Path, Any]
) -> None:
    """Raise if a node cannot have its new batch size, by its lock or by a leaf that stays."""
    faults = []
    for path, size in sizes.items():
        node = nodes.get(path)
        if node is None or node._batch_size == size:
            continue
        if node._lock is not None:
            raise locked(f"change the batch size of {repr(as_key(path)) if path else 'the tree'}")
        faults += [
            f"{as_key(at)!r} of shape {tuple(leaf.shape)} does not begin with {tuple(size)}"
            for at, leaf in node._leaves(path)
            if at not in replaced and leaf.shape[: len(size)] != size
        ]
    if faults:
        raise ValueError(
            f"the state dict has a batch size that does not fit the tree: {'; '.join(faults)}"
        )
