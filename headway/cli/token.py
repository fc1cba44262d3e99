"""`headway token`: who may use a fleet's services."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import click

from headway.access.roles import ROLES
from headway.access.secrets import write_secret
from headway.access.tokens import TokenFile, TokenRecord, add_token, parse_lifetime
from headway.cli.exits import SUCCEEDED
from headway.cli.options import as_json
from headway.fleet.state import default_state_dir, tokens_file

_file = click.option(
    "--file", "path", type=click.Path(path_type=Path, dir_okay=False), envvar="HEADWAY_TOKENS",
    help="The token file (env HEADWAY_TOKENS). Default: that of the fleet on this machine.",
)  # fmt: skip


@click.group("token")
def command() -> None:
    """Make, list and revoke the tokens that services accept."""


@command.command("create")
@click.option("--role", type=click.Choice(ROLES), default="user", show_default=True)
@click.option("--name", required=True, help="Whose it is, for lists.")
@click.option("--expires", metavar="SPAN", help="Such as 90d, 12h or 30m. Default: never.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False),
    help="Write the token into this file (mode 0600) instead of printing it.",
)  # fmt: skip
@_file
def create(role: str, name: str, expires: str | None, out: Path | None, path: Path | None) -> int:
    """Make a token and print it: the only time it is shown. Its hash is kept."""
    lifetime_s = parse_lifetime(expires) if expires else None
    chosen = next(known for known in ROLES if known == role)
    token, record = add_token(_tokens(path), chosen, name, lifetime_s)
    if out is not None:
        write_secret(out, token + "\n")
        click.echo(f"token {record.token_id} ({role}) is in {out}", err=True)
    else:
        click.echo(token)
        click.echo(f"token {record.token_id} ({role}); it is not shown again", err=True)
    return SUCCEEDED


@command.command("list")
@_file
@as_json
def list_(path: Path | None, as_json: bool) -> int:
    """List the tokens by id, role and name."""
    file = _tokens(path)
    records = file.read() if file.path.exists() else ()
    if as_json:
        rows = [{k: v for k, v in asdict(r).items() if k != "sha256"} for r in records]
        click.echo(json.dumps(rows, indent=2))
    else:
        for line in (("ID", "ROLE", "CREATED", "EXPIRES", "NAME"), *map(_row, records)):
            click.echo("{:10}{:9}{:18}{:18}{}".format(*line))
    return SUCCEEDED


@command.command("revoke")
@click.argument("token_id")
@_file
def revoke(token_id: str, path: Path | None) -> int:
    """Take a token out, by its id; services refuse it a second later."""
    record = _tokens(path).revoke(token_id)
    click.echo(f"token {record.token_id} ({record.role}, {record.name}) is revoked")
    return SUCCEEDED


def _tokens(path: Path | None) -> TokenFile:
    given = path or Path(os.environ.get("HEADWAY_TOKENS") or tokens_file(default_state_dir()))
    return TokenFile(given)


def _row(record: TokenRecord) -> tuple[str, str, str, str, str]:
    expires = "never" if record.expires_at is None else _day(record.expires_at)
    if record.expired(time.time()):
        expires = "expired"
    return record.token_id, record.role, _day(record.created_at), expires, record.name


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
