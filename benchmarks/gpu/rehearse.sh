#!/bin/sh
# Rehearse the GPU studies without a GPU: pack.py, then unpack and run.py --smoke where the software is the GPU machine's.
#
#     benchmarks/gpu/rehearse.sh FOLDER [VERSION_OF_PYTHON_3.12]
#
# FOLDER gets that software (8 GB, once): Debian trixie (glibc 2.41), a Python 3.12 without libpython, and the packages
# below from PyPI. The commands run there without network, in a copy of the working tree with the pack. Then one model
# cannot be written, and the other model's figures must remain. It needs root, debootstrap, util-linux, iproute2 and
# gcc, a python that has tune installed, and a Python 3.12 that was built with --enable-shared (python3.12).
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

if [ ! -e "$folder/.complete" ]; then
    mkdir -p "$folder"
    # the libraries of Python's own modules; bash and procps are on every machine
    libraries=libssl3t64,libstdc++6,zlib1g,libexpat1,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8t64,libuuid1
    debootstrap --variant=minbase --include="$libraries,procps" trixie "$root" >&2
    library=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    objects=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("LIBPL"))')
    # as in Ubuntu and Debian, the interpreter has libpython inside, and no shared library
    gcc -o "$root/usr/bin/python3.12" "$objects/python.o" "$objects/libpython3.12.a" -Wl,--export-dynamic -lm -ldl
    tar -C "$(dirname "$library")" -c --exclude=site-packages --exclude=test --exclude=__pycache__ python3.12 |
        tar -x -C "$root/usr/lib"
    chroot "$root" /usr/bin/python3.12 -m venv --without-pip /opt/torch/.venv
    # shellcheck disable=SC2086 # a list
    "$python" -m pip install --quiet --no-compile --only-binary=:all: \
        --target "$root/opt/torch/.venv/lib/python3.12/site-packages" $packages >&2
    touch "$folder/.complete"
fi

(cd "$repository" && PYTHONPATH=. python benchmarks/gpu/pack.py --python "$python" --out "$pack")
rm -rf "$root$copy" "$root/tmp"
mkdir -p "$root$copy" "$root/tmp"
(cd "$repository" && git ls-files -z --cached --others --exclude-standard | tar -c --null --files-from=-) |
    tar -x -C "$root$copy"
rm -rf "$root$copy/pack"
cp -r "$pack" "$root$copy/pack"
size=$(du --summarize --apparent-size --block-size=1M "$root$copy" | cut -f 1)
echo "working tree with the pack: $size MiB"
if [ "$size" -gt "$tree_mib" ]; then
    echo "$0: the working tree with the pack has $size MiB, and the machine takes $tree_mib" >&2
    exit 1
fi

cat >"$root$copy/rehearsal" <<'END'
set -eu
fail() {
    echo "rehearsal failed: $1" >&2
    exit 1
}
python3 -m tarfile --filter data -e pack/tritune-gpu.tar.xz /tmp
. /tmp/tritune-gpu/env.sh
python3 -c 'import platform, sys; print("Python", platform.python_version(), sys.prefix, *platform.libc_ver())'
python3 -c 'from optimizer.cli.main import main; raise SystemExit(main(["doctor"]))' || fail "tune doctor"
python3 benchmarks/gpu/run.py --smoke --out /tmp/out || fail "a step has failed"
mkdir -p /tmp/work/models/dlrm/1/model.pt # so that the model cannot be written
if python3 benchmarks/gpu/run.py --smoke --out /tmp/one --work /tmp/work; then
    fail "the exit code hides a failed step"
fi
grep -q 'Not measured: `python benchmarks/gpu/models.py dlrm`' /tmp/one/dlrm.md || fail "dlrm.md hides a failed step"
grep -q throughput_infer_per_sec /tmp/one/bert.jsonl || fail "a failed step lost the figures of another one"
echo "rehearsed: run.py --smoke, and a step that fails"
END
export REHEARSAL_ROOT="$root" REHEARSAL_COPY="$copy"
exec unshare --mount --net --pid --fork --kill-child --propagation private sh -eu -c '
ip link set lo up # the only network
mount -t proc proc "$REHEARSAL_ROOT/proc"
mount --rbind /dev "$REHEARSAL_ROOT/dev"
mount -t tmpfs tmpfs "$REHEARSAL_ROOT/dev/shm"
path=/opt/torch/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec chroot "$REHEARSAL_ROOT" /usr/bin/env -i HOME=/root PATH="$path" bash -c "cd $REHEARSAL_COPY && exec bash rehearsal"'
