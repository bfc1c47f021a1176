"""The pictures of the documentation show what the library does now."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_of_an_epoch_is_what_the_loader_gives():
    module = runpy.run_path(str(DOCS / "draw_epoch.py"))
    assert module["PICTURE"].read_text() == module["draw"](), "run python docs/draw_epoch.py"


def test_the_picture_of_a_mesh_is_what_ranks_hold():
    module = runpy.run_path(str(DOCS / "draw_mesh.py"))
    assert module["PICTURE"].read_text() == module["draw"](), "run python docs/draw_mesh.py"


def test_the_picture_of_a_cut_sequence_is_what_ranks_see(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)  # it draws with functions of draw_mesh
    module = runpy.run_path(str(DOCS / "draw_sequence.py"))
    assert module["PICTURE"].read_text() == module["draw"](), "run python docs/draw_sequence.py"


def titles(svg):
    return [each.text for each in ElementTree.fromstring(svg).iter(f"{SVG}title")]


@pytest.mark.slow
def test_the_picture_of_the_promise_is_what_both_libraries_measure():
    module = runpy.run_path(str(DOCS / "draw_promise.py"), run_name="draw_promise")
    found = {
        f"{library} on {size}": losses for (library, size), losses in module["measure"]().items()
    }
    drawn = dict(each.split(": ") for each in titles(module["PICTURE"].read_text()))
    for name, losses in found.items():
        assert losses[-1] == pytest.approx(float(drawn[name]), abs=1e-3), (
            "run python docs/draw_promise.py"
        )
    for size in (2, 4):
        # float32 rounds the sums of other parts elsewhere
        assert found[f"accel_fn on {size}"] == pytest.approx(found["accel_fn on 1"], rel=1e-4)
        assert found[f"accelerate on {size}"][-1] > 1.3 * found["accelerate on 1"][-1]


def test_the_chart_of_the_benchmarks_shows_the_figures_of_the_page():
    """Each dot has its figure as a title; each ratio of a table with both peers has a dot."""
    page = (DOCS / "benchmarks.md").read_text()
    figures = set()
    for head, lines in re.findall(r"^\| {3}(.*)\n\| -.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        names = [each.strip() for each in head.split("|")]
        for line in lines.splitlines():
            name, *cells = (each.strip() for each in line.strip("|").split("|"))
            ratios = dict(zip(names[1:], cells, strict=False))
            if {"accelerate", "Fabric"} <= ratios.keys():
                drawn = {"accelerate", "Fabric", "accel_fn", "accel_fn compiled"} & ratios.keys()
                figures |= {f"{name}: {each} {ratios[each]}" for each in drawn}
    assert len(figures) == 16 * 4 + 4 * 3
    assert set(titles((DOCS / "_static" / "benchmarks.svg").read_text())) == figures


@pytest.mark.parametrize("picture", sorted((DOCS / "_static").glob("*.svg")), ids=lambda p: p.name)
def test_pictures_are_svg_and_are_used(picture):
    assert ElementTree.fromstring(picture.read_text()).tag == f"{SVG}svg"
    texts = [path.read_text() for path in [*DOCS.rglob("*.md"), DOCS / "conf.py"]]
    assert any(f"_static/{picture.name}" in text for text in texts)


GALLERY = DOCS / "_static" / "gallery"


def test_the_gallery_has_a_picture_and_the_code_of_each_of_its_programs():
    page = (DOCS / "gallery.md").read_text()
    cards = re.findall(r'<a href="#(\S+)">\n<img src="_static/gallery/(\w+)\.svg" alt="\S', page)
    names = [name for _, name in cards]
    assert len(names) == 12
    assert [place for place, _ in cards] == re.findall(r"^\((\S+)\)=$", page, re.MULTILINE)
    assert re.findall(r"literalinclude\} \.\./examples/(\w+)\.py", page) == names
    assert sorted(names) == sorted(path.stem for path in GALLERY.iterdir())
    for path in GALLERY.iterdir():
        assert ElementTree.fromstring(path.read_text()).tag == f"{SVG}svg"
        assert path.stat().st_size < 60_000


def test_every_picture_of_the_gallery_is_drawn_by_its_script():
    drawn = runpy.run_path(str(DOCS / "draw_gallery.py"))["DRAWN"]
    assert sorted(each.__name__ for each in drawn) == sorted(
        path.stem for path in GALLERY.iterdir()
    )
