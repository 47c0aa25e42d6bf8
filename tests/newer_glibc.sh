#!/bin/sh
# Run a command where the C library is newer than that of this machine, to test perf_analyzer 2.60, which needs 2.38.
#
#     tests/newer_glibc.sh FOLDER COMMAND...
#     tests/newer_glibc.sh /var/tmp/trixie python -m pytest -q tests/contract/test_load_generators.py -k PerfAnalyzer
#
# FOLDER gets a minimal Debian (300 MB) by debootstrap, once. RELEASE names it, by default trixie (glibc 2.41), and
# MIRROR its archive, by default that of debootstrap. COMMAND runs there in the current folder, with the Python of this
# machine (PYTHON, by default python): the repository, the Python, its packages, pip's settings and tune's cache are
# mounted into FOLDER. The mounts end with the command. It needs root and the packages debootstrap and util-linux.
set -eu

if [ $# -lt 2 ]; then
    echo "usage: $0 FOLDER COMMAND..." >&2
    exit 2
fi
root=$(realpath -m "$1")
shift
# the libraries of Python's own modules, the server and perf_analyzer
packages=libssl3t64,libstdc++6,zlib1g,libexpat1,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8t64,libuuid1
if [ ! -e "$root/.complete" ]; then
    # shellcheck disable=SC2086 # without MIRROR there is no argument
    debootstrap --variant=minbase --include="$packages,libgomp1,ca-certificates,procps" \
        "${RELEASE:-trixie}" "$root" ${MIRROR:-} >&2
    touch "$root/.complete"
fi

python=$("${PYTHON:-python}" -c "import sys; print(sys.executable)")
mounted=$("$python" - <<'END'
import sys
from pathlib import Path

from optimizer.core.files import cache_folder

cache_folder().mkdir(parents=True, exist_ok=True)
folders = {Path.cwd(), Path(sys.prefix), Path(sys.base_prefix), cache_folder()}
print(*sorted(str(folder) for folder in folders if folder.is_dir()), sep="\n")
END
)
export NEWER_GLIBC_ROOT="$root" NEWER_GLIBC_MOUNTED="$mounted"
PATH=$(dirname "$python"):$PATH
export PATH
exec unshare --mount --propagation private sh -eu -c '
pip="/etc/pip.conf /etc/xdg/pip ${XDG_CONFIG_HOME:-$HOME/.config}/pip ${PIP_CERT:-} ${SSL_CERT_FILE:-}"
for path in /proc /sys /dev /dev/shm /etc/resolv.conf /etc/hosts $pip $NEWER_GLIBC_MOUNTED; do
    if [ -d "$path" ]; then
        mkdir -p "$NEWER_GLIBC_ROOT$path"
    elif [ -e "$path" ]; then
        mkdir -p "$NEWER_GLIBC_ROOT$(dirname "$path")"
        touch "$NEWER_GLIBC_ROOT$path"
    else
        continue
    fi
    mount --bind "$path" "$NEWER_GLIBC_ROOT$path"
done
exec chroot "$NEWER_GLIBC_ROOT" sh -c "cd \"\$1\" && shift && exec \"\$@\"" sh "$PWD" "$@"' sh "$@"
