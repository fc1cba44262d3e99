#!/usr/bin/env bash
# Installs each Debian package named whose command is missing, and starts none of their services.
# PACKAGE, whose command has the same name, or PACKAGE=COMMAND.
set -euo pipefail
missing=()
for wanted in "$@"; do
  command -v "${wanted##*=}" >/dev/null 2>&1 || missing+=("${wanted%%=*}")
done
[ "${#missing[@]}" -eq 0 ] && exit 0

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null 2>&1 || {
    echo "the tests need: ${missing[*]}; install it with your package manager" >&2
    exit 1
  }
  sudo=(sudo)
fi
command -v apt-get >/dev/null 2>&1 || {
  echo "the tests need: ${missing[*]}; install it with your package manager" >&2
  exit 1
}
"${sudo[@]}" apt-get update -qq
# RUNLEVEL=1 keeps the package's own service from being started.
"${sudo[@]}" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
