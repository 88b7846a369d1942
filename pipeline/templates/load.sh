#!/bin/sh
# Checks the parts beside this script, joins them and loads the images into an engine. Needs no duopack.
#
#   sh load.sh              check, then load with docker, or with what ENGINE names (podman, nerdctl)
#   sh load.sh --check      only check
#   sh load.sh --join FILE  check, then write the joined archive to FILE
#
# SHA256SUMS has the checksums, IMAGES what is inside, NEEDS the images whose layers were left out.
set -eu
LC_ALL=C
export LC_ALL

fail() {
  printf 'load.sh: %s\n' "$1" >&2
  exit 1
}

check() {
  if command -v sha256sum >/dev/null 2>&1; then
    sha256sum -c SHA256SUMS || fail 'a part is damaged or missing: copy it here again'
  elif command -v shasum >/dev/null 2>&1; then
    shasum -a 256 -c SHA256SUMS || fail 'a part is damaged or missing: copy it here again'
  else
    fail 'there is neither sha256sum nor shasum here, so the parts cannot be checked'
  fi
}

join() {
  sed -n 's/^[0-9a-f]\{64\}  \(images\.tar\.[0-9]\{3\}\)$/\1/p' SHA256SUMS | while read -r part; do
    cat "$part" || exit 1
  done
}

need() {
  [ -f NEEDS ] || return 0
  while read -r config manifest name; do
    for known in "$config" "$manifest" "$name"; do
      if "$engine" image inspect "$known" >/dev/null 2>&1; then continue 2; fi
    done
    fail "$engine does not have $name, whose layers were left out: load that image first"
  done <NEEDS
}

mode=${1:-load}
case $mode in
  load | --check) [ $# -le 1 ] || fail 'too many arguments' ;;
  --join) [ $# -eq 2 ] || fail '--join needs the name of a file' ;;
  -h | --help)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
    ;;
  *) fail "'$mode' is not --check or --join FILE" ;;
esac
case ${2:-} in
  '' | /*) file=${2:-} ;;
  *) file=$PWD/$2 ;;
esac
engine=${ENGINE:-docker}
CDPATH='' cd -- "$(dirname -- "$0")"
if [ "$mode" = load ] && ! command -v "$engine" >/dev/null 2>&1; then
  fail "there is no $engine here: install it, or name another engine: ENGINE=podman sh load.sh"
fi

[ "$mode" != load ] || need
check
case $mode in
  load)
    join | "$engine" load
    echo 'Inside:'
    cat IMAGES
    ;;
  --join)
    join >"$file.partial"
    mv -- "$file.partial" "$file"
    ;;
esac
