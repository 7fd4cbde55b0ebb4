"""Modules that read their inputs from a tree and write their outputs to it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, cast

from torch import Tensor, nn

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, as_path, hint, listing
from tdnn.nn._faults import Told, in_words, inputs_in_words, missing_inputs, name_of, tell
from tdnn.nn.base import OutKeys, TensorDictModuleBase, normal_keys, picture
from tdnn.nn.dispatch import dispatch
from tdnn.tensordict import TensorDict

__all__ = ["TensorDictModule", "TensorDictModuleBase", "checked_inplace", "write"]

InKeys: TypeAlias = NestedKey | Sequence[NestedKey] | Mapping[Any, Any]
Inplace: TypeAlias = bool | Literal["empty"]

_ABSENT: Any = object()


class TensorDictModule(TensorDictModuleBase):
    """Wrap a callable so that it reads its inputs from a tree and writes its outputs to it.

    Called with a tree, it passes the entries at ``in_keys`` to ``module`` and writes what comes
    back at ``out_keys``. Called with tensors, it returns tensors (see :func:`dispatch`). Public
    attributes that the wrapper does not have are read from ``module``.

    Args:
        module: any callable, mostly an ``nn.Module``. It returns one tensor, or a tuple or list
            with one for each of ``out_keys``, or a mapping or tree that holds all ``out_keys``
            and is read by key. (A mapping or tree that does not is the value of a single key.)
        in_keys: the entries to read, in the order of the arguments; or a dict from arguments to
            keys, which are then passed by name.
        out_keys: where the outputs go; an output under ``"_"`` is dropped.
        out_to_in_map: the direction of a dict of ``in_keys``: ``{argument: key}`` if true or
            None, ``{key: argument}`` if false.
        inplace: where the outputs are written: into the input tree (True), into a new tree
            without batch dims (False), or into ``tensordict.empty()`` ("empty").
        method: the name of the method of ``module`` to call in its place.
        method_kwargs: keyword arguments for each call.
        strict: a missing input is an error. If false, None is passed in its place.
        get_kwargs: keyword arguments for ``tensordict.get``, which reads the inputs.

    Raises:
        TypeError: on construction, a key, an argument name or the callable is of a wrong kind.
        ValueError: on construction, two outputs have one key; in a call, the number of outputs
            differs from the number of ``out_keys``. Nothing is written then.
        MissingKeyError: in a call, some inputs are not in the tree.

    Example:
        >>> module = TensorDictModule(nn.Linear(3, 4), in_keys=["x"], out_keys=["y"])
        >>> module(TensorDict({"x": torch.ones(2, 3)}, [2]))["y"].shape
        torch.Size([2, 4])
        >>> module(torch.ones(2, 3)).shape, module.out_features
        (torch.Size([2, 4]), 4)
        >>> minus = TensorDictModule(lambda a, b: a - b, {"b": "x", "a": ("in", "x")}, ["y"])
        >>> minus(TensorDict({"x": 1, "in": {"x": 3}}))["y"]
        tensor(2)
    """

    _in_keys: list[NestedKey]
    _out_keys: list[NestedKey]
    _arguments: list[str] | None = None
    _selected: list[NestedKey] | None = None

    def __init__(
        self,
        module: Callable[..., Any],
        in_keys: InKeys,
        out_keys: OutKeys,
        *,
        out_to_in_map: bool | None = None,
        inplace: Inplace = True,
        method: str | None = None,
        method_kwargs: dict[str, Any] | None = None,
        strict: bool = True,
        get_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not callable(module) and method is None:
            raise TypeError(f"{type(self).__name__} wraps a callable, not {module!r}")
        if method is not None and not callable(getattr(module, method, None)):
            near = hint(method, dir(module))
            raise TypeError(f"{type(self).__name__}: {name_of(module)} has no {method!r}{near}")
        self.module = module
        self.method = method
        self.method_kwargs = dict(method_kwargs or {})
        self.get_kwargs = dict(get_kwargs or {})
        self.strict = strict
        self.inplace = checked_inplace(inplace, (True, False, "empty"), self._title())
        if out_to_in_map is not None and not isinstance(in_keys, Mapping):
            raise TypeError(f"{self._title()}: out_to_in_map is for a dict of in_keys")
        if out_to_in_map is False:
            in_keys = self._turned(cast(Mapping[Any, Any], in_keys))
        self.in_keys = cast(Any, in_keys)
        self.out_keys = cast(Any, out_keys)

    # -- keys ----------------------------------------------------------------------------------

    @property  # type: ignore[override]  # a plain attribute in the base, checked on writing here
    def in_keys(self) -> list[NestedKey]:
        """The keys that the module reads; a new list has to fit the arguments."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, keys: InKeys) -> None:
        if isinstance(keys, Mapping):
            wrong = [name for name in keys if not isinstance(name, str)]
            if wrong:
                raise TypeError(
                    f"{self._title()}: a dict of in_keys goes from argument names, which are "
                    f"str, to keys; not so {listing(wrong)} (out_to_in_map=False turns it round)"
                )
            self._in_keys = normal_keys(list(keys.values()), "in_keys", self._title())
            self._arguments = list(keys)
            return
        normal = normal_keys(keys, "in_keys", self._title())
        if self._arguments is not None and len(normal) != len(self._arguments):
            raise ValueError(
                f"{self._title()} passes its inputs by name, to {listing(self._arguments)}; "
                f"{listing(normal)} does not fit, assign a dict from arguments to keys"
            )
        self._in_keys = normal

    @property  # type: ignore[override]  # a plain attribute in the base, checked on writing here
    def out_keys(self) -> list[NestedKey]:
        """The keys that the module writes; a new list ends a selection."""
        return self._out_keys if self._selected is None else self._selected

    @out_keys.setter
    def out_keys(self, keys: OutKeys) -> None:
        normal = normal_keys(keys, "out_keys", self._title())
        twice = {key: None for key in normal if key != "_" and normal.count(key) > 1}
        if twice:
            raise ValueError(
                f"{self._title()}: two outputs cannot have one key, and {listing(normal)} has "
                f"{listing(twice)} more than once; '_' drops an output"
            )
        self._out_keys = normal
        self._selected = None

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that the module writes, before :meth:`select_out_keys`."""
        return self._out_keys

    def select_out_keys(self, *out_keys: NestedKey) -> Self:  # noqa: D102  # as in the base
        self._selected = self._known(out_keys)
        return self

    def reset_out_keys(self) -> Self:  # noqa: D102  # as in the base
        self._selected = None
        return self

    def _turned(self, keys: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return ``{argument: key}`` for ``{key: argument}``."""
        turned = {name: key for key, name in keys.items()}
        if len(turned) < len(keys):
            raise ValueError(
                f"{self._title()}: in_keys {dict(keys)} give one argument several values"
            )
        return turned

    @property
    def _optional_inputs(self) -> bool:  # type: ignore[override]  # constant in the base
        return not self.strict

    # -- the call ------------------------------------------------------------------------------

    @dispatch(auto_batch_size=False)
    def forward(
        self,
        tensordict: TensorDictBase,
        *args: Any,
        tensordict_out: TensorDictBase | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Read the inputs, call the module and write its outputs.

        Args:
            tensordict: a tree that holds ``in_keys``.
            *args: none; inputs go into the tree.
            tensordict_out: the tree to write to, whatever ``inplace`` says.
            **kwargs: passed to the module.

        Returns:
            The tree with the outputs (see ``inplace``), or the outputs in a call with tensors.
        """
        # Benchmark test_tdmodule: attributes of nn.Module are read from their dict, because
        # nn.Module.__getattr__ costs more than everything else here.
        if args:
            raise TypeError(
                Told(f"{self._title()} takes the tree alone by position; {len(args)} more given")
            )
        inputs = self._gather(tensordict)
        call = self._modules.get("module")
        if call is None:
            call = self.__dict__["module"]
        if self.method is not None:
            call = getattr(call, self.method)
        if self.method_kwargs:
            kwargs = {**self.method_kwargs, **kwargs}
        try:
            if self._arguments is None:
                result = call(*inputs, **kwargs)
            else:
                result = call(**dict(zip(self._arguments, inputs, strict=True)), **kwargs)
        except Exception as err:
            tell(err, f"{self._title()} {inputs_in_words(self._in_keys, inputs)}")
            raise
        values = (result,) if type(result) is Tensor else self._spread(result)
        if len(values) != len(self._out_keys):
            raise self._miscounted(result, values)
        if tensordict_out is None:
            tensordict_out = tensordict if self.inplace is True else self._fresh(tensordict)
        write(self._title, tensordict_out, self._kept(values))
        return tensordict_out

    def _gather(self, tensordict: TensorDictBase) -> list[Any]:
        """Return the inputs, or say which of them are not there."""
        get = tensordict.get
        try:
            if self.get_kwargs:
                options = {"default": _ABSENT, **self.get_kwargs}
                inputs = [get(key, **options) for key in self._in_keys]
            else:
                inputs = [get(key, _ABSENT) for key in self._in_keys]
        except KeyError:  # a key that goes through a leaf
            inputs = [get(key) if key in tensordict else _ABSENT for key in self._in_keys]
        for value in inputs:
            if value is _ABSENT:
                return self._without_missing(inputs, tensordict)
        return inputs

    def _without_missing(self, inputs: list[Any], tensordict: TensorDictBase) -> list[Any]:
        if not self.strict:
            return [None if value is _ABSENT else value for value in inputs]
        wanted = self._in_keys
        missing = [key for key, value in zip(wanted, inputs, strict=True) if value is _ABSENT]
        raise missing_inputs(self._title(), wanted, missing, tensordict)

    def _spread(self, result: Any) -> Sequence[Any]:
        """Return the outputs, one for each of ``out_keys`` if the module did right."""
        keys = self._out_keys
        if isinstance(result, tuple | list):
            return result
        if isinstance(result, Mapping | TensorDictBase):
            values = [_ABSENT if key == "_" else _at(result, key) for key in keys]
            named = [value for key, value in zip(keys, values, strict=True) if key != "_"]
            if named and all(value is not _ABSENT for value in named):
                return values
        return () if result is None and not keys else (result,)

    def _miscounted(self, result: Any, values: Sequence[Any]) -> ValueError:
        """Return the error for a wrong number of outputs."""
        keys = self._out_keys
        wanted = f"{len(keys)} out_key{'s' * (len(keys) != 1)} {listing(keys)}"
        if isinstance(result, Mapping | TensorDictBase):
            there = list(result.keys())  # type: ignore[union-attr]  # every tree has keys
            absent = [key for key in keys if key != "_" and _at(result, key) is _ABSENT]
            names = [key for key in there if isinstance(key, str)]
            near = [f"{k!r}{hint(k, names) if isinstance(k, str) else ''}" for k in absent]
            return ValueError(
                Told(
                    f"{self._title()} returned a {type(result).__name__} of {listing(there)} "
                    f"for {wanted}; not in it is {', '.join(near)}"
                )
            )
        count = len(values)
        what = in_words(result) if count == 1 else f"{count} outputs"
        what = "1 output" if isinstance(result, tuple | list) and count == 1 else what
        advice = (
            f"return a tuple of {len(keys)}, or drop a key"
            if count < len(keys)
            else "name the others too, with '_' for one to drop"
        )
        return ValueError(Told(f"{self._title()} returned {what} for {wanted}; {advice}"))

    def _fresh(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.inplace is False:
            return TensorDict({})
        return cast(TensorDict, tensordict).empty()

    def _kept(self, values: Sequence[Any]) -> list[tuple[NestedKey, Any]]:
        """Return the outputs that are written, with their keys."""
        pairs = zip(self._out_keys, values, strict=True)
        kept = self._selected
        return [(k, v) for k, v in pairs if k != "_" and (kept is None or k in kept)]

    # -- the wrapped module --------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as err:
            # A private name is never forwarded: copy and pickle ask for those before there is
            # a module to ask.
            wrapped = None if name.startswith("_") else self._wrapped()
            if wrapped is None:
                raise
            try:
                return getattr(wrapped, name)
            except AttributeError:
                message = f"{err}, and neither has the wrapped {name_of(wrapped)}"
                raise AttributeError(message, name=name, obj=self) from None

    def _wrapped(self) -> Any:
        state = self.__dict__
        return state.get("_modules", state).get("module", state.get("module"))

    def _title(self) -> str:
        wrapped = self._wrapped()
        method = self.__dict__.get("method")
        return f"{type(self).__name__}({name_of(wrapped)}{f'.{method}' if method else ''})"

    def __repr__(self) -> str:
        wrapped = self._wrapped()
        parts = [f"module={repr(wrapped) if isinstance(wrapped, nn.Module) else name_of(wrapped)}"]
        if self.method is not None:
            parts.append(f"method={self.method!r}")
        keys: Any = self._in_keys
        if self._arguments is not None:
            keys = dict(zip(self._arguments, keys, strict=True))
        parts += [f"in_keys={keys!r}", f"out_keys={self.out_keys!r}"]
        if self.inplace is not True:
            parts.append(f"inplace={self.inplace!r}")
        return picture(type(self).__name__, parts)


def checked_inplace(inplace: Any, allowed: tuple[Any, ...], who: str) -> Any:
    for choice in allowed:
        if inplace is choice or (isinstance(choice, str) and inplace == choice):
            return choice
    raise ValueError(f"{who}: inplace is one of {list(allowed)}, not {inplace!r}")


def _at(result: Any, key: NestedKey) -> Any:
    """Return the entry of a mapping or a tree at a key, nested or as it stands."""
    if isinstance(result, TensorDictBase):
        return result.get(key, _ABSENT) if key in result else _ABSENT
    if key in result:
        return result[key]
    for step in as_path(key):
        if not isinstance(result, Mapping | TensorDictBase) or step not in result:
            return _ABSENT
        result = cast(Any, result)[step]
    return result


def write(
    who: Callable[[], str], out: TensorDictBase, outputs: Sequence[tuple[NestedKey, Any]]
) -> None:
    """Write the outputs of the module that ``who`` names, all or none."""
    try:
        if len(outputs) > 1:
            # The first of several must not be there if the last cannot be written.
            outputs = [(key, _admitted(out, key, value)) for key, value in outputs]
        for key, value in outputs:
            out.set(key, value)
    except Exception as err:
        words = ", ".join([f"{key!r} {in_words(value)}" for key, value in outputs])
        tell(err, f"{who()} wrote {words} to {in_words(out)}")
        raise


def _admitted(out: TensorDictBase, key: NestedKey, value: Any) -> Any:
    """Return a value as ``out.set`` would store it, without storing it."""
    node, _ = out._home(as_path(key))
    if node._lock is not None:
        out.set(key, value)  # raises the error of a locked tree
    return node._admit(value, key)
