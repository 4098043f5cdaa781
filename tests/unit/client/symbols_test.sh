#!/bin/sh
# symbols_test.sh LIBRARY HEADER: the library shows es_* and nothing else, all that the header declares, and needs no
# library that a PyTorch process may hold in another version.
set -eu
shown=$(nm -D --defined-only "$1" | awk '$2 != "A" { print $3 }' | sed 's/@.*//' | sort -u)
strangers=$(printf '%s\n' "$shown" | grep -v '^es_' || true)
if [ -n "$strangers" ]; then
  echo "visible beside es_*: $strangers" >&2
  exit 1
fi
declared=$(grep -o '\bes_[a-z_]*(' "$2" | tr -d '(' | sort -u)
for name in $declared; do
  case $name in es_*_fn) continue ;; esac
  printf '%s\n' "$shown" | grep -qx "$name" || { echo "$name is declared and not there" >&2; exit 1; }
done
[ "$(printf '%s\n' "$declared" | wc -l)" -ge 60 ]
needed=$(objdump -p "$1" | awk '$1 == "NEEDED" { print $2 }')
for library in $needed; do
  case $library in
    libstdc++.so.* | libgcc_s.so.* | libm.so.* | libc.so.* | ld-linux*) ;;
    *) echo "needs $library" >&2; exit 1 ;;
  esac
done
