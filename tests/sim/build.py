"""Builds the simulated device's C++ once for its sources and its torch, into build/sim/."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "sim"
NAME = "sim_device"
# -O0 builds in half of the time; the kernels that run are torch's.
_FLAGS = ("-std=c++20", "-fPIC", "-O0", "-w", f"-DTORCH_EXTENSION_NAME={NAME}")
_FLAGS += ("-DTORCH_API_INCLUDE_EXTENSION_H",)
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


def compiler() -> str | None:
    """Return the C++ compiler of this machine, if it has one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """Return the shared library; it is compiled if there is none of these sources."""
    sources = sorted(HERE.glob("*.cpp"))
    key = hashlib.sha256(f"{torch.__version__} {sysconfig.get_python_version()}".encode())
    for path in (Path(__file__), HERE / "device.h", *sources):
        key.update(path.read_bytes())
    folder = CACHE / key.hexdigest()[:16]
    library = folder / f"{NAME}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Another process may build at the same time, so each has names of its own until the end.
        mine = folder / str(os.getpid())
        mine.mkdir(exist_ok=True)
        _compile(sources, mine).rename(library)
        shutil.rmtree(mine)
    return library


def _compile(sources: list[Path], folder: Path) -> Path:
    python = sysconfig.get_paths()["include"]
    includes = [word for path in (*include_paths(), python) for word in ("-isystem", path)]
    objects = [folder / f"{source.stem}.o" for source in sources]
    runs = [
        subprocess.Popen([compiler(), *_FLAGS, *includes, "-c", source, "-o", made])
        for source, made in zip(sources, objects, strict=True)
    ]
    for run in runs:
        if run.wait():
            raise subprocess.CalledProcessError(run.returncode, run.args)
    library = folder / f"{NAME}.so"
    where = [f"-L{path}" for path in library_paths()]
    subprocess.run(
        [compiler(), "-shared", *objects, *where, *_LIBRARIES, "-o", library], check=True
    )
    return library
