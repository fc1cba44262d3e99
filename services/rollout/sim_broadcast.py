"""The sim engine with a real seat in the weight group: what the learner sends arrives here.

Nothing is made of the tensors; they are received, hashed and compared with the manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from headway.errors import EpochBroken, HeadwayError
from headway.messages import EpochInvite, InstallReport, WeightManifest
from headway.weights.group import WeightGroup
from headway.weights.manifest import check_digests
from headway.weights.transfer import Staging
from services.rollout.sim_content import SimSettings
from services.rollout.sim_engine import SimEngine


class BroadcastSimEngine(SimEngine):
    """Keeps the Engine protocol over real process groups. Needs torch, and no model."""

    transport: Literal["broadcast", "none"] = "broadcast"
    backends: tuple[str, ...] = ("gloo",)

    def __init__(self, settings: SimSettings) -> None:
        super().__init__(settings)
        self._group: WeightGroup | None = None
        self._staging = Staging()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weights")

    async def join(self, invite: EpochInvite) -> None:
        """Takes a seat; leaves any older one first."""
        await self.leave()
        loop = asyncio.get_running_loop()
        self._group = await loop.run_in_executor(self._pool, WeightGroup.join, invite)

    async def install(self, manifest: WeightManifest, timeout_s: float) -> InstallReport:
        """Receives and verifies a version while sampling goes on, then sets it."""
        group = self._group
        try:
            if group is None:
                raise EpochBroken("this node has no seat in a weight group; invite it again")
            await self._take_in(manifest, lambda s: s.receive(group, manifest, "cpu"))
        except HeadwayError:
            self._stand_still()
            raise
        return await super().install(manifest, timeout_s)

    async def install_snapshot(
        self, manifest: WeightManifest, path: Path, timeout_s: float
    ) -> InstallReport:
        """Reads and verifies a version while sampling goes on, then sets it."""
        await self._take_in(manifest, lambda s: s.read(path, manifest))
        return await super().install(manifest, timeout_s)

    async def leave(self) -> None:
        """Hangs up; safe to repeat."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    async def close(self) -> None:
        """Ends the engine and its thread."""
        await super().close()
        await self.leave()
        self._pool.shutdown(wait=False)

    async def _take_in(self, manifest: WeightManifest, fill: Callable[[Staging], None]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, fill, self._staging)
        check_digests(manifest, self._staging.digests, "what arrived")
