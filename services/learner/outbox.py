"""Weight versions on their way out: staged after a step, sent beside the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from torch import Tensor

from headway.patience import patiently
from services.learner.collective import IDLE_EVERY_S
from services.learner.parts import Parts
from services.learner.waits import WaitWatch

_ADMIT_EVERY_S = 0.5  # how often joiners are looked for
_LOOK_EVERY_S = 0.1  # for the first nodes


class Outbox:
    """One version at a time: `stage`, then `begin` when the next step is under way or waits.

    Sending to many nodes is many calls; begun at once they would stand between two steps.
    """

    def __init__(self, parts: Parts, waits: WaitWatch) -> None:
        self._p = parts
        self._waits = waits
        self._unsent: int | None = None  # a version that a validation keeps from being sent
        self._staged: tuple[int, Mapping[str, Tensor]] | None = None
        self.sending: asyncio.Task[None] | None = None  # the last that was begun
        self.seconds = 0.0  # that the last one took

    async def stage(self, version: int) -> None:
        """Copies the weights, unless a validation keeps an older version the newest.

        A version that is to be validated itself waits for the validation before it.
        """
        validation = self._p.validation
        if validation is not None:
            if validation.is_due(version):
                await self.validated(version)
                await validation.begin(version)
            elif validation.under_way:
                self._unsent = version
                return
        self._unsent = None
        await self._stage(version)

    async def send_what_waited(self) -> None:
        """Sends the newest weights once a validation is over that kept them back."""
        validation = self._p.validation
        if self._unsent is not None and validation is not None and not validation.under_way:
            version, self._unsent = self._unsent, None
            await self._stage(version)
            self.begin()

    async def validated(self, step: int, older_than: int | None = None) -> None:
        """Returns when no version, or none older than one, is being validated."""
        validation = self._p.validation
        if validation is None or not validation.under_way:
            return
        if older_than is not None and validation.version >= older_than:
            return
        with self._waits.on("validation", step):
            while not await validation.over(IDLE_EVERY_S):
                await self._p.crew.idle()

    async def _stage(self, version: int) -> None:
        """The version before must be through."""
        spec = self._p.spec
        if version >= spec.trainer.total_training_steps and not spec.validates(version):
            return  # nothing will be sampled by the last version
        if self.sending is None:
            with self._waits.on("nodes", version):
                await self._wait_for_members()
        else:
            with self._waits.on("publish", version - 1):
                await self.sending
            self._p.publisher.retire()  # one version's memory serves all
        self._staged = version, await self._p.crew.weights(version)

    def begin(self) -> None:
        """Starts to send what is staged, if anything is."""
        if self._staged is not None:
            version, tensors = self._staged
            self._staged = None
            self.sending = asyncio.create_task(self._send(version, tensors), name="publish")

    async def sent(self) -> None:
        """Returns when all is sent; raises what that failed with."""
        self.begin()
        if self.sending is not None:
            await self.sending

    def check(self) -> None:
        """Raises what a publish failed with."""
        if self.sending is not None and self.sending.done():
            self.sending.result()

    async def admit(self) -> None:
        """Lets joiners in, for ever, once there is a version to give them."""
        while True:
            await asyncio.sleep(_ADMIT_EVERY_S)
            if self.sending is not None:
                await self._p.publisher.admit()

    async def _send(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        began = time.monotonic()
        await self._p.publisher.publish(version, tensors)
        self.seconds = time.monotonic() - began

    async def _wait_for_members(self) -> None:
        wanted = self._p.spec.rollout.min_nodes
        while len(await patiently(self._p.ledger.members)) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY_S)
