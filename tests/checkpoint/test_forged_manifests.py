"""Manifests that somebody has changed, with the right hash: refused by name, or loaded whole."""

import copy
import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accel_fn as af
from accel_fn.errors import AccelError, ArgumentError, CheckpointError
from accel_fn.testing import simulate
from accel_fn.testing.internals import export_model
from tests.checkpoint.test_checkpoint_files import (
    BATCH,
    everything,
    make,
    names,
    put,
    refused,
    run,
    with_manifest,
)
from tests.support import strategies as ours

LONG, LONG_TEXT = "x" * 10**5, "x" * (10**6 + 1)
OTHER = ("entries", "model/0.bias")


def renamed(place, name):
    """Give a key another name."""

    def change(body):
        *way, last = place
        for key in way:
            body = body[key]
        body[name] = body.pop(last)

    return change


def onto(body):
    """Let a tensor begin in the middle of another one."""
    start = body["entries"]["model/0.weight"]["chunks"][0]["start"]
    body["entries"]["model/0.bias"]["chunks"][0]["start"] = start + 8


def in_a_pickle(body):
    body["entries"]["model/0.bias"]["chunks"][0] |= {"file": "common.pt", "start": 0}


def left_out_too(body):
    body["frozen"]["model/0.bias"] = {"dtype": "float32", "shape": [4], "hash": "0"}


def another_file(body):
    body["files"]["notes.txt"] = body["files"]["common.pt"]


PRINTED = "which must be of at most 4096 characters that can be printed"
FORGED = {
    "a file with NUL": (
        renamed(("files", "tensors_00000.bin"), "a\0b"),
        r"files='a\\x00b', which must",
    ),
    "a file of half a character": (
        renamed(("files", "tensors_00000.bin"), "\ud800"),
        "files='.ud800'",
    ),
    "a long file": (
        renamed(("files", "tensors_00000.bin"), LONG),
        "files='x+[.]{3}, which must be",
    ),
    "another file": (another_file, "files='notes.txt', which must be a file of the ranks' tensors"),
    "a tensor with NUL": (renamed(OTHER, "a\0"), rf"name of a tensor='a\\x00', {PRINTED}"),
    "a tensor with a colour": (
        renamed(OTHER, "\x1b[31m"),
        rf"name of a tensor='.x1b\[31m', {PRINTED}",
    ),
    "a long tensor": (renamed(OTHER, LONG), rf"name of a tensor='x+[.]{{3}}, {PRINTED}"),
    "a long version": (put("accel_fn", LONG), rf"name='x+[.]{{3}}, {PRINTED}"),
    "a long text": (put("explained", "", LONG_TEXT), r"text='x+[.]{3}, which must be at most"),
    "a long value": (
        put("plans", "", "new", [{"a": LONG_TEXT}]),
        "text='x+[.]{3}, which must be at most",
    ),
    "a long dtype": (
        put(*OTHER, "dtype", LONG),
        "dtype of model/0.bias='x+[.]{3}, which must be one",
    ),
    "a long key": (put("files", LONG, 3), r"files\[.x+[.]{3}=3, which must be FileMark"),
    "a long format": (put("format", LONG), r"of format 2, got x{100}, written by"),
    "a large number": (put("call", 10**400), "call=10+[.]{3}, which must be an integer >= 0 and"),
    "bytes of another tensor": (
        onto,
        r"tensors in tensors_00000.bin=\[.*\], which must be in places of",
    ),
    "bytes of a pickle": (
        in_a_pickle,
        "'common.pt', which must be in a file beside it that is listed",
    ),
    "two kinds": (
        left_out_too,
        r"tensors=\['model/0.bias'\], which must be saved, left out, or another's",
    ),
    "no such shape": (
        put("entries", "new", {"dtype": "float32", "shape": [0, 2**62, 4], "chunks": []}),
        "shape of new=.*, which must be one that torch can make",
    ),
}


def as_written(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]


def twice(body):
    body["whole"]["tensors_00000.bin"]["float64"] = {"model/0.bias": [0, 0, 4]}


def in_both_forms(body):
    body["entries"]["model/0.bias"] = {"dtype": "float32", "shape": [0], "chunks": []}


FILE = ("whole", "tensors_00000.bin", "float32")
FORGED_WHOLE = {
    "no dict": (put("whole", 3), "whole=3, which must be .*Mapping"),
    "no dtype": (put("whole", "tensors_00000.bin", 3), r"whole\['tensors_00000.bin'\]=3"),
    "no tensors": (put(*FILE, 3), "=3, which must be .*Mapping"),
    "another dtype": (renamed(FILE, "bits9"), "dtype of whole='bits9', which must be one of torch"),
    "another file": (renamed(FILE[:2], "common.pt"), "'common.pt', which must be in a file beside"),
    "no place": (
        put(*FILE, "model/0.bias", [0]),
        r"a tensor=\[0\], which must be its place, start and",
    ),
    "no list": (put(*FILE, "model/0.bias", 3), "whole=3, which must be tuple"),
    "no count": (put(*FILE, "model/0.bias", [0, 0, -4]), "whole=-4, which must be an integer >= 0"),
    "past the end": (put(*FILE, "model/0.bias", [0, 0, 10**9]), "in the .* bytes of its file"),
    "twice": (twice, r"tensors=\['model/0.bias'\], which must be listed once"),
    "in both forms": (in_both_forms, r"tensors=\['model/0.bias'\], which must be listed once"),
    "a name with NUL": (renamed((*FILE, "model/0.bias"), "a\0"), rf"tensor='a\\x00', {PRINTED}"),
}


@pytest.mark.parametrize(("change", "text"), FORGED_WHOLE.values(), ids=FORGED_WHOLE)
def test_a_forged_place_of_a_whole_tensor_is_refused(tmp_path, change, text):
    run(tmp_path, 1)
    with_manifest(tmp_path / "step_00000001", change, as_written)
    refused(tmp_path, rf"step_00000001/manifest\.json .*{text}")


@pytest.mark.parametrize(("change", "text"), FORGED.values(), ids=FORGED)
def test_a_forged_manifest_is_refused_and_skipped(tmp_path, change, text, capfd):
    run(tmp_path, 1, 2)
    whole, forged = tmp_path / "step_00000001", tmp_path / "step_00000002"
    with_manifest(forged, change)
    refused(tmp_path, rf"step_00000002/manifest\.json .*{text}")
    capfd.readouterr()
    assert af.latest(tmp_path) == whole
    warning = capfd.readouterr().err
    assert f"latest: {forged} is skipped" in warning
    assert len(warning) < 2000
    assert [bool(each.damage) for each in af.checkpoint.list_checkpoints(tmp_path)] == [False, True]
    assert af.checkpoint.list_checkpoints(tmp_path)[1].damage.isprintable()
    with pytest.raises(CheckpointError, match=r"export: .*must be"):
        export_model(forged, tmp_path / "weights", "", 10**9)
    state, step = make()
    af.load(step, state, tmp_path, at=1)
    run(tmp_path, 3, saver=(state, step), keep=1)
    assert names(tmp_path) == [".lock", "step_00000001", "step_00000002", "step_00000003"]


@pytest.mark.parametrize("name", ["a\nb", "\x1b[31m", "y" * 5000])
def test_a_name_that_no_manifest_may_hold_is_refused_by_save(tmp_path, name):
    model = nn.ParameterDict({name: nn.Parameter(BATCH[0].new_ones(1))})
    plan = af.Plan(lambda model, batch: model[name].sum(), model, ours.adamw(model.parameters()))
    with pytest.raises(ArgumentError, match="save: step must name its tensors by at most 4096"):
        af.save(*reversed(af.build(plan, af.DistState())), tmp_path)


JUNK = [
    *(None, True, -1, 0, 1, 2, 3, 10**9, 2**62, 10**400, 0.5, float("nan"), 1e400),
    *("", "x", "a\0", "\x1b", "\ud800", "..", "model/0.weight", "common.pt", "float16", "bits8"),
    *([], [0], [4, 3], [3, 4], {}, {"dp": 1}, [[]], {"": {}}),
]


def places(value, place=()):
    """Yield the path to every value in nested containers."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, each in items:
        yield (*place, key)
        yield from places(each, (*place, key))


@pytest.fixture(scope="module")
def saved():
    """Save checkpoints of one rank and of two, which hold parts of tensors; return their manifests."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for world_size in (1, 2):
            home = Path(folder, str(world_size))
            recipe = af.compose() if world_size == 1 else af.wrap_fsdp(sync_batchnorm=True)
            simulate(
                lambda state, home=home, recipe=recipe: (
                    run(home, 1, saver=make(state=state, recipe=recipe)) and None
                ),
                world_size=world_size,
            )
            path = home / "step_00000001"
            body = as_written(path)
            found.append((path, body, [*places(body)]))
        yield found


def damaged(body, changes):
    for place, way, junk in changes:
        inside = body
        try:
            for key in place[:-1]:
                inside = inside[key]
            if way == "value":
                inside[place[-1]] = junk
            elif way == "gone":
                del inside[place[-1]]
            elif isinstance(inside, dict):
                inside[junk if isinstance(junk, str) else "new"] = inside[place[-1]]
            else:
                inside.append(inside[place[-1]])
        except (LookupError, TypeError):  # an earlier change took it away
            continue


def error_of(function):
    """Call a function; return the text of an error of ours."""
    try:
        function()
    except AccelError as error:
        return str(error)


@ours.share(0.6)
@given(data=st.data())
def test_any_manifest_is_refused_or_loaded_whole(saved, data):
    path, body, ways = data.draw(st.sampled_from(saved))
    kinds = st.sampled_from(["value", "value", "gone", "again"])
    change = st.tuples(st.sampled_from(ways), kinds, st.sampled_from(JUNK))
    body = copy.deepcopy(body)
    damaged(body, data.draw(st.lists(change, min_size=1, max_size=3)))
    with tempfile.TemporaryDirectory() as folder:
        forged = Path(shutil.copytree(path, Path(folder, path.name)))
        with_manifest(forged, lambda found: (found.clear(), found.update(body)))
        [listed] = af.checkpoint.list_checkpoints(folder)
        assert (af.latest(folder) is None) == bool(listed.damage)
        assert not re.search(r"[\x00-\x1f]", listed.damage)
        state, step = make(7)
        state, _ = step(state, BATCH)
        before = everything(step)
        for strict in (True, False):
            error = error_of(lambda strict=strict: af.load(step, state, folder, strict=strict))
            if error is None:
                assert not listed.damage
                break
            assert everything(step) == before
            assert len(error) < 20_000
        if error_of(lambda: export_model(forged, Path(folder, "weights"), "", 10**9)):
            assert not Path(folder, "weights").exists()
