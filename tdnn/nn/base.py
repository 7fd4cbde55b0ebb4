"""What every module on a tree is, and the one that is made of a function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeAlias, cast

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from tdnn._core import TensorDictBase
from tdnn._keys import NestedKey, as_key, as_path, hint, listing
from tdnn.nn._faults import name_of
from tdnn.tensordict import TensorDict

__all__ = ["OutKeys", "TensorDictModuleBase", "WrapModule", "as_call", "draw_anew", "normal_keys"]

OutKeys: TypeAlias = NestedKey | Sequence[NestedKey]

_WIDTH = 88  # of a picture on one line
_KEY_RULE = "a key is a str or a non-empty tuple of str"


class TensorDictModuleBase(nn.Module):
    """Base of all modules whose ``forward`` takes a tree and returns one.

    Set ``in_keys`` and ``out_keys`` in the class or in ``__init__``; chains read them, and so does
    :func:`dispatch`. To wrap a module of tensors, use :class:`TensorDictModule`.

    Example:
        >>> class Double(TensorDictModuleBase):
        ...     in_keys, out_keys = ["a"], ["b", "c"]
        ...
        ...     @dispatch
        ...     def forward(self, tensordict):
        ...         tensordict["b"] = 2 * tensordict["a"]
        ...         tensordict["c"] = 4 * tensordict["a"]
        ...         return tensordict
        >>> Double()(torch.ones(2))
        (tensor([2., 2.]), tensor([4., 4.]))
        >>> Double().select_out_keys("c")(torch.ones(2))
        tensor([4., 4.])
    """

    in_keys: list[NestedKey]
    out_keys: list[NestedKey]

    _optional_inputs = False  # whether dispatch lets arguments be left out
    _form: Any = None  # an object that is another one when the keys are others, for chains
    _selection: tuple[list[NestedKey], RemovableHandle] | None = None

    def _title(self) -> str:
        return type(self).__name__

    @staticmethod
    def is_tdmodule_compatible(module: object) -> bool:
        """Return whether ``module`` says which keys it reads and writes.

        Example:
            >>> TensorDictModuleBase.is_tdmodule_compatible(nn.Linear(2, 2))
            False
        """
        return hasattr(module, "in_keys") and hasattr(module, "out_keys")

    @property
    def out_keys_source(self) -> list[NestedKey]:
        """All keys that the module writes, before :meth:`select_out_keys`."""
        return self.out_keys if self._selection is None else self._selection[0]

    def select_out_keys(self, *out_keys: NestedKey) -> Self:
        """Keep only these outputs, here and in what :func:`dispatch` returns.

        The module still computes the others. A :class:`TensorDictModule` and a
        :class:`TensorDictSequential` do not write them; from the tree that another module returns
        they are deleted.

        Args:
            *out_keys: the keys to keep, each one of :attr:`out_keys_source`.

        Returns:
            The module itself, changed.

        Raises:
            ValueError: some keys are not among the outputs; all of them are listed.

        Example:
            >>> module = TensorDictModule(lambda x: (x + 1, x + 2), "x", ["y", "z"])
            >>> module.select_out_keys("z").out_keys, module.out_keys_source
            (['z'], ['y', 'z'])
            >>> module(torch.zeros(2))
            tensor([2., 2.])
        """
        kept = self._checked_selection(out_keys)
        source = self.reset_out_keys().out_keys
        self.out_keys = kept
        self._selection = (source, self.register_forward_hook(_drop_unselected))
        return self

    def reset_out_keys(self) -> Self:
        """Write all outputs again; undoes :meth:`select_out_keys`.

        Returns:
            The module itself, changed.

        Example:
            >>> module = TensorDictModule(lambda x: (x + 1, x + 2), "x", ["y", "z"])
            >>> module.select_out_keys("z").reset_out_keys().out_keys
            ['y', 'z']
        """
        if self._selection is not None:
            self.out_keys, handle = self._selection
            handle.remove()
            self._selection = None
        return self

    def _checked_selection(self, out_keys: Sequence[NestedKey]) -> list[NestedKey]:
        """Return the keys of a selection, normalised, after checking that each is an output."""
        chosen = normal_keys(list(out_keys), "out_keys", self._title())
        source = self.out_keys_source
        unknown = [key for key in chosen if key not in source or key == "_"]
        if unknown:
            names = [key for key in source if isinstance(key, str)]
            near = "".join([hint(key, names) for key in unknown if isinstance(key, str)])
            raise ValueError(
                f"{self._title()} cannot select {listing(unknown)}: its out_keys are "
                f"{listing(source)}{near}"
            )
        return chosen

    def reset_parameters_recursive(
        self, parameters: TensorDictBase | None = None
    ) -> TensorDictBase | None:
        """Draw new initial values, with ``reset_parameters`` of every submodule that has it.

        Or with ``_reset_parameters``, as some of torch's own modules call it. Inner modules go
        first, as when they are made, because an outer one may draw values for an inner one.

        Args:
            parameters: a tree as :meth:`TensorDict.from_module` gives it, without batch dims. Its
                tensors are written in place, as if the module held them; the module keeps its own.

        Returns:
            None without ``parameters``; otherwise a tree of tensors that share their storage with
            ``parameters`` and require gradients.

        Raises:
            RuntimeError: no submodule has ``reset_parameters``.

        Example:
            >>> module = TensorDictModule(nn.Linear(2, 2), "x", "y")
            >>> before = module.weight.clone()
            >>> module.reset_parameters_recursive()
            >>> bool((module.weight == before).any())
            False
        """
        if parameters is None:
            self._draw(self)
            return None
        fresh = cast(Any, parameters).data
        self._draw_into(fresh, self)
        return cast(TensorDictBase, fresh.requires_grad_())

    def _draw(self, module: nn.Module) -> None:
        if not draw_anew(module, but=self):  # its own reset_parameters may call this
            raise RuntimeError(f"{self._title()} holds no module with a reset_parameters method")

    def _draw_into(self, weights: Any, module: nn.Module) -> None:
        """Draw new values for the module and write them into a tree in place."""
        drawn = weights.clone()  # a reset may put other tensors in the places of these
        with drawn.to_module(module):
            self._draw(module)
        weights.update_(drawn)


def draw_anew(module: nn.Module, but: nn.Module | None = None) -> bool:
    """Initialise a module as its constructor does; return whether anything in it could be.

    Args:
        module: the module, of any kind, with all that it holds.
        but: a module in it whose own method is not called.

    Example:
        >>> draw_anew(nn.Sequential(nn.Linear(2, 2))), draw_anew(nn.ReLU())
        (True, False)
    """
    found = False
    for part in _inner_first(module, set()):
        # Of the class, because a TensorDictModule hands on what its module has.
        reset = getattr(type(part), "reset_parameters", None) or getattr(
            type(part), "_reset_parameters", None
        )
        if callable(reset) and part is not but:
            found = True
            if parametrize.is_parametrized(part):
                _draw_parametrized(part, reset)
            else:
                reset(part)
    return found


def _inner_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Return all modules in the order in which they were most likely made."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _inner_first(child, seen)
        yield module


def _draw_parametrized(module: Any, reset: Callable[[Any], Any]) -> None:
    """Initialise a module that computes its weights: to values that come out as if it did not.

    What cannot be set so stays as it is: its parametrization has no ``right_inverse``, or has a
    state that belongs to the weights (the vectors of a spectral norm).
    """
    with torch.no_grad(), parametrize.cached():
        # The cache keeps the weights that the reset writes to, which it would else write in vain.
        drawn = {name: getattr(module, name) for name in module.parametrizations}
        reset(module)
        drawn = {name: weight.clone() for name, weight in drawn.items()}
    for name, weight in drawn.items():
        steps = module.parametrizations[name]
        if all([hasattr(step, "right_inverse") and not list(step.buffers()) for step in steps]):
            setattr(module, name, weight)


def _drop_unselected(module: TensorDictModuleBase, args: Any, output: Any) -> None:
    """Delete the outputs that are not selected; a forward hook."""
    if isinstance(output, TensorDictBase):
        for key in module.out_keys_source:
            if key not in module.out_keys and key in output:
                del output[key]


class WrapModule(TensorDictModuleBase):
    """Make a step of a function that takes a tree and returns one.

    Args:
        func: takes a tree and returns a tree.
        inplace: write the entries of the result into the input, and return that.
        in_keys: the keys that ``func`` reads. They are not checked, but chains go by them.
        out_keys: the keys that ``func`` writes, likewise.

    Example:
        >>> flat = WrapModule(lambda td: td.reshape(-1))
        >>> flat(TensorDict({"x": torch.ones(2, 3)}, [2, 3])).batch_size
        torch.Size([6])
    """

    def __init__(
        self,
        func: Callable[[Any], Any],
        *,
        inplace: bool = False,
        in_keys: OutKeys | None = None,
        out_keys: OutKeys | None = None,
    ) -> None:
        super().__init__()
        if not callable(func):
            raise TypeError(f"WrapModule wraps a function of a tree, not {func!r}")
        self.func = func
        self.inplace = inplace
        self._says_keys = in_keys is not None and out_keys is not None
        self.in_keys = normal_keys([] if in_keys is None else in_keys, "in_keys", self._title())
        self.out_keys = normal_keys([] if out_keys is None else out_keys, "out_keys", self._title())

    def forward(self, data: TensorDictBase) -> TensorDictBase:
        """Call the function on ``data``.

        Returns:
            What the function returns, or ``data`` with its entries if ``inplace`` is true.
        """
        result = self.func(data)
        if not self.inplace or result is data:
            return cast(TensorDictBase, result)
        return cast(TensorDict, data).update(result)

    def _title(self) -> str:
        return f"{type(self).__name__}({name_of(self.func)})"

    def __repr__(self) -> str:
        func = repr(self.func) if isinstance(self.func, nn.Module) else name_of(self.func)
        keys = [f"in_keys={self.in_keys!r}", f"out_keys={self.out_keys!r}"]
        return as_call(type(self).__name__, [func, *(keys if self._says_keys else [])])


def as_call(name: str, parts: Sequence[str]) -> str:
    """Return ``name(parts)``: on one line if it fits, else each part on a line.

    Example:
        >>> as_call("f", ["a", "b"])
        'f(a, b)'
    """
    line = f"{name}({', '.join(parts)})"
    if len(line) <= _WIDTH and "\n" not in line:
        return line
    lines = ",\n".join(parts).replace("\n", "\n  ")
    return f"{name}(\n  {lines}\n)"


def normal_keys(keys: Any, what: str, who: str) -> list[NestedKey]:
    """Return a key or a sequence of keys as a list of plain ones, or say which are wrong."""
    if isinstance(keys, str | tuple):
        keys = [keys]
    if not isinstance(keys, Sequence):
        raise TypeError(f"{who}: {what} is a key or a list of keys, not {keys!r}; {_KEY_RULE}")
    normal: list[NestedKey] = []
    wrong = []
    for key in keys:
        try:
            normal.append(as_key(as_path(key)))
        except TypeError:
            wrong.append(key)
    if wrong:
        raise TypeError(f"{who}: {what} {listing(keys)} has {listing(wrong)}; {_KEY_RULE}")
    return normal
