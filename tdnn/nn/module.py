"""Modules that read their inputs from a tree and write their outputs to it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, TypeAlias, cast

from torch import Tensor, nn

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, as_path, hint, listing
from tdnn._marks import ABSENT
from tdnn.errors import MissingKeyError
from tdnn.nn._faults import (
    arguments_in_words,
    inputs_in_words,
    lacking_outputs,
    missing_inputs,
    name_of,
    nested_output,
    outputs_in_words,
    tell,
    wrong_count,
)
from tdnn.nn._flow import stands_within
from tdnn.nn.base import OutKeys, TensorDictModuleBase, as_call, normal_keys
from tdnn.nn.dispatch import dispatch
from tdnn.tensordict import TensorDict

__all__ = ["TensorDictModule", "TensorDictModuleBase", "write"]

InKeys: TypeAlias = NestedKey | Sequence[NestedKey] | Mapping[Any, Any]
Inplace: TypeAlias = bool | Literal["empty"]
_CallForm: TypeAlias = tuple[
    tuple[NestedKey, ...], tuple[NestedKey, ...], bool, Inplace, dict[str, Any]
]


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

    _inplace_choices: tuple[Any, ...] = (True, False, "empty")  # values of inplace

    # What a call goes by, in one tuple, which is new whenever any of it changes: the keys to read,
    # the keys to write ("_" for an output that is not), whether the call is module(*inputs) and
    # no more, ``inplace`` and ``get_kwargs``.
    _form: _CallForm

    _in_keys: tuple[NestedKey, ...] = ()
    _out_keys: tuple[NestedKey, ...] = ()
    _results: tuple[NestedKey, ...] = ()  # those that are written, for dispatch
    _arguments: tuple[str, ...] | None = None
    _selected: tuple[NestedKey, ...] | None = None

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
        if isinstance(module, type) and issubclass(module, nn.Module):
            name = module.__name__
            raise TypeError(
                f"{type(self).__name__} wraps a module, not the class {name}; write {name}(...)"
            )
        if method is not None and not callable(getattr(module, method, None)):
            near = hint(method, dir(module))
            raise TypeError(f"{type(self).__name__}: {name_of(module)} has no {method!r}{near}")
        self.module = module
        self._method = method
        self._method_kwargs = dict(method_kwargs or {})
        self._get_kwargs = dict(get_kwargs or {})
        self._strict = strict
        self._inplace = self._checked_inplace(inplace)
        if out_to_in_map is not None and not isinstance(in_keys, Mapping):
            raise TypeError(f"{self._title()}: out_to_in_map is for a dict of in_keys")
        if out_to_in_map is False:
            in_keys = self._turned(cast(Mapping[Any, Any], in_keys))
        self.in_keys = cast(Any, in_keys)
        self.out_keys = cast(Any, out_keys)

    # -- keys ----------------------------------------------------------------------------------

    @property
    def in_keys(self) -> list[NestedKey]:
        """The keys that the module reads, as a new list; assign one to change them.

        A list of keys for a module that is called by name keeps the names of the arguments.
        """
        return list(self._in_keys)

    @in_keys.setter
    def in_keys(self, keys: InKeys) -> None:
        if isinstance(keys, Mapping):
            wrong = [name for name in keys if not isinstance(name, str)]
            if wrong:
                raise TypeError(
                    f"{self._title()}: a dict of in_keys goes from argument names, which are "
                    f"str, to keys; not so {listing(wrong)} (out_to_in_map=False turns it round)"
                )
            normal = normal_keys(list(keys.values()), "in_keys", self._title())
            self._arguments = tuple(keys)
        else:
            normal = normal_keys(keys, "in_keys", self._title())
            if self._arguments is not None and len(normal) != len(self._arguments):
                raise ValueError(
                    f"{self._title()} passes its inputs by name, to {listing(self._arguments)}; "
                    f"{listing(normal)} does not fit, assign a dict from arguments to keys"
                )
        self._in_keys = tuple(normal)
        self._keys_changed()

    @property
    def out_keys(self) -> list[NestedKey]:
        """The keys that the module writes, as a new list; to assign one ends a selection."""
        return list(self._out_keys if self._selected is None else self._selected)

    @out_keys.setter
    def out_keys(self, keys: OutKeys) -> None:
        normal = normal_keys(keys, "out_keys", self._title())
        twice = {key: None for key in normal if key != "_" and normal.count(key) > 1}
        if twice:
            raise ValueError(
                f"{self._title()}: two outputs cannot have one key, and {listing(normal)} has "
                f"{listing(twice)} more than once; '_' drops an output"
            )
        within = [key for key in normal if stands_within(key, normal)]
        if within:
            raise ValueError(
                f"{self._title()}: an output cannot stand inside another, and {listing(normal)} "
                f"has {listing(within)}"
            )
        self._out_keys = tuple(normal)
        self._selected = None
        self._keys_changed()

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that the module writes, before :meth:`select_out_keys`."""
        return list(self._out_keys)

    def select_out_keys(self, *out_keys: NestedKey) -> Self:  # noqa: D102  # as in the base
        self._selected = tuple(self._checked_selection(out_keys))
        self._keys_changed()
        return self

    def reset_out_keys(self) -> Self:  # noqa: D102  # as in the base
        self._selected = None
        self._keys_changed()
        return self

    @property
    def inplace(self) -> Any:
        """Where the outputs are written: True, False or "empty"; may be assigned."""
        return self._inplace

    @inplace.setter
    def inplace(self, inplace: Any) -> None:
        self._inplace = self._checked_inplace(inplace)
        self._keys_changed()

    def _checked_inplace(self, inplace: Any) -> Any:
        for choice in self._inplace_choices:
            if inplace is choice or (choice == "empty" and inplace == "empty"):
                return choice
        raise ValueError(
            f"{self._title()}: inplace is one of {list(self._inplace_choices)}, not {inplace!r}"
        )

    def _keys_changed(self) -> None:
        written = self._out_keys
        if self._selected is not None:
            written = tuple([key if key in self._selected else "_" for key in written])
        # In the order of out_keys, which is that of a selection.
        results = written if self._selected is None else self._selected
        self._results = tuple([key for key in results if key != "_"])
        is_plain = self._arguments is None and self._method is None and not self._method_kwargs
        self._form = (self._in_keys, written, is_plain, self._inplace, self._get_kwargs)

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
        return not self._strict

    # -- the call ------------------------------------------------------------------------------

    @dispatch(source="_in_keys", dest="_results", auto_batch_size=False)
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
        # Benchmark test_tdmodule: reading an attribute of a Module costs more than a test, so
        # the most common call is written out here and the rest is left to methods.
        in_keys, out_keys, is_plain, inplace, options = self._form
        get: Any = partial(tensordict.get, **options) if options else tensordict.get
        inputs = []
        try:
            for key in in_keys:
                value = get(key, ABSENT)
                if value is ABSENT:
                    raise MissingKeyError
                inputs.append(value)
        except MissingKeyError:
            inputs = self._read_others(tensordict, get)
        module: Any = self.__dict__.get("module")
        if module is None:
            module = self._modules["module"]
        try:
            if is_plain and not args and not kwargs:
                result = module(*inputs)
            else:
                result = self._call(module, inputs, args, kwargs)
        except Exception as err:
            tell(err, f"{self._title()} {inputs_in_words(in_keys, inputs)}")
            raise
        if tensordict_out is None:
            tensordict_out = tensordict if inplace is True else self._fresh(tensordict)
        several = type(result) is not Tensor or len(out_keys) != 1
        values = self._spread(result) if several else [result]
        try:
            if several:
                write(tensordict_out, out_keys, values)
            elif out_keys[0] != "_":
                tensordict_out.set(out_keys[0], result)
        except Exception as err:
            tell(err, f"{self._title()} {outputs_in_words(out_keys, values, tensordict_out)}")
            raise
        return tensordict_out

    def _read_others(self, tensordict: TensorDictBase, get: Any) -> list[Any]:
        """Return the inputs with None for those that are not there, if that is allowed."""
        wanted = self._in_keys
        missing = [key for key in wanted if key not in tensordict]
        if self._strict:
            turned = bool(self._arguments) and all([n in tensordict for n in self._arguments or ()])
            raise missing_inputs(self._title(), wanted, missing, tensordict, turned) from None
        return [None if key in missing else get(key) for key in wanted]

    def _call(
        self, module: Any, inputs: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module, or its method, with inputs by name and further arguments."""
        if args:
            raise TypeError(
                f"{self._title()} takes the tree alone by position, not "
                f"{arguments_in_words(args, {})} too; inputs go into the tree"
            )
        call = module if self._method is None else getattr(module, self._method)
        if self._arguments is None:
            return call(*inputs, **{**self._method_kwargs, **kwargs})
        named = dict(zip(self._arguments, inputs, strict=True))
        return call(**named, **{**self._method_kwargs, **kwargs})

    def _spread(self, result: Any) -> Sequence[Any]:
        """Return the outputs, one for each of ``out_keys``, or say why there are not that many."""
        keys = self._out_keys
        if isinstance(result, (tuple, list)):  # a union would be made on each call
            values: Sequence[Any] = result
            for value in values:
                if type(value) is not Tensor and isinstance(value, (tuple, list)):
                    self._refuse_nested(values)
        elif isinstance(result, Mapping | TensorDictBase):
            values = [ABSENT if key == "_" else _at(result, key) for key in keys]
            lacking = [
                key
                for key, value in zip(keys, values, strict=True)
                if value is ABSENT and key != "_"
            ]
            if lacking and len(keys) > 1:
                raise lacking_outputs(self._title(), keys, lacking, result)
            if lacking or all([key == "_" for key in keys]):
                values = (result,)
        else:
            values = () if result is None and not keys else (result,)
        if len(values) != len(keys):
            raise wrong_count(self._title(), keys, result)
        return values

    def _refuse_nested(self, values: Sequence[Any]) -> None:
        """Raise if a tuple of tensors would become one output, which would cut its gradients."""
        for key, value in zip(self._out_keys, values, strict=False):
            several = isinstance(value, tuple | list)
            if key != "_" and several and any([isinstance(part, Tensor) for part in value]):
                raise nested_output(self._title(), key, value)

    def _fresh(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self._inplace is False:
            return TensorDict({})
        return cast(TensorDict, tensordict).empty()

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
        method = self.__dict__.get("_method")
        return f"{type(self).__name__}({name_of(wrapped)}{f'.{method}' if method else ''})"

    def __repr__(self) -> str:
        wrapped = self._wrapped()
        parts = [f"module={repr(wrapped) if isinstance(wrapped, nn.Module) else name_of(wrapped)}"]
        if self._method is not None:
            parts.append(f"method={self._method!r}")
        keys: Any = self.in_keys
        if self._arguments is not None:
            keys = dict(zip(self._arguments, keys, strict=True))
        parts += [f"in_keys={keys!r}", f"out_keys={self.out_keys!r}"]
        if self._inplace is not True:
            parts.append(f"inplace={self._inplace!r}")
        return as_call(type(self).__name__, parts)


def _at(result: Any, key: NestedKey) -> Any:
    """Return the entry of a mapping or a tree at a key, nested or as it stands."""
    if isinstance(result, TensorDictBase):
        return result.get(key, ABSENT) if key in result else ABSENT
    if key in result:
        return result[key]
    for step in as_path(key):
        if not isinstance(result, Mapping | TensorDictBase) or step not in result:
            return ABSENT
        result = cast(Any, result)[step]
    return result


def write(out: TensorDictBase, keys: Sequence[NestedKey], values: Sequence[Any]) -> None:
    """Write the outputs of a module, all or none; those under ``"_"`` are dropped."""
    # The first of several must not be there if the last cannot be written.
    ready: dict[NestedKey, Any] = {}
    for at, key in enumerate(keys):
        if key != "_":
            ready[key] = _admitted(out, key, values[at])
    for key, value in ready.items():
        if type(value) is Tensor and type(key) is str:
            out._put(key, value)
        else:
            out.set(key, value)


def _admitted(out: TensorDictBase, key: NestedKey, value: Any) -> Any:
    """Return a value as ``out.set`` would store it, without storing it."""
    node = out if type(key) is str else out._home(as_path(key))[0]
    if node._lock is not None:
        out.set(key, value)  # raises the error of a locked tree
    return node._admit(value, key)
