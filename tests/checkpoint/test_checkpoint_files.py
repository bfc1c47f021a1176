"""Checkpoint files that are damaged or incomplete, of two runs, or on a full disk."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import random
import shutil
import signal
import stat
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import accel_fn as af
from accel_fn.errors import CheckpointError, PeerError
from accel_fn.testing import simulate
from accel_fn.testing.internals import Share, limited
from tests.support import strategies as ours
from tests.support.other_runs import other_run
from tests.support.processes import launch

FILES = ["manifest.json", "common.pt", "rank_00000.pt", "tensors_00000.bin"]
BATCH = (torch.arange(12.0).view(4, 3) % 5 - 2, torch.zeros(4, 2))


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place(len(data))] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped in the middle": lambda path: flip(path, lambda size: size // 2),
    "flipped at the start": lambda path: flip(path, lambda size: 0),
    "flipped at the end": lambda path: flip(path, lambda size: size - 1),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "empty": lambda path: os.truncate(path, 0),
    "gone": Path.unlink,
}
# each rank's own running statistics are among what a checkpoint holds
pytestmark = pytest.mark.filterwarnings("ignore:step. model should have no BatchNorm")
IN_EACH_FILE = [(file, "flipped in the middle") for file in FILES]
OF_A_FILE = [("tensors_00000.bin", damage) for damage in DAMAGES]
BY_SIZE = [each for each in OF_A_FILE if "flipped" not in each[1]]


class Extra:
    """An extra that a user keeps beside the model."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, saved):
        self.value = saved["value"]


def loss_fn(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make(seed=0, *, state=None, recipe=None):
    """Make the step of a new program."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plan = af.Plan(loss_fn, model, optimizer)
    return af.build(recipe(plan) if recipe else plan, state or af.DistState())


def run(folder, *steps, saver=None, **options):
    """Train to each of these steps and save there; return the state and the step at the end."""
    state, step = saver or make()
    for number in steps:
        while state.step < number:
            state, _ = step(state, BATCH)
        af.save(step, state, folder, **options)
    return state, step


def tensors_of(step):
    """Return model and optimizer, bit for bit."""
    tensors = ours.kept_tensors(step)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def everything(step):
    """Return model, optimizer and generators, bit for bit."""
    found = tensors_of(step)
    found["torch"] = torch.get_rng_state().numpy().tobytes()
    found["numpy"] = pickle.dumps(np.random.get_state())
    found["python"] = repr(random.getstate()).encode()
    return found


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def refused(folder, match, **options):
    """Assert that `load` refuses the checkpoint and leaves the program unchanged."""
    state, step = make(7)
    state, _ = step(state, BATCH)
    extra, before = Extra("mine"), everything(step)
    with pytest.raises(CheckpointError, match=match) as caught:
        af.load(step, state, folder, extras={"extra": extra}, **options)
    assert isinstance(caught.value, RuntimeError)
    assert everything(step) == before
    assert (state.step, extra.value) == (1, "mine")


def loads(folder, expected_step):
    """Assert that the newest checkpoint loads, and that it is that of this step."""
    state, step = make(7)
    assert af.latest(folder) == folder / f"step_{expected_step:08d}"
    assert af.load(step, state, folder).step == expected_step
    saved = make()
    for _ in range(expected_step):
        saved = saved[1](saved[0], BATCH)[0], saved[1]
    torch.testing.assert_close(
        step.plan.model.state_dict(), saved[1].plan.model.state_dict(), rtol=0, atol=0
    )


def read_body(checkpoint):
    """Read a manifest, with tensors of one chunk in the long form of the others."""
    body = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]
    for file, dtypes in body["whole"].items():
        for dtype, tensors in dtypes.items():
            for name, (_, start, *shape) in tensors.items():
                length = math.prod(shape) * getattr(torch, dtype).itemsize
                chunk = {"offsets": [0] * len(shape), "sizes": shape}
                chunk |= {"file": file, "start": start, "length": length}
                body["entries"][name] = {"dtype": dtype, "shape": shape, "chunks": [chunk]}
    del body["places"]
    return {**body, "whole": {}}


def hash_of(data):
    return xxhash.xxh3_128(data).hexdigest()


def with_manifest(checkpoint, change, read=read_body):
    """Change the manifest and its hash."""
    path = checkpoint / "manifest.json"
    body = read(checkpoint)
    change(body)
    data = json.dumps(body, indent=1).encode()
    path.write_bytes(b'{"hash": "%s", "checkpoint":\n%s}\n' % (hash_of(data).encode(), data))


# -- damaged files


@pytest.mark.parametrize(
    ("file", "damage"), [*IN_EACH_FILE[:-1], *OF_A_FILE, ("manifest.json", "empty")]
)
def test_damage_is_found_before_anything_is_overwritten(tmp_path, file, damage):
    run(tmp_path, 1, 2, extras={"extra": Extra("saved")})
    DAMAGES[damage](tmp_path / "step_00000002" / file)
    refused(tmp_path, rf"step_00000002\S* .*{file}|step_00000002/{file}")
    refused(tmp_path, rf"step_00000002\S* .*{file}|step_00000002/{file}", at=2)


OF_TWO = [*FILES, "rank_00001.pt", "tensors_00001.bin"]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """Make a checkpoint of two ranks; each rank writes files of every kind."""
    folder = tmp_path_factory.mktemp("two")

    def save(state):
        state, step = make(state=state, recipe=af.wrap_ddp())
        state, _ = step(state, BATCH)
        af.save(step, state, folder, extras={"extra": Extra(state.rank)})

    simulate(save, world_size=2)
    assert names(folder / "step_00000001") == sorted(OF_TWO)
    return folder


@pytest.mark.parametrize(
    ("file", "damage", "world_size"),
    [
        *[(file, "flipped in the middle", 2) for file in OF_TWO],
        *[("tensors_00001.bin", damage, 1) for damage in ("one byte short", "gone")],
    ],
)
def test_damage_of_any_rank_s_file_is_found_by_all(of_two, tmp_path, file, damage, world_size):
    """A world of fewer ranks than have written finds it too."""
    folder = shutil.copytree(of_two, tmp_path / "run")
    DAMAGES[damage](folder / "step_00000001" / file)

    def load(state):
        state, step = make(7, state=state, recipe=af.wrap_ddp())
        extra, before = Extra("mine"), tensors_of(step)
        with pytest.raises(RuntimeError, match=rf"step_00000001(/| .*){file}"):
            af.load(step, state, folder, extras={"extra": extra})
        assert tensors_of(step) == before
        assert extra.value == "mine"

    simulate(load, world_size=world_size)


@pytest.mark.parametrize(
    ("file", "damage"), [*[(file, "one byte short") for file in FILES[:-1]], *BY_SIZE]
)
def test_what_is_missing_or_of_another_size_is_listed_and_never_the_latest(tmp_path, file, damage):
    run(tmp_path, 1, 2, 3)
    DAMAGES[damage](tmp_path / "step_00000003" / file)
    listed = {each.step: each.damage for each in af.checkpoint.list_checkpoints(tmp_path)}
    assert (listed[1], listed[2]) == ("", "")
    assert file in listed[3]
    assert af.latest(tmp_path) == tmp_path / "step_00000002"
    for checkpoint in (tmp_path / "step_00000001", tmp_path / "step_00000002"):
        DAMAGES[damage](checkpoint / file)
    assert af.latest(tmp_path) is None


def test_what_is_listed_of_a_whole_one(tmp_path):
    run(tmp_path, 5)
    (found,) = af.checkpoint.list_checkpoints(tmp_path)
    sizes = [(tmp_path / "step_00000005" / file).stat().st_size for file in FILES[1:]]
    assert (found.step, found.size, found.world_size, found.damage) == (5, sum(sizes), 1, "")


def put(*places_and_value):
    """Replace a value in the manifest."""

    def change(body):
        *places, last, value = places_and_value
        for place in places:
            body = body[place]
        body[last] = value

    return change


def leads_away(body):
    body["files"]["../common.pt"] = body["files"]["common.pt"]


def overlaps(body):
    """Return two chunks of half a tensor, both the first half."""
    (chunk,) = body["entries"]["model/0.weight"]["chunks"]
    half = chunk | {"sizes": [2, 3], "length": 24}
    body["entries"]["model/0.weight"]["chunks"] = [half, half]


def overlaps_in_part(body):
    (chunk,) = body["entries"]["model/0.weight"]["chunks"]
    blocks = [([0, 0], [2, 2]), ([1, 1], [2, 2]), ([3, 0], [1, 3]), ([0, 2], [1, 1])]
    body["entries"]["model/0.weight"]["chunks"] = [
        chunk | {"offsets": offsets, "sizes": sizes, "length": 4 * sizes[0] * sizes[1]}
        for offsets, sizes in blocks
    ]


ENTRY = ("entries", "model/0.weight")
CHUNK = (*ENTRY, "chunks", 0)
DISJOINT = "which must be blocks that have no element in common"
ONCE = "which must be all of its elements once"
BLOCK = r"which must be a block of \[4, 3\]"


def twice(body):
    chunks = body["entries"]["model/0.weight"]["chunks"]
    chunks.append(chunks[0])


NOT_OF_THIS_VERSION = {
    "path": (leads_away, r"files='\.\./common\.pt', which must be names of files beside it"),
    "elsewhere": (
        put(*CHUNK, "file", "/etc/passwd"),
        "'/etc/passwd', which must be in a file beside",
    ),
    "more": (put("new", 1), "keys of manifest=.*'new'"),
    "less": (lambda body: body.pop("seed"), "keys of manifest=.*'seed'"),
    "no dict": (put("entries", 3), "entries=3, which must be .*Mapping"),
    "no list": (put(*ENTRY, "shape", 4), "shape=4, which must be .*tuple"),
    "no record": (put("files", "common.pt", 3), r"files\['common.pt'\]=3, which must be FileMark"),
    "no count": (put("step", "1"), "step='1', which must be an integer >= 0"),
    "negative": (put(*CHUNK, "start", -8), "start=-8, which must be an integer >= 0"),
    "half": (put(*CHUNK, "sizes", [2.0, 3]), "sizes=2.0, which must be an integer >= 0"),
    "no text": (put("accel_fn", 3), "accel_fn=3, which must be str"),
    "no texts": (put("tied", {"a": 3}), r"tied\['a'\]=3, which must be str"),
    "other step": (put("step", 2), "step=2, which must be 1, its folder's"),
    "another mesh": (
        put("mesh", {"dp": 2}),
        r"mesh=\{'dp': 2\}, which must be of 1 ranks, with an axis dp",
    ),
    "an axis of another version": (
        put("mesh", {"dp": 1, "ep": 1}),
        r"mesh=\{'dp': 1, 'ep': 1\}, which m",
    ),
    "no ranks": (put("world_size", 0), "which must be those of 0 ranks"),
    "more ranks": (put("world_size", 10**15), r"files=\[.*, which must be those of 10{15} ranks"),
    "other ranks": (put("world_size", 2), r"which must be names that have rank_00001\.pt among"),
    "no common file": (lambda body: body["files"].pop("common.pt"), "have common.pt among them"),
    "dtype": (put(*ENTRY, "dtype", "nn"), "'nn', which must be one of torch's"),
    "a hole": (put(*ENTRY, "chunks", []), f"=0, {ONCE}"),
    "twice": (twice, f"=24, {ONCE}"),
    "an overlap": (overlaps, DISJOINT),
    "a part in common": (overlaps_in_part, DISJOINT),
    "offset": (put(*CHUNK, "offsets", [1, 0]), BLOCK),
    "no offset": (put(*CHUNK, "offsets", []), BLOCK),
    "length": (put(*CHUNK, "length", 47), "which must be of 48 bytes"),
    "end": (put(*CHUNK, "start", 10**9), "which must be in the .* bytes of its file"),
}
MANIFESTS = {
    name: (change, f"must be one of this version, got .*{text}")
    for name, (change, text) in NOT_OF_THIS_VERSION.items()
} | {
    "format": (put("format", "3"), "must be of format 2, got 3, written by accel_fn"),
    "no format": (lambda body: body.pop("format"), "must be of format 2, got None, written by"),
}


@pytest.mark.parametrize(("change", "text"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_of_others_is_not_trusted(tmp_path, change, text):
    """`load` reads no file outside the checkpoint; a manifest that makes no sense is an error with
    its name."""
    run(tmp_path, 1)
    with_manifest(tmp_path / "step_00000001", change)
    refused(tmp_path, rf"step_00000001/manifest\.json {text}")
    assert af.latest(tmp_path) is None
    assert "manifest.json" in af.checkpoint.list_checkpoints(tmp_path)[0].damage


@pytest.mark.parametrize("body", [b"[]", b"3", b"no JSON", b"", b"[" * 10**5, b"\xff"])
def test_a_manifest_that_is_none_is_not_trusted(tmp_path, body):
    run(tmp_path, 1)
    path = tmp_path / "step_00000001" / "manifest.json"
    path.write_bytes(b'{"hash": "%s", "checkpoint":\n%s}\n' % (hash_of(body).encode(), body))
    refused(tmp_path, r"step_00000001/manifest\.json must be one of this version, got ")


def remark(checkpoint, file):
    """Write the current mark of a file into the manifest."""
    data = (checkpoint / file).read_bytes()
    digest = hash_of(xxhash.xxh3_128(data).digest())
    with_manifest(checkpoint, put("files", file, {"size": len(data), "hash": digest}))


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(("file", "packed"), [("common.pt", True), ("rank_00000.pt", False)])
def test_a_pickle_in_place_of_a_file_runs_nothing(tmp_path, file, packed):
    """Hashes detect damage, not forgery, so a file may hold anything."""
    run(tmp_path, 1)
    checkpoint, fuse = tmp_path / "step_00000001", tmp_path / "fuse"
    bomb = {"random": Bomb(fuse), "buffers": {}, "scaler": None, "steps": {}}
    if packed:
        torch.save(bomb, checkpoint / file)
        assert zipfile.is_zipfile(checkpoint / file)
    else:
        (checkpoint / file).write_bytes(pickle.dumps(bomb, protocol=2))
    remark(checkpoint, file)
    state, step = make(7)
    before = everything(step)
    with pytest.raises(CheckpointError):
        af.load(step, state, tmp_path)
    assert not fuse.exists()
    assert everything(step) == before
    if packed:
        torch.load(checkpoint / file, weights_only=False)  # the file is such a pickle
    else:
        pickle.loads((checkpoint / file).read_bytes())
    assert fuse.exists()


# -- folders that cannot be written to


@pytest.mark.parametrize("bad", [[Extra], {"a": len}], ids=["class", "function"])
def test_extras_that_hold_more_than_plain_data_are_refused_by_name(tmp_path, bad):
    state, step = run(tmp_path, 1)
    extras = {"good": Extra(1), "bad": Extra(bad)}
    with pytest.raises(ValueError, match=r"^save: extras.*bad.* must hold tensors, num") as caught:
        af.save(step, state, tmp_path, extras=extras)
    assert "good" not in str(caught.value)
    assert names(tmp_path) == [".lock", "step_00000001"]
    loads(tmp_path, 1)


@pytest.mark.parametrize("place", ["", "a/b"])
def test_a_file_in_place_of_the_folder_is_refused_and_stays(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / place
    with pytest.raises(CheckpointError, match=r"^save: folder must be one that can be written to"):
        run(folder, 1)
    assert (tmp_path / "file").read_text() == "mine"
    assert af.checkpoint.list_checkpoints(folder) == []
    assert af.latest(folder) is None
    refused(folder, "must be a checkpoint in .* got steps none")


def test_a_file_with_the_name_of_a_checkpoint_is_none(tmp_path):
    run(tmp_path, 1)
    (tmp_path / "step_00000002").write_text("mine")
    assert "no checkpoint" in af.checkpoint.list_checkpoints(tmp_path)[1].damage
    assert af.latest(tmp_path) == tmp_path / "step_00000001"
    refused(tmp_path, "step_00000002 is no checkpoint")


@pytest.mark.slow
def test_a_full_disk_leaves_what_was_there(tmp_path):
    """The disk is full after any number of bytes, in a process with a limit on the size of
    files."""
    script = f"""
        import resource, signal
        from pathlib import Path
        import pytest
        import accel_fn as af
        from tests.checkpoint.test_checkpoint_files import CheckpointError, loads, make, names, run, BATCH
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        folder = Path({str(tmp_path)!r}) / "run"
        saver = run(folder, 1)
        sizes = [path.stat().st_size for path in (folder / "step_00000001").iterdir()]
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        for number in (1, 2):
            saver = saver if number == 1 else (saver[1](saver[0], BATCH)[0], saver[1])
            for limit in [0, 1, *(size - 1 for size in sizes)] if number == 1 else [0, 1000]:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
                try:
                    with pytest.raises(CheckpointError, match="that can be written to.*File too large"):
                        af.save(*reversed(saver), folder)
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
                assert names(folder) == [".lock", "step_00000001"]
            loads(folder, 1)
        af.save(*reversed(saver), folder)
        loads(folder, 2)
        say("done")
    """
    launch(script, num_processes=1, expect=["done"])


# -- file systems that can do less


def refusing(function, number, only=lambda path: True, *, late=False):
    """Return `function` that reports an error for some paths or open files, before or after it has worked."""

    def call(path, *others):
        fails = only(path)
        if late or not fails:
            function(path, *others)
        if fails:
            raise OSError(number, os.strerror(number))

    return call


def is_open_folder(file):
    return stat.S_ISDIR(os.fstat(file).st_mode)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_sync_folders_holds_checkpoints(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refusing(os.fsync, number, is_open_folder))
    _, step = run(tmp_path / "run", 1, 2)
    loads(tmp_path / "run", 2)
    af.save_model(step.plan.model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("number", "fails"),
    [(errno.EIO, is_open_folder), (errno.EINVAL, lambda file: not is_open_folder(file))],
    ids=["of a folder", "of a file"],
)
def test_any_other_failure_to_sync_is_an_error(tmp_path, monkeypatch, number, fails):
    monkeypatch.setattr(os, "fsync", refusing(os.fsync, number, fails))
    with pytest.raises(CheckpointError, match=os.strerror(number)):
        run(tmp_path, 1)


@pytest.mark.parametrize("wait", [True, False])
def test_a_rename_that_is_done_and_reports_an_error_is_done(tmp_path, monkeypatch, wait):
    """NFS does so if the answer to the first request is lost."""
    monkeypatch.setattr(Path, "rename", refusing(Path.rename, errno.ENOENT, late=True))

    def run_ranks(state):
        saver = make(state=state, recipe=af.wrap_ddp())
        state, step = run(tmp_path / "run", 1, 2, 3, saver=saver, keep=2, wait=wait)
        return af.load(step, state, tmp_path / "run").step

    assert simulate(run_ranks, world_size=2) == [3, 3]
    assert steps_of(tmp_path / "run") == [2, 3]


@contextmanager
def nobody():
    """Run as another user for a while, since root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (af.latest, 0o000),
        (af.checkpoint.list_checkpoints, 0o000),
        (af.load, 0o444),
        (af.resume, 0o000),
        (af.resume, 0o444),
    ],
)
def test_a_folder_that_may_not_be_read_is_refused_in_one_line(function, mode):
    """A run that found none there would begin anew."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        Path(place).chmod(0o755)
        saver = run(folder, 1)
        arguments = (*reversed(saver), folder) if function in (af.load, af.resume) else (folder,)
        folder.chmod(mode)
        name = "load" if (function, mode) == (af.resume, 0o444) else function.__name__
        text = rf"^{name}: .* be (one|a file) that can be read \(Permission denied\)(, got '.*')?$"
        with nobody(), pytest.raises(CheckpointError, match=text):
            function(*arguments)
        folder.chmod(0o755)


def test_a_checkpoint_that_may_not_be_read_is_listed_with_the_reason():
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        Path(place).chmod(0o755)
        run(folder, 1, 2)
        (folder / "step_00000002").chmod(0o000)
        with nobody():
            whole, locked = af.checkpoint.list_checkpoints(folder)
            assert af.latest(folder) == whole.path
        assert "must be a file that can be read (Permission denied)" in locked.damage
        (folder / "step_00000002").chmod(0o755)


def test_a_relative_folder_is_refused_where_the_working_folder_was_removed(tmp_path, monkeypatch):
    saver = run(tmp_path / "run", 1)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    text = (
        "^save: folder must be an absolute path, since the working folder was removed, got 'run'$"
    )
    with pytest.raises(CheckpointError, match=text):
        run("run", 2, saver=saver)
    run(tmp_path / "run", 2, saver=saver)


@pytest.mark.parametrize("mode", [0o777, 0o2775, 0o700], ids=oct)
def test_a_user_who_may_write_to_a_folder_may_lock_it(mode):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        folder.chmod(mode)
        Path(place).chmod(0o755)
        run(folder, 1)
        assert stat.S_IMODE((folder / ".lock").stat().st_mode) == mode & 0o666
        if mode == 0o777:
            with nobody():
                run(folder, 2)
            loads(folder, 2)


def test_a_link_in_place_of_the_lock_is_refused_and_its_target_stays(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"^save: "):
        run(tmp_path / "run", 1)
    assert (tmp_path / "mine").read_text() == "mine"
    assert steps_of(tmp_path / "run") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user")
def test_older_ones_that_cannot_be_removed_are_an_error_and_the_new_one_is_there():
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        folder.chmod(0o1777)  # other users may write here, and not rename files of others
        Path(place).chmod(0o755)
        run(folder, 1)
        text = r"^save: .*step_00000002 is saved, but older ones must be removed: .*not permitted"
        with nobody(), pytest.raises(CheckpointError, match=text):
            run(folder, 2, keep=1)
        loads(folder, 2)


class Removing(Extra):
    """Its `state_dict` removes the folder while the checkpoint is being saved."""

    def state_dict(self):
        shutil.move(self.value, f"{self.value}-elsewhere")
        return {}


def test_a_folder_that_goes_away_during_a_save_is_an_error(tmp_path):
    folder = tmp_path / "run"
    state, step = run(folder, 1)
    with pytest.raises(CheckpointError, match=r"that can be written to.*No such file"):
        af.save(step, state, folder, extras={"removing": Removing(folder)})
    assert af.latest(folder) is None
    elsewhere = Path(f"{folder}-elsewhere")
    loads(elsewhere, 1)
    run(folder, 2, saver=(state, step))
    loads(folder, 2)


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "in the background"])
def test_a_folder_that_goes_away_once_all_is_written_is_an_error(tmp_path, monkeypatch, wait):
    folder, write = tmp_path / "run", Share.write

    def write_and_move(share, draft, *count):
        written = write(share, draft, *count)
        folder.rename(tmp_path / "elsewhere")
        return written

    def save_twice():  # the second save raises a failure of the first in the background
        for _ in range(2):
            af.save(step, state, folder, wait=wait)

    state, step = run(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Share, "write", write_and_move)
        with pytest.raises(CheckpointError, match=r"step_00000001 is gone: it was moved or"):
            save_twice()
    assert af.latest(folder) is None
    loads(tmp_path / "elsewhere", 1)


# -- two runs in one folder


@pytest.fixture
def impatient():
    """Shorten the wait for a run that may be ending."""
    with limited("tries for a lock", 1):
        yield


LOCKING = """
import os, time
from pathlib import Path
from accel_fn.parallel.file_lock import FileLock
lock = FileLock(Path(folder) / ".lock")
"""


def test_a_run_that_was_killed_holds_nothing(tmp_path, impatient):
    script = LOCKING + "print('up', flush=True); sys.stdin.read()"
    with (
        other_run(tmp_path, script) as other,
        pytest.raises(CheckpointError, match=rf"pid {other.pid}\b"),
    ):
        run(tmp_path, 1)
    run(tmp_path, 1)


def test_a_folder_waits_for_a_run_that_is_ending(tmp_path):
    script = LOCKING + "print('up', flush=True); sys.stdin.readline(); time.sleep(0.3)"
    with other_run(tmp_path, script) as other:
        other.stdin.write("\n")
        other.stdin.flush()
        run(tmp_path, 1)
        assert other.wait() == 0


def test_two_programs_of_one_process_are_two_runs(tmp_path, impatient):
    saver = run(tmp_path, 1)
    text = rf"beside another step of this process \(.*, pid {os.getpid()}\); give each run a folder"
    with pytest.raises(CheckpointError, match=text):
        run(tmp_path, 2)
    del saver
    run(tmp_path, 2)


def test_a_run_holds_each_folder_that_it_saves_to(tmp_path, impatient):
    """Users keep the last checkpoints in one folder and the best in another."""
    saver = run(tmp_path / "last", 1)
    run(tmp_path / "best", 1, saver=saver)
    (tmp_path / "link").symlink_to("last")
    run(tmp_path / "link", 1, saver=saver)
    for folder in ("last", "best"):
        with pytest.raises(CheckpointError, match="by one run at a time"):
            run(tmp_path / folder, 2)


# -- what `keep` leaves


def steps_of(folder):
    return [each.step for each in af.checkpoint.list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep_every": 3}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep": 1}, [7]),
        ({"keep": 2, "keep_every": 3}, [3, 6, 7]),
        ({"keep": 1, "keep_every": 4}, [4, 7]),
    ],
)
def test_the_newest_stay(tmp_path, options, left):
    run(tmp_path, 1, 2, 3, 4, 5, 6, 7, **options)
    assert steps_of(tmp_path) == left
    assert names(tmp_path) == [".lock", *(f"step_{step:08d}" for step in left)]
    loads(tmp_path, 7)


def save_scored(folder, scores, **options):
    state, step = make()
    for number, score in enumerate(scores, start=1):
        af.save(step, replace(state, step=number), folder, score=score, **options)
    af.load(step, state, folder)  # waits for the last one


@pytest.mark.parametrize(
    ("scores", "options", "left"),
    [
        ([3, 1, 2, 0], {"keep": 1, "keep_best": 1}, [1, 4]),
        ([3, 1, 2, 0], {"keep": 1, "keep_best": 2}, [1, 3, 4]),
        ([0, 1, 2, 3], {"keep": 1, "keep_best": 2}, [3, 4]),
        ([1, 1, 1, 0], {"keep": 1, "keep_best": 1}, [3, 4]),
        ([math.nan, 0.5, None, math.nan], {"keep": 1, "keep_best": 2}, [2, 4]),
        ([-math.inf, None, math.inf, 1], {"keep": 1, "keep_best": 1}, [3, 4]),
        ([9, 1, 2, 0], {"keep": 1, "keep_best": 0}, [4]),
        ([9, 1, 2, 0, 0], {"keep": 2, "keep_best": 1, "keep_every": 3}, [1, 3, 4, 5]),
    ],
)
def test_the_best_stay_beside_the_newest(tmp_path, scores, options, left):
    save_scored(tmp_path, scores, wait=options["keep"] == 2, **options)
    found = {each.step: each.score for each in af.checkpoint.list_checkpoints(tmp_path)}
    assert list(found) == left
    expected = {number: scores[number - 1] for number in left}
    assert repr(found) == repr({n: None if s is None else float(s) for n, s in expected.items()})


# -- what stands beside


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_written_beside_is_there_with_the_checkpoint(tmp_path, wait):
    def run_ranks(state):
        state, step = make(state=state, recipe=af.wrap_ddp())

        def beside(path):
            assert not (tmp_path / "step_00000000").exists()
            (path / "adapter").mkdir()
            (path / "adapter" / f"of_rank_{state.rank}").write_text("weights")

        path = af.save(step, state, tmp_path, beside=beside, wait=wait)
        af.load(step, state, tmp_path)  # waits for it
        return [each.name for each in (path / "adapter").iterdir()]

    assert simulate(run_ranks, world_size=2) == [["of_rank_0"]] * 2
    assert not af.checkpoint.list_checkpoints(tmp_path)[0].damage


def test_an_error_beside_is_raised_on_all_ranks_and_leaves_nothing(tmp_path):
    def run_ranks(state):
        state, step = make(state=state, recipe=af.wrap_ddp())

        def beside(path):
            (path / "half").touch()
            raise OSError("no adapters")

        with pytest.raises(OSError if state.is_main else PeerError, match="no adapters"):
            af.save(step, state, tmp_path, beside=beside)
        return af.reduce_sum(1, state)

    assert simulate(run_ranks, world_size=2) == [2, 2]
    assert names(tmp_path) == [".lock"]


def test_a_file_beside_of_a_name_of_the_checkpoint_is_an_error(tmp_path):
    saver = make()
    with pytest.raises(CheckpointError, match="File exists"):
        run(tmp_path, 0, saver=saver, beside=lambda path: (path / "common.pt").touch())
    assert names(tmp_path) == [".lock"]


def test_damaged_ones_are_left_alone_and_not_counted(tmp_path):
    saver = run(tmp_path, 1, 2, 3, 4)
    for step, damage in {2: "one byte short", 4: "gone"}.items():
        DAMAGES[damage](tmp_path / f"step_{step:08d}" / "common.pt")
    run(tmp_path, 5, keep=2, saver=saver)
    assert steps_of(tmp_path) == [2, 3, 4, 5]
    assert af.latest(tmp_path) == tmp_path / "step_00000005"


def backdate(folder, *steps):
    """Give each of these checkpoints an earlier time than the one before it."""
    for number, step in enumerate(steps):
        os.utime(folder / f"step_{step:08d}" / "manifest.json", (1e9 - number, 1e9 - number))


@pytest.mark.parametrize("resumes", [False, True])
def test_the_highest_steps_of_a_run_stay_whatever_the_times_of_files(tmp_path, resumes):
    """A clock was set back, or the folder was copied without times."""
    saver = run(tmp_path, 1, 2, 3)
    backdate(tmp_path, 1, 2, 3)
    if resumes:
        del saver
        state, step = make(7)
        saver = af.load(step, state, tmp_path), step
    run(tmp_path, 4, keep=3, saver=saver)
    assert steps_of(tmp_path) == [2, 3, 4]


def test_what_a_run_left_when_it_went_back_goes_first(tmp_path):
    run(tmp_path, 1, 2, 8, 9)
    state, step = make(7)
    saver = af.load(step, state, tmp_path, at=2), step
    for number, left in ((3, [1, 2, 3]), (4, [2, 3, 4])):
        run(tmp_path, number, keep=3, saver=saver)
        assert steps_of(tmp_path) == left


class InTheWay(Extra):
    """Makes a file at the name that the running save will need."""

    def state_dict(self):
        self.value.touch()
        return {}


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (lambda folder: Extra(object), "bad"),
        (lambda folder: InTheWay(folder / ".new_step_00000004/manifest.json"), "File exists"),
        (lambda folder: InTheWay(folder / "step_00000004"), "Not a directory"),
    ],
    ids=["before any file", "at the manifest", "at the name"],
)
def test_a_save_that_fails_removes_nothing(tmp_path, extra, text):
    """The failure comes just before the new checkpoint gets its name."""
    saver = run(tmp_path, 1, 2, 3)
    with pytest.raises((ValueError, CheckpointError), match=text):
        run(tmp_path, 4, keep=1, saver=saver, extras={"bad": extra(tmp_path)})
    assert [each.step for each in af.checkpoint.list_checkpoints(tmp_path) if not each.damage] == [
        1,
        2,
        3,
    ]


def test_what_is_not_ours_is_not_touched(tmp_path):
    others = ["notes.txt", "step_7", "step_0000000001", "best", ".hidden"]
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    run(tmp_path, 1, 2, 3, keep=1)
    assert names(tmp_path) == sorted([".lock", "step_00000003", *others])
    assert all((tmp_path / name / "file").read_text() == "mine" for name in others)


# -- the same step twice, and killed runs


@pytest.mark.parametrize("reader", [False, True], ids=["alone", "beside a reader"])
def test_the_same_step_again_replaces_it(tmp_path, monkeypatch, reader):
    """A reader may rename the old checkpoint back between the two renames."""
    state, step = run(tmp_path, 2, extras={"extra": Extra("first")})
    rename, seen = Path.rename, []

    def and_read(path, target):
        rename(path, target)
        if Path(target).name.startswith(".old_") and not seen:
            seen.extend(steps_of(tmp_path))

    if reader:
        monkeypatch.setattr(Path, "rename", and_read)
    af.save(step, state, tmp_path, extras={"extra": Extra("second")})
    af.load(*reversed(make(7)), tmp_path, extras={"extra": (extra := Extra(""))})
    assert extra.value == "second"
    assert names(tmp_path) == [".lock", "step_00000002"]
    assert seen == ([2] if reader else [])


def killed_between_renames(tmp_path):
    """Return the folder of a run that was killed between setting a checkpoint aside and naming the
    new one."""
    run(tmp_path, 1, 2)
    (tmp_path / "step_00000002").rename(tmp_path / ".old_step_00000002")
    shutil.copytree(tmp_path / "step_00000001", tmp_path / ".new_step_00000002")


@pytest.mark.parametrize("at", ["latest", 2])
def test_what_was_aside_at_a_kill_is_found(tmp_path, at):
    killed_between_renames(tmp_path)
    assert af.load(*reversed(make(7)), tmp_path, at=at).step == 2
    loads(tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]


@pytest.mark.parametrize("step", [2, 3])
def test_the_next_save_repairs_what_a_kill_has_left(tmp_path, step):
    killed_between_renames(tmp_path)
    run(tmp_path, step)
    assert names(tmp_path) == [".lock", "step_00000001"] + [
        f"step_{each:08d}" for each in sorted({2, step})
    ]
    loads(tmp_path, step)


@pytest.mark.parametrize(
    "name", [".old_step_00000002", ".new_step_00000003", ".new_removed_step_00000003"]
)
def test_what_was_half_written_removed_or_replaced_at_a_kill_is_none(tmp_path, name):
    run(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    loads(tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]
    run(tmp_path, 4)
    assert names(tmp_path) == [".lock", *(f"step_{each:08d}" for each in (1, 2, 4))]
    loads(tmp_path, 4)


def test_a_checkpoint_that_goes_while_it_is_listed_is_not_listed(tmp_path, monkeypatch):
    run(tmp_path, 1, 2)
    look = Path.iterdir

    def and_remove(folder):
        found = [*look(folder)]
        shutil.rmtree(tmp_path / "step_00000002", ignore_errors=True)
        return iter(found)

    monkeypatch.setattr(Path, "iterdir", and_remove)
    assert steps_of(tmp_path) == [1]
    assert af.latest(tmp_path) == tmp_path / "step_00000001"


_DYING = """
    import os, shutil, signal, sys
    from itertools import count
    from pathlib import Path
    import accel_fn as af
    from tests.checkpoint.test_checkpoint_files import run

    def live_or_die():
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(function):
        def call(*arguments, **options):
            live_or_die()
            return function(*arguments, **options)
        return call

    def save(folder):
        shutil.copytree(first, folder)
        for name in ("fsync", "mkdir", "rename", "rmdir", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        sys.addaudithook(lambda event, arguments: live_or_die() if event == "open" else None)
        state, step = run(folder, {step}, saver=saver, keep=2, wait={wait})
        af.load(step, state, folder)  # waits for it

    first = Path({folder!r}) / "first"
    saver = run(first, 1, 2, 3)
    for number in count():
        left = number
        pid = os.fork()
        if pid == 0:
            save(Path({folder!r}) / str(number))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        say(code)
        if code == 0:
            break
"""


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "in the background"])
@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.slow
def test_a_kill_at_any_call_leaves_all_that_was_whole(tmp_path, step, wait):
    """The save is of a step that exists already, or of a new one."""
    output = launch(_DYING.format(folder=str(tmp_path), step=step, wait=wait), num_processes=1)
    codes = [int(line) for line in output.splitlines()]
    *killed, last = codes
    assert (set(killed), last) == ({-signal.SIGKILL}, 0)
    assert len(killed) > 15
    for number, code in enumerate(codes):
        folder = tmp_path / str(number)
        found = af.checkpoint.list_checkpoints(folder)
        assert not any(each.damage for each in found)
        newest = found[-1].step
        assert newest in ({step} if code == 0 else {3, step})
        loads(folder, newest)
        run(folder, 5)
        assert all(name.startswith(("step_", ".lock")) for name in names(folder))
