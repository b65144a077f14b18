#!/bin/sh
# Twenty clients at once with no daemon: one daemon is started and serves all, the model is loaded
# once. Usage: autostart_twenty.sh BUILD
set -eu
ctl=$1/bin/modelcachectl
root=$(mktemp -d)
mkdir -m 700 "$root/run" # a folder that was named is never made
export MODELCACHE_SOCKET="$root/run/socket"
unset MODELCACHE_AUTOSTART || true
export MODELCACHE_DAEMON="$1/bin/modelcached"
finish() {
  code=$?
  "$ctl" shutdown >/dev/null 2>&1 || true
  [ "$code" = 0 ] || cat "$root/run/log" 2>/dev/null || true
  rm -rf "$root"
  exit "$code"
}
trap finish EXIT

# The smallest safetensors file with a tensor: header length, header, four bytes.
printf '\076\000\000\000\000\000\000\000{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}        1234' >"$root/m.safetensors"

pids=
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  "$ctl" --json load "$root/m.safetensors" >"$root/out.$i" 2>&1 &
  pids="$pids $!"
done
for pid in $pids; do
  wait "$pid" || { cat "$root"/out.*; exit 1; }
done
"$ctl" --json status >"$root/status"
grep -q '"loads":1,' "$root/status" || { cat "$root/status"; exit 1; }
[ "$(grep -c 'serving' "$root/run/log")" = 1 ] || { echo "more than one daemon served"; exit 1; }
echo "autostart_twenty: all passed"
