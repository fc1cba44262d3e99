"""The feeder: which tickets it issues, and that a restart changes nothing."""

import asyncio

import pytest

from headway.data import Cursor, PromptStream, Row
from headway.jobspec import parse_job
from headway.ledger.api import LedgerConfig
from headway.ledger.memory import MemoryLedger
from headway.lifecycle import end_tasks
from services.learner.feeder import Feeder


class Characters:
    """A tokenizer of one token a character, without specials or template."""

    chat_template = None
    added_tokens_decoder: dict = {}  # noqa: RUF012
    all_special_tokens: list = []  # noqa: RUF012

    def encode(self, text, add_special_tokens=True):
        return [ord(c) for c in text]


class Letters:
    def __init__(self, texts):
        self._texts = texts

    def __len__(self):
        return len(self._texts)

    def row(self, index):
        return Row(self._texts[index], {"index": index})

    def describe(self):
        return {}


def stream(texts=("a", "b", "too long", "c"), shuffle=False):
    spec = parse_job(
        {
            "model": {"path": "tiny"},
            "data": {
                "source": "jsonl",
                "name": "x",
                "shuffle": shuffle,
                "train_batch_size": 2,
                "max_prompt_length": 4,
            },
            "reward": {"grader": {}},
            "rollout": {"n": 2, "max_tokens": 8},
            "trainer": {"total_training_steps": 1},
        }
    )
    return PromptStream(Letters(texts), spec, Characters())


@pytest.fixture
async def ledger():
    opened = MemoryLedger()
    await opened.open(LedgerConfig(batch_groups=2, max_policy_lag=1))  # holds 2 * (1 + 2) groups
    return opened


async def claim_all(ledger):
    return (await ledger.claim("n", 0, limit=100)).leases


async def filtered(ledger, leases):
    for lease in leases:
        await ledger.deliver(lease, b"", "zero_variance")


async def test_tickets_come_in_stream_order_and_only_as_many_as_the_ledger_holds(ledger):
    feeder = Feeder(ledger, stream(), batch_groups=2)
    accepted = [await feeder.issue(0), await feeder.issue(2), await feeder.issue(4)]
    assert accepted == [2, 2, 2]
    assert await feeder.issue(6) == 0  # six outstanding groups are the bound
    # rows a b (too long) c, a b (too long) c: ticket 2 is c, ticket 3 is a again
    assert feeder.cursor == Cursor(6, 8)
    leases = await claim_all(ledger)
    assert [(x.ticket.ticket_id, x.ticket.prompt) for x in leases] == [
        (0, "a"), (1, "b"), (2, "c"), (3, "a"),
    ]  # fmt: skip
    assert [x.ticket.data_epoch for x in leases] == [0, 0, 0, 1]
    assert [x.ticket.prompt_ids for x in leases] == [(97,), (98,), (99,), (97,)]


async def test_what_the_ledger_did_not_take_is_offered_again(ledger):
    feeder = Feeder(ledger, stream(), batch_groups=4)
    assert await feeder.issue(0) == 4
    assert await feeder.issue(4) == 2  # two of four
    assert feeder.cursor == Cursor(6, 8)  # only what was accepted counts
    await filtered(ledger, await claim_all(ledger))
    assert await feeder.issue(6) == 4
    assert (await ledger.counts()).issued_total == 10
    later = [lease.ticket.item["index"] for lease in await claim_all(ledger)]
    assert later == [1, 3, 0, 1]  # tickets 4 to 7: b c a b


async def test_a_restarted_feeder_goes_on_where_the_ledger_is(ledger):
    first = Feeder(ledger, stream(shuffle=True), batch_groups=2)
    await first.issue(0)
    checkpointed = first.cursor
    await first.issue(2)
    resumed = stream(shuffle=True)
    resumed.seek(checkpointed)
    second = Feeder(ledger, resumed, batch_groups=2)
    work = asyncio.create_task(second.run())
    while (await ledger.counts()).issued_total < 6:  # noqa: ASYNC110 - the ledger sets no event
        await asyncio.sleep(0)
    await end_tasks([work])
    undisturbed = stream(shuffle=True)
    expected = [undisturbed.ticket(k) for k in range(6)]
    got = [lease.ticket for lease in await claim_all(ledger)]
    assert got == expected[: len(got)] and len(got) == 4
    assert second.cursor.ticket_id == 6
