#!/bin/sh
# Makes .venv-flower and .venv-pfl next to this file: their packages do not fit into one environment. The other systems run
# in the Python that starts run.py. torch comes first and by its pinned version alone, so that nothing brings another.
set -eu
cd "$(dirname "$0")"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
for peer in flower pfl; do
    grep -v -e '^#' ../../constraints.txt > "$constraints"
    if [ "$peer" = pfl ]; then
        grep -v -e '^attrs==' -e '^absl-py==' "$constraints" > "$constraints.pfl"
        mv "$constraints.pfl" "$constraints"
    fi
    "${PYTHON:-python3}" -m venv ".venv-$peer"
    ".venv-$peer/bin/python" -m pip install --quiet -c "$constraints" torch
    ".venv-$peer/bin/python" -m pip install --quiet -c "$constraints" -r "requirements-$peer.txt"
done
