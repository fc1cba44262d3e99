"""One reasoning_gym data set without the hundred others.

`import reasoning_gym` loads them all, and with them sympy and matplotlib: one to two
seconds, where a check of a job needs one module. Its packages do nothing but import
what is in them, so empty ones of the same name serve as well.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

_ROOT = "reasoning_gym"
_MADE_OF_OTHERS = "composite"  # the file of a data set that asks for others by name


@contextmanager
def only_data_set(file: Path, package: Path) -> Iterator[None]:
    """While the block runs, `reasoning_gym` has the data set of `file` and nothing else.

    `package` is reasoning_gym's folder. The whole package is left to be imported where it
    is loaded already, and for a data set that cannot do without it. Not for a process that
    imports reasoning_gym in another thread.
    """
    if _ROOT in sys.modules or file.stem == _MADE_OF_OTHERS:
        yield
        return
    try:
        _load(file, package)
    except Exception:  # it needs more than this: whoever imports the whole package hears why
        _forget()
    try:
        yield
    finally:
        _forget()


def _load(file: Path, package: Path) -> None:
    folder, names = package, [_ROOT]
    _add_empty(_ROOT, folder)
    for part in file.relative_to(package).parent.parts:
        folder, names = folder / part, [*names, part]
        _add_empty(".".join(names), folder)
    importlib.import_module(f"{_ROOT}.coaching")  # with the factory first, the two go in a circle
    importlib.import_module(".".join([*names, file.stem]))
    factory = sys.modules[f"{_ROOT}.factory"]
    vars(sys.modules[_ROOT]).update(create_dataset=factory.create_dataset)


def _add_empty(name: str, folder: Path) -> None:
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _ROOT]:
        del sys.modules[name]
