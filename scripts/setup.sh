#!/usr/bin/env bash
# Makes .venv with sglang and this package, once. Called by demo.sh and test.sh; nothing else needs installing by hand.
#   bash scripts/setup.sh [extra ...]        extras of pyproject.toml, default: test, nixl and the Mooncake of this machine
set -euo pipefail
cd "$(dirname "$0")/.."

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then mooncake=cuda13; else mooncake=cpu; fi
extras=${*:-test nixl $mooncake}
extras=${extras// /,}

# Mooncake's engine links the first three; SGLang compiles HiCache's page hash with the others. A wheel brings neither.
missing=()
for package in libibverbs1 librdmacm1 libnuma1 g++ libssl-dev; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing Debian packages ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi

if ! [ -x .venv/bin/python ]; then
    python=$(command -v python3.11 || command -v python3.12 || command -v python3)
    echo "setup: making .venv with $("$python" --version)"
    if ! "$python" -m venv .venv; then
        echo "setup: this Python has no venv module, installing Debian's"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
        rm -rf .venv && "$python" -m venv .venv
    fi
fi
stamp=.venv/installed-$(sha256sum pyproject.toml | cut -c1-16)-${extras//,/-}
if ! [ -f "$stamp" ]; then
    echo "setup: installing sglang and sglang-dcp-block[$extras] (about 10 GB, a minute or two)"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade uv
    .venv/bin/python -m uv pip install --quiet --python .venv/bin/python -e ".[$extras]"
    touch "$stamp"
fi
