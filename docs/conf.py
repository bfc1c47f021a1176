"""Sphinx: Markdown pages, and the API from the docstrings. Warnings are errors; nothing is downloaded."""

import inspect
import tempfile
import typing
import zlib
from pathlib import Path

from sphinx.util.inspect import stringify_signature

import accel_fn
from accel_fn import testing

project = "accel_fn"
author = "the accel_fn authors"
copyright = author
version = release = accel_fn.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates", "changes", "inventories"]
html_theme = "furo"
html_title = f"accel_fn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_favicon = "_static/icon.svg"
html_copy_source = False
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. |\$ ", True
default_role = "code"
highlight_language = "text"
myst_heading_anchors = 3
autodoc_default_options = {"member-order": "bysource"}
# Each public name has a page, docs/api/FULL.NAME.rst, by docs/_templates/autosummary.
autosummary_context = {
    "shown_members": {  # those of other classes are not shown; "" is all
        "accel_fn.DistState": "is_main, data, along",
        "accel_fn.Grads": "present, norm, norm_read, scaled, map, named, values",
        "accel_fn.Preemption": "__call__, asked, ask, leave",
        "accel_fn.ShardedLoader": "__len__, __iter__, epochs, loader, indices, global_indices, "
        "state_dict, load_state_dict, differences_from",
        "accel_fn.Step": "__call__, forward, grads, update",
        "accel_fn.extend.LossScale": "start, adjust",
        "accel_fn.extend.Observer": "",
        "accel_fn.extend.SlotFunction": "validate, claim, allows, num_parts, share, left_out",
        "accel_fn.extend.Strategy": "",
        "accel_fn.observe.progress.Progress": "__len__, show",
        "accel_fn.observe.progress.ShownEpoch": "show",
    }
}
for page in (Path(__file__).parent / "api").glob("*.rst"):
    page.unlink()  # a page of a name that is gone would be in no table, which is an error
napoleon_numpy_docstring = False
napoleon_use_ivar = True

nitpicky = True
nitpick_ignore_regex = [  # type aliases and type variables have no page
    (
        "py:class",
        r"(.*\.(Fill|GlobalMean|Prepared)|DTensor|P|(.*\.)?Axis|Precision|Styles|Wrapper|Watchdog|ellipsis|\w+Fn|(.*\.)?(M|T|Batch))",
    ),
]

SITES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "hypothesis": "https://hypothesis.readthedocs.io/en/latest/",
}


def inventory(name):
    """Compress docs/inventories/NAME.txt, of lines `name page`, into the file that intersphinx reads."""
    names = (Path(__file__).parent / "inventories" / f"{name}.txt").read_text().splitlines()
    lines = "".join(f"{each} py:class 1 {page} -\n" for each, page in map(str.split, names))
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    path = Path(tempfile.mkdtemp()) / "objects.inv"
    compressed = zlib.compress(lines.encode())
    path.write_bytes(
        f"{head}# The remainder of this file is compressed using zlib.\n".encode() + compressed
    )
    return str(path)


intersphinx_mapping = {name: (url, inventory(name)) for name, url in SITES.items()}

DEFINED_IN = {}
# A public name is documented where users find it, not in the private module that defines it.
MODULES = (
    accel_fn.data,
    accel_fn.checkpoint,
    accel_fn.launcher,
    accel_fn.extend,
    accel_fn.contrib.estimate,
)
for module in (accel_fn, *MODULES, testing, testing.strategies):
    home = "accel_fn.testing.strategies" if module is testing.strategies else module.__name__
    for name in getattr(module, "__all__", vars(module)):
        member = getattr(module, name)
        ours = getattr(member, "__module__", "").startswith("accel_fn.")
        if ours and (inspect.isclass(member) or inspect.isfunction(member)):
            DEFINED_IN[home, name] = member.__module__
            member.__module__ = home
# `Epoch[Batch]`, made where it is a base class, would be found again with the private module.
for forget in typing._cleanups:
    forget()

PARAMETERS = [
    inspect.Parameter("fn", inspect.Parameter.POSITIONAL_OR_KEYWORD),
    inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD),
]
# otherwise it would be that of partial
accel_fn.extend.SlotFunction.__signature__ = inspect.Signature(PARAMETERS)

MADE_BY_FUNCTIONS = (
    "accel_fn.Step",
    "accel_fn.ShardedLoader",
    "accel_fn.Epoch",
    "accel_fn.data.loader.Epochs",
    "accel_fn.data.prefetch.Prefetched",
    "accel_fn.data.group_batches.Windowed",
    "accel_fn.data.SeededSamples",
    "accel_fn.data.BatchPlan",
    "accel_fn.observe.progress.Progress",
    "accel_fn.observe.progress.ShownEpoch",
)


def shorten_signature(app, what, name, obj, options, signature, returns):
    """A class is shown with the names and defaults that a user gives; its attributes tell the types."""
    if what != "class" or not inspect.isclass(obj):
        return None
    if name in MADE_BY_FUNCTIONS:
        return "", None
    full = inspect.signature(obj)
    shown = [
        each.replace(annotation=each.empty)
        for each in full.parameters.values()
        if not each.name.startswith("_")
    ]
    return stringify_signature(full.replace(parameters=shown, return_annotation=full.empty)), None


def keep_colons(app, what, name, obj, options, lines):
    """Types stand in signatures alone: what comes before a colon in a docstring is no type."""
    if what == "property":
        lines[0] = f": {lines[0]}"
    for before, line in enumerate(lines[:-1]):
        if line in ("Returns:", "Yields:"):
            text = lines[before + 1].lstrip()
            indent = len(lines[before + 1]) - len(text)
            lines[before + 1] = f"{' ' * indent}: {text}"


FIELDS = ("Law: ", "Cost: ", "Source: ")


def mark_fields(app, what, name, obj, options, lines):
    """Turn the paragraphs that begin with a word of FIELDS into fields, beside Returns and Raises."""
    inside = False
    for at, line in enumerate(lines):
        starts = line.startswith(FIELDS)
        inside = starts or (inside and bool(line))
        if inside:
            lines[at] = f":{line}" if starts else f"   {line.lstrip()}"


def defining_module(app, module, name):
    """Return the module whose source the link beside a name shows."""
    return DEFINED_IN.get((module, name.partition(".")[0]), module)


def list_names(app, docname, source):
    """Fill the table of the API's index with every public name."""
    if docname == "api":
        below = (
            f"~{module.__name__.removeprefix('accel_fn.')}.{name}"
            for module in MODULES
            for name in module.__all__
        )
        every = sorted([*accel_fn.__all__, *below], key=lambda name: name.split(".")[-1].lower())
        names = "\n   ".join(every)
        source[0] = source[0].replace("EVERY_NAME", names)


def shorten_sidebar(app, page, template, context, doctree):
    """Leave the pages of names out of the sidebar: with them, the build takes twice as long."""
    if full := context.get("toctree"):
        context["toctree"] = lambda **options: full(**{**options, "maxdepth": 2})


def setup(app):
    app.connect("source-read", list_names)
    app.connect("html-page-context", shorten_sidebar, priority=400)  # before furo
    app.connect("viewcode-follow-imported", defining_module)
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", mark_fields, priority=600)  # after it
