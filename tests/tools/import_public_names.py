"""Import every public name of the installed accel_fn: `python -I` runs it in an environment of a wheel.

With the argument `base`, no extra is installed; with `all`, every name must load.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import accel_fn
from accel_fn import errors, testing

EXTRAS = ("hypothesis", "torchao")


def main(extras):
    assert Path(accel_fn.__file__).is_relative_to(sys.prefix), accel_fn.__file__
    assert Path(accel_fn.__file__).with_name("py.typed").exists()
    missing = [name for name in EXTRAS if find_spec(name) is None]
    assert missing == ([] if extras == "all" else list(EXTRAS)), missing
    needs_extra = set() if extras == "all" else {"strategies"}  # the module needs hypothesis
    names = [
        (module.__name__, name)
        for module in (accel_fn, errors, testing)
        for name in module.__all__
        if name not in needs_extra
    ]
    for module, name in names:
        assert getattr(sys.modules[module], name) is not None
    print(f"{accel_fn.__version__}: {len(names)} public names, extras: {extras}")


if __name__ == "__main__":
    main(sys.argv[1])
