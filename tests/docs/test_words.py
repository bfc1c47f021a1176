"""The count of words counts what a user reads."""

from tests.tools.words import num_words, user_pages

TEXT = """# A title

Three words here, and a [link](to/a-page.md#place).

```python
code = "is not counted"
```

- an item:

  ```text
  nor is this
  ```

| a | row |
|---|---|
"""


def test_blocks_of_code_and_targets_of_links_are_no_words() -> None:
    assert num_words(TEXT) == 2 + 6 + 2 + 2


def test_pages_for_contributors_are_not_counted() -> None:
    names = {page.name for page in user_pages()}
    assert {"README.md", "data.md", "cheat-sheet.md"} <= names
    assert not names & {"architecture.md", "mutants.md", "benchmarks.md", "contributing.md"}
