#!/bin/sh
# For `make test-horovod`: builds Horovod against the torch of the virtual environment, once, into build/horovod.
# Takes about ten minutes on two cores, a C++ compiler and cmake. Usage: get_horovod.sh PYTHON
set -eu
version=0.28.1
home=$PWD/build/horovod
site=$home/site
pip() {
  python=$1
  shift
  "$python" -m pip -qq --no-input --disable-pip-version-check "$@" --constraint constraints.txt
}
test ! -d $site/horovod || exit 0
command -v cmake >/dev/null && command -v g++ >/dev/null || {
  echo "cmake or g++ is not there: the Horovod tests will skip"
  exit 0
}
mkdir -p $home
pip "$1" install --upgrade --target $site setuptools wheel cffi cloudpickle psutil pyyaml packaging
if ! ls $home/horovod-$version-*.whl >/dev/null 2>&1; then
  echo "building Horovod $version (about ten minutes)"
  pip "$1" download --no-deps --no-build-isolation --no-binary horovod --dest $home horovod==$version
  tar -xzf $home/horovod-$version.tar.gz -C $home
  # torch's headers need C++17; Horovod writes 14 into its compile lines, after all flags that could be given.
  sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
    $home/horovod-$version/CMakeLists.txt $home/horovod-$version/horovod/torch/CMakeLists.txt
  PYTHONPATH=$site HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 MAKEFLAGS=-j2 nice -n 19 \
    "$1" -m pip -qq --no-input --disable-pip-version-check wheel --no-deps --no-build-isolation \
    --wheel-dir $home $home/horovod-$version >$home/build.log 2>&1 || {
    tail -n 40 $home/build.log
    exit 1
  }
fi
pip "$1" install --no-deps --target $site $home/horovod-$version-*.whl
