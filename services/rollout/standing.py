"""A model server without a fleet or a job: one engine with the weights of its folder, and the door.

What an outside harness samples a finished model from, through the same door as a policy in
training.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.lifecycle import Lifecycle
from headway.precision import DtypeOrAuto
from headway.settings import ServiceSettings
from headway.telemetry import get_logger
from headway.web import http_url, make_app, serve_http
from services.rollout.door.routes import router
from services.rollout.engines import EngineSettings, standing_engine
from services.rollout.serve import MAX_BODY_BYTES, measure_engine
from services.rollout.visits import Policy, Visits

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StandingModel:
    """What is served."""

    path: str  # folder, hub name or wheel
    name: str  # to its callers
    version: int = 0  # the weight version that answers name
    max_model_len: int | None = None  # None: the model's own
    dtype: DtypeOrAuto = "auto"
    kv_cache_gib: float = 1.0  # on CPUs


async def main(
    settings: ServiceSettings,
    engine_settings: EngineSettings,
    model: StandingModel,
    max_visits: int,
    drain_s: float,
    lifecycle: Lifecycle,
) -> None:
    """Serves until asked to stop. InvalidSpec or Unavailable: the model is not to be had."""
    visits = Visits(max_visits, engine_settings.num_visitors)
    ready = False
    app = make_app("Headway model server", lambda: ready, max_body_bytes=MAX_BODY_BYTES)
    app.include_router(router(visits))
    async with serve_http(app, settings.host, settings.http_port) as http_port:
        engine = await standing_engine(
            engine_settings, model.path, model.max_model_len, model.dtype, model.kv_cache_gib
        )
        measure_engine(lambda: engine)
        try:
            await engine.start()
            await engine.adopt(model.version)
            visits.open(Policy(model.name, model.path, engine, lambda: engine.version))
            ready = True
            address = http_url(settings.advertise, http_port)
            log.info("model server ready", extra={"address": address, "model": model.name})
            await lifecycle.wait_stopping()
        finally:
            ready = False
            await visits.close("the server is ending", drain_s)
            await engine.close()
