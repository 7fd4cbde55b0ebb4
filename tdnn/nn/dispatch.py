"""Call a function on a tree with plain tensors instead, by position or by name."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Signature, signature
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from tdnn._core import TensorDictBase
from tdnn._declared import NO_BATCH, common_start
from tdnn._keys import NestedKey, as_path, hint, listing, unravel_key_list
from tdnn.nn._faults import Told, lost_outputs, title
from tdnn.tensordict import TensorDict

__all__ = ["dispatch"]

F = TypeVar("F", bound=Callable[..., Any])
Keys = str | Sequence[NestedKey]

_EMPTY = TensorDict()


@overload
def dispatch(separator: F) -> F: ...


@overload
def dispatch(
    separator: str = "_",
    source: Keys = "in_keys",
    dest: Keys = "out_keys",
    auto_batch_size: bool = True,
) -> Callable[[F], F]: ...


def dispatch(
    separator: Any = "_",
    source: Keys = "in_keys",
    dest: Keys = "out_keys",
    auto_batch_size: bool = True,
) -> Any:
    """Let a function on a tree also be called with tensors, by position, by name or both.

    The tensors are put into a new tree at the ``source`` keys, the function runs on it, and the
    entries at the ``dest`` keys of what it returns are the result: one tensor for one key,
    otherwise a tuple in the order of the keys, without ``"_"``. A call with a tree goes to the
    function as it is: as the first argument, or under the name ``tensordict`` unless an input has
    that name. A keyword that names no input is passed on to the function.

    Use it bare (``@dispatch``) or with arguments (``@dispatch(source=["a"], dest=["b"])``), on a
    method or, if both lists are given, on a plain function.

    Args:
        separator: joins the parts of a nested key into the name of a keyword argument.
        source: the input keys, or the name of the attribute that holds them.
        dest: the output keys, or the name of the attribute that holds them.
        auto_batch_size: the tree's batch size is the longest beginning that the shapes of all
            inputs share; otherwise it has no batch dims.

    Returns:
        The decorated function. It holds the tensors that it is given, without copies.

    Raises:
        TypeError: on decoration, the first argument (after ``self``) is not named ``tensordict``;
            in a call, an input is forgotten, given twice or surplus.
        MissingKeyError: in a call, the function wrote no entry at one of ``dest``.

    Example:
        >>> class Shift(nn.Module):
        ...     in_keys, out_keys = ["a", ("by", "x")], ["b"]
        ...
        ...     @dispatch
        ...     def forward(self, tensordict):
        ...         return tensordict.set("b", tensordict.get("a") + tensordict.get(("by", "x")))
        >>> Shift()(torch.zeros(2), by_x=torch.ones(2))
        tensor([1., 1.])
    """
    if callable(separator):
        return _decorate(separator, _Dispatcher("_", source, dest, auto_batch_size))
    dispatcher = _Dispatcher(separator, source, dest, auto_batch_size)
    return lambda func: _decorate(func, dispatcher)


def _decorate(func: Callable[..., Any], dispatcher: "_Dispatcher") -> Callable[..., Any]:
    names = list(signature(func).parameters)
    if names[:1] == ["tensordict"]:
        return _as_function(func, dispatcher)
    if names[1:2] == ["tensordict"]:
        return _as_method(func, dispatcher)
    raise TypeError(
        f"dispatch: the first argument of {func.__qualname__} (after self) must be named "
        f"'tensordict', found {names}"
    )


def _as_function(func: Callable[..., Any], dispatcher: "_Dispatcher") -> Callable[..., Any]:
    if isinstance(dispatcher.source, str) or isinstance(dispatcher.dest, str):
        raise TypeError(
            f"dispatch: {func.__qualname__} is no method, so it has no attributes to read "
            "keys from; give source=[...] and dest=[...]"
        )

    @wraps(func)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _is_direct(dispatcher.source, args, kwargs):
            return func(*args, **kwargs)
        tree = dispatcher.gather(func, dispatcher.source, args, kwargs)
        return dispatcher.results(func, dispatcher.dest, func(tree, **kwargs))

    return function


def _as_method(func: Callable[..., Any], dispatcher: "_Dispatcher") -> Callable[..., Any]:
    source_name = dispatcher.source if isinstance(dispatcher.source, str) else None
    dest_name = dispatcher.dest if isinstance(dispatcher.dest, str) else None

    @wraps(func)
    def method(self: Any, tensordict: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        # Hot (test_tdmodule): a call with a tree and nothing else costs one test here.
        if isinstance(tensordict, TensorDictBase):
            if not args and not kwargs:
                return func(self, tensordict)
            return func(self, tensordict, *args, **kwargs)
        source = getattr(self, source_name) if source_name else dispatcher.source
        if tensordict is not None or args:
            args = (tensordict, *args)
        elif "tensordict" in kwargs and _is_direct(source, args, kwargs):
            return func(self, **kwargs)
        tree = dispatcher.gather(self, source, args, kwargs)
        out = func(self, tree, **kwargs) if kwargs else func(self, tree)
        dest = getattr(self, dest_name) if dest_name else dispatcher.dest
        return dispatcher.results(self, dest, out)

    method.__signature__ = _without_need(func)  # type: ignore[attr-defined]  # functions take any
    return method


def _without_need(func: Callable[..., Any]) -> Signature:
    """Return the signature with a default for the tree: torch.export binds keywords to it."""
    own = signature(func)
    names = [
        p.replace(default=None) if p.name == "tensordict" else p for p in own.parameters.values()
    ]
    try:
        return own.replace(parameters=names)
    except ValueError:  # an argument behind the tree has no default
        return own


def _is_direct(source: Keys, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call is given its tree."""
    if args:
        return isinstance(args[0], TensorDictBase)
    return isinstance(kwargs.get("tensordict"), TensorDictBase) and "tensordict" not in source


class _Dispatcher:
    """How the arguments of a call become a tree, and the tree that comes back its result."""

    __slots__ = ("auto_batch_size", "dest", "separator", "source")

    def __init__(self, separator: str, source: Keys, dest: Keys, auto_batch_size: bool) -> None:
        if not isinstance(separator, str):
            raise TypeError(f"dispatch: the separator is a str, not {separator!r}")
        self.separator = separator
        self.source = source if isinstance(source, str) else unravel_key_list(source)
        self.dest = dest if isinstance(dest, str) else unravel_key_list(dest)
        self.auto_batch_size = auto_batch_size

    def gather(
        self,
        owner: object,
        source: Keys,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> TensorDictBase:
        """Return the tree of the inputs, and take those that have a name out of ``kwargs``."""
        if isinstance(source, str):
            source = [source]
        # Benchmark test_tdmodule_dispatch: mostly all inputs are tensors under plain keys and come
        # in one way, and every tensor fits a tree without batch dims. On Python 3.11 such a loop
        # takes half the time of a zip or a comprehension.
        if (
            not self.auto_batch_size
            and len(args or kwargs) == len(source)
            and not (args and kwargs)
        ):
            data = {}
            for at, key in enumerate(source):
                if type(key) is not str:
                    break
                value = args[at] if args else kwargs.get(key)
                if type(value) is not Tensor:
                    break
                data[key] = value
            if len(data) == len(source):
                kwargs.clear()
                return _EMPTY._like(data, NO_BATCH)
        given = self._gather_mixed(owner, source, args, kwargs)
        return TensorDict(given, _shared(given.values()) if self.auto_batch_size else None)

    def _gather_mixed(
        self,
        owner: object,
        source: Sequence[NestedKey],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[Any, Any]:
        """Return each input with its key, or say which arguments do not fit."""
        given_map = args[0] if args and isinstance(args[0], Mapping) else ()
        if given_map and any([as_path(key)[0] in given_map for key in source]):
            kind = type(args[0]).__name__
            raise TypeError(
                Told(f"{title(owner)} takes a tree, or tensors, not a {kind}; give TensorDict(...)")
            )
        given: dict[NestedKey, Any] = {}
        twice: list[str] = []
        forgotten: list[str] = []
        at, end = 0, len(args)
        for key in dict.fromkeys(source):
            name = key if type(key) is str else self.separator.join(as_path(key))
            if at < end:
                given[key] = args[at]
                at += 1
                if name in kwargs:
                    twice.append(name)
            elif name in kwargs:
                given[key] = kwargs.pop(name)
            else:
                forgotten.append(name)
        nothing = [key for key, value in given.items() if value is None]
        is_strict = bool(nothing or forgotten) and not getattr(owner, "_optional_inputs", False)
        if twice or at < end or is_strict:
            raise self._misfit(
                owner, source, twice, end - at, forgotten, nothing if is_strict else [], kwargs
            )
        for key in nothing:
            del given[key]
        return given

    def _misfit(
        self,
        owner: object,
        source: Sequence[NestedKey],
        twice: list[str],
        surplus: int,
        forgotten: list[str],
        nothing: list[NestedKey],
        kwargs: Mapping[str, Any],
    ) -> TypeError:
        """Return the error for arguments that do not fit the inputs, with all faults."""
        names = {key: self.separator.join(as_path(key)) for key in source}
        faults = []
        if forgotten:
            faults.append(f"no argument for {', '.join(map(repr, forgotten))}")
            # A keyword that is like no input is one of the function's own.
            near = {name: hint(name, forgotten) for name in kwargs if name not in names.values()}
            typos = [f"{name!r} is no input{right}" for name, right in near.items() if right]
            if typos:
                faults.append(", ".join(typos))
        if nothing:
            which = ", ".join([repr(names[key]) for key in nothing])
            strict = getattr(owner, "_strict", False)
            advice = " (strict=False lets an input be None)" if strict else ""
            faults.append(f"None for {which}, which a tree cannot hold{advice}")
        if twice:
            faults.append(f"by position and by name: {listing(twice)}")
        if surplus:
            faults.append(f"{surplus} positional argument{'s' * (surplus > 1)} too many")
        if len(set(names.values())) < len(names):
            faults.append(f"several inputs have one name, {listing(names)}, so pass them in a tree")
        takes = listing(names.values())
        return TypeError(Told(f"{title(owner)} takes a tree, or {takes}: {'; '.join(faults)}"))

    def results(self, owner: object, dest: Keys, out: Any) -> Any:
        """Return the entries at ``dest``: one alone, several as a tuple."""
        if isinstance(dest, str):
            dest = [dest]
        if not isinstance(out, TensorDictBase):
            raise TypeError(
                Told(f"{title(owner)} must return a tree, but it returned {type(out).__name__}")
            )
        values = []
        for key in dest:
            value = out.get(key, self)
            if value is self:
                return self._without_dropped(owner, dest, out)
            values.append(value)
        return values[0] if len(values) == 1 else tuple(values)

    def _without_dropped(
        self, owner: object, dest: Sequence[NestedKey], out: TensorDictBase
    ) -> Any:
        kept = [key for key in dest if key != "_"]
        missing = [key for key in kept if key not in out]
        if missing:
            raise lost_outputs(title(owner), missing, out)
        return self.results(owner, kept, out)


def _shared(values: Any) -> torch.Size:
    """Return the longest beginning that the shapes of all the values share."""
    return common_start([getattr(value, "shape", ()) for value in values])
