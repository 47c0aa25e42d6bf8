#!/usr/bin/env bash
# Measure a study of run.py on a machine without network, in the repository with the pack of pack.py.
#
#     benchmarks/gpu/measure.sh STUDY OUT [MINUTES]
#
# STUDY is smoke, dlrm, bert or bert-table. OUT gets machine.txt, with the GPU, what NVML and PyTorch read of it, and
# what `tune doctor` says, and the files of run.py. The pack is unpacked to /tmp once. The smoke test takes two
# minutes and shows that the packed software runs on this machine, before a study takes longer. Its files stay in /tmp;
# if it fails, OUT gets smoke.tar with its tables and logs.
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
mkdir -p "$out"
# the inputs of 16 requests of 4,096 samples and the regions of two instances; containers often have 64 MiB
least_shm_mib=2048
if [ "$(df --output=avail --block-size=1M /dev/shm | tail -n 1)" -lt $least_shm_mib ]; then
    mount -o remount,size=8G /dev/shm || echo "$0: /dev/shm has less than $least_shm_mib MiB" >&2
fi
if [ ! -e "$out/machine.txt" ]; then
    {
        timeout 60 nvidia-smi -q || true
        free -g
        df -h /dev/shm /tmp
        timeout 60 python3 benchmarks/gpu/device.py || true
        timeout 60 python3 -c 'from optimizer.cli.start import main; main()' doctor || true
    } >"$out/machine.txt" 2>&1
fi
if [ "$study" = smoke ]; then
    files=$software/smoke
    python3 benchmarks/gpu/run.py --smoke --minutes "$minutes" --out "$files" --work "$files/work" || {
        python3 -m tarfile -c "$out/smoke.tar" "$files"/*.log "$files"/*.md || true
        exit 1
    }
    exit
fi
exec python3 benchmarks/gpu/run.py --study "$study" --minutes "$minutes" --out "$out" --work "$software/work"
