"""The table of model families in docs/models.md is the one that the code, the published files and the tests give."""

from tests.docs.model_table import BEGIN, END, PAGE, table


def test_the_page_has_the_table_of_the_code():
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0] == table(), "run python -m tests.docs.model_table"
