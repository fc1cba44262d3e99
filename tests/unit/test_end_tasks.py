"""Tasks end even when they drop a cancellation."""

import asyncio

from headway.lifecycle import end_tasks


async def test_a_task_that_drops_its_first_cancellation_still_ends():
    dropped = asyncio.Event()

    async def stubborn():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            dropped.set()
        await asyncio.sleep(3600)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert dropped.is_set() and task.cancelled()


async def test_who_is_cancelled_while_ending_others_leaves_none_behind():
    dropped, release = asyncio.Event(), asyncio.Event()

    async def stubborn():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            dropped.set()
        await release.wait()  # ended by a later cancellation, or by our leave

    task = asyncio.create_task(stubborn())
    ending = asyncio.create_task(end_tasks([task]))
    await dropped.wait()
    ending.cancel()
    await asyncio.wait([ending])
    assert ending.cancelled() and task.cancelled()
