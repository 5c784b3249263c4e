#!/bin/sh
# Redoes every figure of the engine on a GPU, prints the tables and draws them where matplotlib is
# installed. Goes on where an earlier run ended; --again starts anew, --budget-s N begins nothing
# after so many seconds, --list says what there is. PYTHON names the interpreter. Results are kept
# in build/gpu, or what --results says; benchmarks.gpu.plots draws those of other folders.
set -eu
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu --json build/gpu/figures.json "$@"
