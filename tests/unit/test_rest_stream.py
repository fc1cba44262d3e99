"""The reader of a job's stream is as patient as it says."""

import pytest

from headway import rest
from headway.errors import Unavailable
from headway.rest import StreamReader


def test_patience_is_counted_from_the_first_break_and_starts_anew_with_a_line(monkeypatch):
    now = 0.0
    monkeypatch.setattr(rest.time, "monotonic", lambda: now)
    reader = StreamReader("j", "", patience_s=30.0)
    [update] = reader.updates(["event: event", "id: 7", 'data: {"a": 1}', ""])
    assert update.row == {"a": 1}
    now = 100.0  # the caller was busy with the update
    reader.broken("http://h", ConnectionError("reset"))
    now = 129.0
    reader.broken("http://h", ConnectionError("reset"))
    assert list(reader.updates([": still here"])) == []
    now = 200.0
    reader.broken("http://h", ConnectionError("reset"))
    now = 231.0
    with pytest.raises(Unavailable):
        reader.broken("http://h", ConnectionError("reset"))
