#!/bin/sh
# For `make test-mpi`: Debian's OpenMPI where that is permitted, and mpi4py beside the virtual environment, in build/mpi.
# Usage: get_mpi.sh PYTHON
set -eu
if ! command -v mpirun >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "mpirun is not there and cannot be installed from here: the MPI tests will skip"
    exit 0
  fi
  echo "installing openmpi-bin"
  { apt-get -qq update && apt-get -qq install -y --no-install-recommends openmpi-bin; } >/dev/null
fi
test -d build/mpi/mpi4py || "$1" -m pip -qq --no-input --disable-pip-version-check install \
  --no-deps --constraint constraints.txt --target build/mpi mpi4py
