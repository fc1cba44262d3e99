"""Following a job: how long the coordinator may be away before the command gives up."""

import time
from types import SimpleNamespace

import httpx
import pytest

from headway import follow as module
from headway.client import HeadwayClient
from headway.errors import Unavailable
from headway.follow import Deaf, PlainView, follow
from headway.jobs import JobRecord, record_to_dict

SPEC = {"trainer": {"total_training_steps": 3}, "rollout": {"min_nodes": 1, "max_nodes": None}}
AWAY = "away"


class Clock:
    """Seconds that pass only where somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    stand_in = SimpleNamespace(
        monotonic=clock.monotonic,
        sleep=clock.sleep,
        strftime=time.strftime,
        localtime=time.localtime,
    )
    monkeypatch.setattr(module, "time", stand_in)
    return clock


def client_of(states):
    """A client whose coordinator answers one state a look; the last for ever."""
    left = list(states)

    def answer(request):
        if request.url.path != "/v1/jobs/j":
            return httpx.Response(200, json={"rows": [], "next_after": ""})
        state = left.pop(0) if len(left) > 1 else left[0]
        if state == AWAY:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, json=record_to_dict(JobRecord("j", SPEC, "d", 1.0, 1.0, state)))

    return HeadwayClient("http://127.0.0.1:8700", transport=httpx.MockTransport(answer))


def test_a_coordinator_that_stays_away_is_given_up_after_half_a_minute(clock):
    with client_of(["running", AWAY]) as client, pytest.raises(Unavailable):
        follow(client, "j", Deaf(PlainView(3)), lambda: 0)
    assert 30.0 < clock.now - 1000.0 < 32.0


def test_absences_are_not_added_up(clock):
    states = ["running", *[AWAY] * 50, "running", *[AWAY] * 50, "succeeded"]
    with client_of(states) as client:
        assert follow(client, "j", Deaf(PlainView(3)), lambda: 0).state == "succeeded"
    assert clock.now - 1000.0 > 50.0


def test_a_command_that_was_stopped_itself_does_not_count_that_time(clock):
    looks = []

    def tick():
        looks.append(clock.now)
        if len(looks) == 2:
            clock.now += 600.0  # as under SIGSTOP; the first call afterwards fails

    with client_of(["running", AWAY, "succeeded"]) as client:
        assert follow(client, "j", Deaf(PlainView(3)), lambda: 0, tick).state == "succeeded"
    assert len(looks) == 3
