"""An OpenAI-compatible door over the sim engine, with OpenAI's own client at it."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import openai

from headway.access.process import Access
from headway.messages import WeightManifest
from headway.web import make_app, serve_http
from services.rollout.door.routes import router
from services.rollout.sim_engine import Lengths, SimEngine, SimSettings
from services.rollout.visits import Policy, Visits

ASKED = [{"role": "user", "content": "What is 1 + 2?"}]
HELD = 1e-6  # tokens a second: nothing ends until the test says so


class Door:
    """A served door, its engine and a client."""

    def __init__(self, engine, visits, url):
        self.engine, self.visits, self.url = engine, visits, url
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def chat(self, **fields):
        fields = {"model": "job-a", "messages": ASKED, "max_tokens": 12, **fields}
        return await self.client.chat.completions.create(**fields)

    async def text(self, **fields):
        fields = {"model": "job-a", "prompt": "1 + 2 =", "max_tokens": 12, **fields}
        return await self.client.completions.create(**fields)

    async def install(self, version):
        await self.engine.install(WeightManifest(version, (), 1), 5.0)

    def sample_on(self, tokens=0.0, rate=20_000.0):
        """A held engine has sampled so many tokens more, and goes on at this rate."""
        self.engine._advance()
        self.engine._progress += tokens
        self.engine._settings = replace(self.engine._settings, tokens_per_s=rate)
        self.engine._arm()

    async def sampling(self, count):
        async with asyncio.timeout(20):
            while self.engine.num_completions_in_flight != count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def door(rate=20_000.0, length=400, max_visits=8, at_once=4, access=None, version=3):
    """Serves a door over a sim engine that has this version, until the test is over."""
    engine = SimEngine(SimSettings(tokens_per_s=rate, lengths=Lengths("constant", length)))
    await engine.start()
    visits = Visits(max_visits, at_once)
    app = make_app("door", lambda: True, max_body_bytes=1 << 20, access=access or Access())
    app.include_router(router(visits))
    async with serve_http(app, "127.0.0.1", 0) as port:
        made = Door(engine, visits, f"http://127.0.0.1:{port}")
        if version is not None:
            await made.install(version)
            visits.open(Policy("job-a", "/models/a", engine, lambda: engine.version))
        try:
            yield made
        finally:
            await visits.close("the test is over")
            await made.client.close()
            await engine.close()
