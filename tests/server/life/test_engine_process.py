"""What is asked of an engine in a process of its own, and what its process may do to the server's."""

from __future__ import annotations

from pathlib import Path

import pytest

ASKER = str(Path(__file__).with_name("stub_asker.py"))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("leave_and_ask", "[True, 256] False"),
        ("ask_what_is_walked", "True False"),
        (
            "ask_oddly",
            "['UserError', 'UserError', 'AttributeError', 'LookupError', 'LookupError', 256] False",
        ),
    ],
)
def test_questions(start, what, said):
    process = start(ASKER, what)
    assert process.exit_code() == 0
    assert process.said == [f"{said}\n"]
