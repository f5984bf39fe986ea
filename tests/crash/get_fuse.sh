#!/bin/sh
# For `make soak`: the power-loss tests need libfuse. Installs Debian's where that is permitted, else they skip with a reason.
set -eu
if ldconfig -p 2>/dev/null | grep -q 'libfuse3\?\.so' || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  exit 0
fi
echo "installing fuse3 for the power-loss tests"
{ apt-get -qq update && apt-get -qq install -y --no-install-recommends fuse3; } >/dev/null ||
  echo "fuse3 could not be installed: the power-loss tests will skip"
