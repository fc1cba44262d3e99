"""An engine that imitates sampling: set speed, length distribution and version spans.

For tests and benchmarks of the framework; no model and no torch. What it makes is
a function of (settings.seed, request seed, completion index) alone, so a retried
ticket gets the same tokens. Time is the event loop's clock.

Sampling is a fluid: every active completion is `progress` tokens on, where
`progress` grows by the speed of one completion. A completion admitted at progress p
with l tokens ends at progress p + l, so one timer serves any number of completions.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import xxhash

from headway.errors import EpochBroken, Unavailable
from headway.messages import (
    Completion,
    EpochInvite,
    InstallReport,
    WeightManifest,
)
from services.rollout.engine import Look, Piece, Sampling
from services.rollout.sim_content import EOS_ID, Lengths, SimSettings, compose, plan
from services.rollout.sim_sample import ROUNDING, Sample
from services.rollout.sim_visits import SimWords, part, seen_prompt

__all__ = ["EOS_ID", "Lengths", "SimEngine", "SimSettings"]
_PIECE_S = 0.02  # a visitor's completion is looked at so often


class SimEngine:
    """Keeps the Engine protocol without a model. Sampling starts with the first install."""

    transport: Literal["broadcast", "none"] = "none"
    backends: tuple[str, ...] = ()

    def __init__(self, settings: SimSettings | None = None) -> None:
        self._settings = settings or SimSettings()
        self._version: int | None = None
        self._standing = True  # nothing is sampled: before the first install, in a pause
        self._started = False
        self._progress = 0.0  # tokens
        self._at = 0.0  # loop time of the progress, seconds
        self._active: set[Sample] = set()
        self._ends: list[tuple[float, int, Sample]] = []  # heap by end; may hold cancelled ones
        self._order = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended_tokens = 0
        self._busy_s = 0.0

    async def start(self) -> None:
        """Takes `start_s`."""
        await asyncio.sleep(self._settings.start_s)
        self._at = asyncio.get_running_loop().time()
        self._started = True

    async def generate(
        self, request_id: str, prompt_ids: tuple[int, ...], n: int, sampling: Sampling, seed: int
    ) -> tuple[Completion, ...]:
        """n completions, in order. Temperature and truncation change nothing here, but for 0."""
        samples = [self._begin(request_id, prompt_ids, sampling, seed, index) for index in range(n)]
        try:
            return tuple([await sample.done for sample in samples])
        finally:
            self._abort(samples)

    async def visit(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        look: Look,
    ) -> AsyncGenerator[Piece]:
        """As `generate` with n 1. There is room for everyone here."""
        sample = self._begin(request_id, prompt_ids, sampling, seed)
        prompt, sent = seen_prompt(self._settings, prompt_ids, look), 0
        try:
            while look.in_pieces and sent < sample.length - 1:  # a token a piece
                if not sample.done.done():
                    await asyncio.wait({sample.done}, timeout=_PIECE_S)
                    self._advance()
                for _ in range(min(sample.sampled(self._progress), sample.length - 1) - sent):
                    yield replace(part(sample.compose(), sent, sent + 1, look), prompt=prompt)
                    prompt, sent = (), sent + 1
                if sample.done.done():
                    await sample.done  # it may have failed
            spans = (await sample.done).spans
            yield replace(part(sample.compose(), sent, sample.length, look, spans), prompt=prompt)
        finally:
            self._abort([sample])

    async def words(self) -> SimWords:
        """Bytes."""
        return SimWords(self._settings.vocab_size)

    @property
    def context_tokens(self) -> int | None:
        """No limit."""
        return None

    async def adopt(self, version: int) -> None:
        """Samples from now on."""
        self._install(version)

    async def join(self, invite: EpochInvite) -> None:
        """Nothing to join: no tensors travel to this engine."""

    async def install(self, manifest: WeightManifest, timeout_s: float) -> InstallReport:
        """Sets the version after the pause. EpochBroken when the pause outlasts `timeout_s`."""
        loop = asyncio.get_running_loop()
        self._stand_still()
        stood_since = loop.time()
        await asyncio.sleep(min(self._settings.install_pause_s, timeout_s))
        if self._settings.install_pause_s > timeout_s:
            raise EpochBroken(
                f"version {manifest.version} did not arrive within {timeout_s:g} s; publish again"
            )
        self._install(manifest.version)
        digests = "".join(tensor.digest for tensor in manifest.tensors)
        return InstallReport(
            version=manifest.version,
            digest=xxhash.xxh3_128_hexdigest(digests.encode()),
            pause_s=loop.time() - stood_since,
        )

    async def install_snapshot(
        self, manifest: WeightManifest, path: Path, timeout_s: float
    ) -> InstallReport:
        """As `install`: there is nothing to read."""
        return await self.install(manifest, timeout_s)

    async def leave(self) -> None:
        """Nothing to leave."""

    @property
    def version(self) -> int | None:
        """The installed version; None until the first install, in one, and after a failed one."""
        return self._version

    @property
    def num_completions_in_flight(self) -> int:
        """Completions being sampled now."""
        return len(self._active)

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens sampled since the start."""
        if self._started:
            self._advance()
        return self._ended_tokens + sum(s.sampled(self._progress) for s in self._active)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one completion was being sampled."""
        if self._started:
            self._advance()
        return self._busy_s

    async def close(self) -> None:
        """Ends the engine; open requests fail as unavailable."""
        if self._started:
            self._advance()
        self._started = False
        if self._timer is not None:
            self._timer.cancel()
        for sample in self._active:
            if not sample.done.done():
                sample.done.set_exception(Unavailable("the sim engine was closed"))

    def _stand_still(self) -> None:
        """Nothing is sampled until a version is installed."""
        self._advance()
        self._standing = True
        self._version = None
        self._arm()

    def _install(self, version: int) -> None:
        """What is being sampled goes on under this version."""
        self._advance()
        for sample in self._active:
            sample.cuts.append((sample.sampled(self._progress), version))
        self._version = version
        self._standing = False
        self._arm()

    def _begin(
        self,
        request_id: str,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        seed: int,
        index: int = 0,
    ) -> Sample:
        if not self._started:
            raise Unavailable(f"the sim engine is not running; request {request_id} is refused")
        self._advance()
        if sampling.temperature == 0:  # greedy: the prompt decides, not the seed
            seed = xxhash.xxh3_64_intdigest(repr(prompt_ids).encode())
        sample = self._admit(sampling, seed, index)
        self._arm()
        return sample

    def _admit(self, sampling: Sampling, seed: int, index: int) -> Sample:
        draw = partial(compose, self._settings, sampling, seed, index)
        _, length, _ = plan(self._settings, sampling, seed, index)
        if sampling.stop:
            length = len(draw()[0])
        sample = Sample(
            length=length,
            compose=draw,
            start=self._progress,
            done=asyncio.get_running_loop().create_future(),
            cuts=[] if self._version is None else [(0, self._version)],
        )
        self._active.add(sample)
        self._order += 1
        heapq.heappush(self._ends, (sample.end, self._order, sample))
        return sample

    def _abort(self, samples: list[Sample]) -> None:
        """Takes what has not ended out of the engine."""
        left = [sample for sample in samples if sample in self._active]
        if not left:
            return
        if self._started:
            self._advance()
        for sample in left:
            self._ended_tokens += sample.sampled(self._progress)
            self._active.discard(sample)
            sample.done.cancel()
        self._arm()

    @property
    def _speed(self) -> float:
        """Tokens a second of one completion."""
        rate = self._settings.tokens_per_s
        return rate / len(self._active) if self._settings.shared else rate

    def _advance(self) -> None:
        """Brings the progress up to now, ending each completion at its own moment."""
        now = asyncio.get_running_loop().time()
        left_s, self._at = now - self._at, now
        if self._standing:
            return
        while self._active:  # those that end at one moment all end in it
            end, _, sample = self._ends[0]
            if sample not in self._active:
                heapq.heappop(self._ends)
                continue
            need_s = max(0.0, (end - self._progress) / self._speed)
            if need_s > left_s + ROUNDING / self._speed:
                self._progress += left_s * self._speed
                self._busy_s += left_s
                return
            heapq.heappop(self._ends)
            self._progress = end
            self._busy_s += min(need_s, left_s)
            left_s -= need_s
            self._end(sample)

    def _end(self, sample: Sample) -> None:
        self._active.discard(sample)
        self._ended_tokens += sample.length
        if not sample.done.done():
            ids, logprobs, reason, text = sample.compose()
            sample.done.set_result(Completion(ids, logprobs, reason, sample.spans(), text))

    def _arm(self) -> None:
        """Sets the one timer to the next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and self._ends[0][2] not in self._active:
            heapq.heappop(self._ends)
        if self._standing or not self._ends or not self._started:
            return
        wait_s = max(0.0, (self._ends[0][0] - self._progress) / self._speed)
        self._timer = asyncio.get_running_loop().call_at(self._at + wait_s, self._on_timer)

    def _on_timer(self) -> None:
        self._advance()
        self._arm()
