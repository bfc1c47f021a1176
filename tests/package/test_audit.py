"""The session audit: known vulnerabilities, and what is printed where no data can be had."""

import pytest

from tests.tools import audit

LOCK = """# made
click==8.1 \\
    --hash=sha256:ab
rich==15.0 ; python_version < '3.12' \\
    --hash=sha256:cd
"""


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text(LOCK)
    return path


def answer(monkeypatch, **answers):
    monkeypatch.setattr(audit, "ask", lambda _lock, service: answers.get(service, []))


def test_a_vulnerable_release_is_named_with_its_repair(lock, monkeypatch, capsys):
    known = {"id": "CVE-1", "fix_versions": ["8.2"]}
    click = {"name": "click", "version": "8.1", "vulns": [known]}
    answer(monkeypatch, pypi=[click, {"name": "rich", "version": "15.0", "vulns": []}])
    assert audit.audit(lock) == 1
    assert capsys.readouterr().out.splitlines() == [
        "click 8.1: CVE-1, fixed in 8.2",
        "some.txt: 2 of 2 releases are known to pypi",
    ]


def test_a_mirror_that_knows_no_release_is_not_taken_for_a_clean_result(lock, monkeypatch, capsys):
    answer(monkeypatch, pypi=[{"name": "click", "skip_reason": "not found on PyPI"}])
    assert audit.audit(lock) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "some.txt: no data on vulnerabilities could be had; these releases are pinned:"
    )
    assert lines[1:] == ["click 8.1", "rich 15.0"]


def test_osv_is_asked_where_pypi_has_no_answer(lock, monkeypatch, capsys):
    answer(monkeypatch, osv=[{"name": "click", "version": "8.1", "vulns": []}])
    assert audit.audit(lock) == 0
    assert capsys.readouterr().out == "some.txt: 1 of 1 releases are known to osv\n"
