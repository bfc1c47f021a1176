"""Guards of a module: what its graph was made of that torch's guards do not look at."""

from __future__ import annotations

from itertools import chain, compress, count
from operator import itemgetter
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as _everywhere

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_METHODS = (FunctionType, staticmethod, classmethod, property)
_CALLED = ("forward", "__call__")
"""Methods of torch's own classes that are looked at."""
_OF_ALL = [getattr(_everywhere, f"_global{name}") for name in _HOOKS]
"""The hooks that all modules of a process have."""
_hooks_of = itemgetter(*_HOOKS)
_modules_of = itemgetter("_modules")


class ModuleGuards:
    """The hooks of a module and of those inside it, and the methods of their classes.

    torch has `skip_nnmodule_hook_guards`: once a module without hooks is compiled, its graph is
    run without those that come later. Its guards look at the hooks that were there, and at everything else.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._look()

    def refresh(self) -> bool:
        """Look for modules that came since, and return whether there are other ones."""
        is_new = (
            [*map(_modules_of, self._owners)] != self._inside
            or [*map(type, self._modules)] != self._types
            or [*map(len, self._contents)] != self._sizes
        )
        if is_new:
            self._look()
        return is_new

    def hooks(self) -> tuple[object, ...]:
        """Return where modules have hooks, and the hooks that all modules of the process have.

        Cost: a look at each module.
        """
        dicts = chain.from_iterable(map(_hooks_of, self._owners))
        return tuple(compress(count(), dicts)), *map(tuple, _OF_ALL)

    def methods(self) -> tuple[object, ...]:
        """Return the methods of the modules' classes.

        Cost: a look at each method.
        """
        return tuple([of_kind(name) for of_kind, name in self._methods])

    def key(self) -> tuple[object, ...]:
        """Return a value that is another one if a graph would not fit any more."""
        self.refresh()
        return self.hooks(), self.methods()

    def _look(self) -> None:
        self._modules = [*self._module.modules()]
        self._owners: list[dict[str, Any]] = [*map(vars, self._modules)]
        self._inside = [dict(each) for each in map(_modules_of, self._owners)]
        self._types = [*map(type, self._modules)]
        kinds = dict.fromkeys(chain.from_iterable(each.__mro__[:-1] for each in self._types))
        self._contents = [*map(vars, kinds)]
        self._sizes = [*map(len, self._contents)]
        self._methods = [
            (vars(kind).get, name)
            for kind in kinds
            for name, value in vars(kind).items()
            if isinstance(value, _METHODS)
            and (name in _CALLED or not kind.__module__.startswith("torch."))
        ]
