"""The learner's side of one weight group with one engine, without gRPC between them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headway.messages import EpochInvite, InstallReport, WeightManifest
from headway.weights.group import Rendezvous, WeightGroup
from headway.weights.manifest import build_manifest
from headway.weights.transfer import send


def load_tensors(folder: Path) -> dict[str, Any]:
    """A folder's tensors as its checkpoint names them."""
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


class DirectSender:
    """Rank 0 of an epoch whose only member is `engine`."""

    def __init__(self, engine: Any, timeout_s: float = 20.0) -> None:
        self.engine = engine
        self.timeout_s = timeout_s
        self.epoch = 0
        self._group: WeightGroup | None = None

    async def __aenter__(self) -> Self:
        await self.form()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        await self.engine.leave()

    async def form(self) -> None:
        """A new epoch with the engine."""
        self.close()
        self.epoch += 1
        meeting = Rendezvous("127.0.0.1", self.timeout_s)
        invites = [
            EpochInvite(
                "job", self.epoch, "127.0.0.1", meeting.port, rank, 2, "gloo", self.timeout_s
            )
            for rank in (0, 1)
        ]
        self._group, _ = await asyncio.gather(
            asyncio.to_thread(WeightGroup.join, invites[0], "cpu", meeting.store),
            self.engine.join(invites[1]),
        )

    async def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        bucket_bytes: int = 1 << 16,
        manifest: WeightManifest | None = None,
    ) -> InstallReport:
        """Broadcasts and installs one version; `manifest` replaces the true one."""
        assert self._group is not None
        manifest = manifest or build_manifest(version, tensors, bucket_bytes)
        _, report = await asyncio.gather(
            asyncio.to_thread(send, self._group, manifest, tensors, "cpu"),
            self.engine.install(manifest, self.timeout_s),
        )
        return report

    def close(self) -> None:
        """Hangs up."""
        if self._group is not None:
            self._group.close()
            self._group = None
