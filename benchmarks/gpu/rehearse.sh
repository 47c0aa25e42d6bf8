#!/bin/sh
# Rehearse the GPU studies without a GPU: pack.py, then measure.sh smoke where the software is the GPU machine's.
#
#     benchmarks/gpu/rehearse.sh FOLDER [PYTHON]
#
# FOLDER gets that software (8 GB, once): Debian trixie (glibc 2.41), a Python 3.12 without libpython, and the packages
# below from PyPI. PYTHON (python3.12) is a Python 3.12 that was built with --enable-shared. The commands run there
# without network, in a copy of the working tree with the pack. Then one model cannot be written, and the other model's
# figures must remain. At last NVML is the stand-in of the tests: a GPU that CUDA does not see must never be reported as
# the one that served. It needs root, debootstrap, util-linux, iproute2 and gcc, and a python that has tune installed.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 FOLDER [PYTHON]" >&2
    exit 2
fi
folder=$(realpath -m "$1")
python=${2:-python3.12}
root=$folder/root
pack=$folder/pack
copy=/work/repository
tree_mib=64 # what the machine takes: the working tree and the pack
here=$(dirname "$(realpath "$0")")
repository=$(realpath "$here/../..")

# versions as a session saw them on the machine; where it saw none, the newest
packages="torch==2.11.0 numpy==2.5.2 onnx==1.23.1 onnxruntime==1.30.0 numba scipy pandas matplotlib grpcio"

if [ "$(id -u)" != 0 ]; then
    echo "$0: needs root, for chroot and debootstrap" >&2
    exit 1
fi
for program in debootstrap gcc "$python"; do
    if ! command -v "$program" >/dev/null; then
        echo "$0: $program is missing; install it" >&2
        exit 1
    fi
done
if ! python -c 'import optimizer, tritonclient' 2>/dev/null; then
    echo "$0: python on PATH has no tune; activate the virtual environment in which it is installed" >&2
    exit 1
fi

wanted="$packages, $("$python" -VV)"
if [ "$(cat "$folder/.complete" 2>/dev/null)" != "$wanted" ]; then
    mkdir -p "$folder"
    [ ! -e "$folder/.complete" ] || rm -rf "$root" "$folder/.complete"
    # the libraries of Python's own modules; bash and procps are on every machine
    libraries=libssl3t64,libstdc++6,zlib1g,libexpat1,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8t64,libuuid1
    debootstrap --variant=minbase --include="$libraries,procps" trixie "$root" >&2
    library=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    objects=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBPL"))')
    # as in Ubuntu and Debian, the interpreter has libpython inside, and no shared library
    gcc -o "$root/usr/bin/python3.12" "$objects/python.o" "$objects/libpython3.12.a" -Wl,--export-dynamic -lm -ldl
    # a file and no pipe, which would hide an error of the first tar
    tar -C "$(dirname "$library")" -cf "$folder/library.tar" --exclude=site-packages --exclude=test --exclude=__pycache__ \
        python3.12
    tar -C "$root/usr/lib" -xf "$folder/library.tar"
    rm "$folder/library.tar"
    chroot "$root" /usr/bin/python3.12 -m venv --without-pip /opt/torch/.venv
    # shellcheck disable=SC2086 # a list
    "$python" -m pip install --quiet --no-compile --only-binary=:all: \
        --target "$root/opt/torch/.venv/lib/python3.12/site-packages" $packages >&2
    echo "$wanted" >"$folder/.complete"
fi

(cd "$repository" && PYTHONPATH=. python benchmarks/gpu/pack.py --python "$python" --out "$pack")
rm -rf "$root$copy" "$root/tmp"
mkdir -p "$root$copy" "$root/tmp"
(
    cd "$repository"
    git ls-files -z --cached --others --exclude-standard >"$folder/files"
    tar -cf "$folder/tree.tar" --null --files-from="$folder/files"
)
tar -C "$root$copy" -xf "$folder/tree.tar"
rm "$folder/files" "$folder/tree.tar"
rm -rf "$root$copy/pack"
cp -r "$pack" "$root$copy/pack"
size=$(du --summarize --apparent-size --block-size=1M "$root$copy" | cut -f 1)
echo "working tree with the pack: $size MiB"
if [ "$size" -gt "$tree_mib" ]; then
    echo "$0: the working tree with the pack has $size MiB, and the machine takes $tree_mib" >&2
    exit 1
fi

mkdir "$root/tmp/nvml"
gcc -shared -fPIC -o "$root/tmp/nvml/libnvidia-ml.so.1" "$repository/tests/stand_in_nvml.c"
cat >"$root/tmp/nvml/answers" <<'END'
- driver 580.159.04
- devices 1
0 uuid GPU-00000000-0000
0 name NVIDIA H100 80GB HBM3
0 utilization 50
0 memory 10737418240
0 power 250000
0 mig 0
END
cat >"$root$copy/rehearsal" <<'END'
set -eu
fail() {
    echo "rehearsal failed: $1" >&2
    exit 1
}
benchmarks/gpu/measure.sh smoke /tmp/out || fail "a step has failed"
. /tmp/tritune-gpu/env.sh
out=/tmp/tritune-gpu/smoke
python3 -c 'import platform, sys; print("Python", platform.python_version(), sys.prefix, *platform.libc_ver())'
python3 -c 'from optimizer.cli.start import main; main()' doctor || fail "tune doctor"
grep -q '^## Rounds of perf_analyzer' $out/dlrm.md || fail "dlrm.md lacks the rounds of perf_analyzer"
python3 -m tarfile --filter data -e $out/bert-table-runs.tar.xz /tmp
cp /tmp/bert-table/bert/*/trials.csv /tmp/bert-table.csv
replay="from optimizer.cli.start import main; main()"
if python3 -c "$replay" replay --sla-p95 2s /tmp/bert-table.csv >/tmp/replay.log 2>&1; then
    python3 benchmarks/forecast_errors.py --passes 0 /tmp/bert-table.csv || fail "forecast_errors.py"
else # on a busy machine no row of the table may be stable
    grep -q "no row meets" /tmp/replay.log || fail "tune replay: $(cat /tmp/replay.log)"
fi
mkdir -p /tmp/work/models/dlrm/1/model.pt # so that the model cannot be written
if python3 benchmarks/gpu/run.py --smoke --out /tmp/one --work /tmp/work; then
    fail "the exit code hides a failed step"
fi
grep -q 'Not measured: `python benchmarks/gpu/models.py dlrm`' /tmp/one/dlrm.md || fail "dlrm.md hides a failed step"
grep -q throughput_infer_per_sec /tmp/one/bert.jsonl || fail "a failed step lost the figures of another one"
export LD_LIBRARY_PATH=/tmp/nvml STAND_IN_NVML=/tmp/nvml/answers
python3 benchmarks/gpu/run.py --smoke --study bert --out /tmp/no-cuda || fail "a step has failed"
grep -q 'Note: there is a GPU, but config.pbtxt asks for the CPU' /tmp/no-cuda/bert.md || fail "bert.md hides the CPU"
sed -i s/KIND_CPU/KIND_GPU/ results/gpu/models/bert/config.pbtxt
sweep="from optimizer.cli.start import main; main()"
if python3 -c "$sweep" sweep --max-queue-delay off --concurrency 1 results/gpu/bert.yaml >/tmp/on-gpu.log 2>&1; then
    fail "a model of a GPU was served without one"
fi
cat /tmp/on-gpu.log
grep -q KIND_GPU /tmp/on-gpu.log || fail "the reason is missing"
echo "rehearsed: run.py --smoke, a step that fails, and a GPU that CUDA does not see"
END
export REHEARSAL_ROOT="$root" REHEARSAL_COPY="$copy"
exec unshare --mount --net --pid --fork --kill-child --propagation private sh -eu -c '
ip link set lo up # the only network
mount -t proc proc "$REHEARSAL_ROOT/proc"
mount --rbind /dev "$REHEARSAL_ROOT/dev"
mount -t tmpfs tmpfs "$REHEARSAL_ROOT/dev/shm"
path=/opt/torch/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec chroot "$REHEARSAL_ROOT" /usr/bin/env -i HOME=/root PATH="$path" bash -c "cd $REHEARSAL_COPY && exec bash rehearsal"'
