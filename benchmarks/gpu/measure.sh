#!/usr/bin/env bash
# Measure a study of run.py on a machine without network, in the repository with the pack of pack.py.
#
#     benchmarks/gpu/measure.sh STUDY OUT [MINUTES]
#
# STUDY is smoke, dlrm, bert or bert-table. OUT gets the files of run.py, and machine.txt with the GPU and what `tune
# doctor` says. The pack is unpacked to /tmp once. The smoke test takes a minute and its files stay in /tmp: it shows
# that the packed software runs on this machine, before a study takes longer.
set -euo pipefail

if [ $# -lt 2 ] || [ $# -gt 3 ]; then
    echo "usage: $0 smoke|dlrm|bert|bert-table OUT [MINUTES]" >&2
    exit 2
fi
study=$1 out=$2 minutes=${3:-9}
cd "$(dirname "$0")/../.."
software=${TMPDIR:-/tmp}/tritune-gpu
if [ ! -e "$software/complete" ]; then
    python3 -m tarfile --filter data -e pack/tritune-gpu.tar.xz "$(dirname "$software")"
    touch "$software/complete"
fi
. "$software/env.sh"
if [ "$study" = smoke ]; then
    exec python3 benchmarks/gpu/run.py --smoke --minutes "$minutes" --out "$software/smoke" --work "$software/smoke/work"
fi
mkdir -p "$out"
{
    nvidia-smi -q 2>&1 || true
    free -g
    df -h /dev/shm /tmp
    python3 -c 'from optimizer.cli.start import main; main()' doctor || true
} >"$out/machine.txt"
exec python3 benchmarks/gpu/run.py --study "$study" --minutes "$minutes" --out "$out" --work "$software/work"
