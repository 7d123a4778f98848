#!/bin/sh
# Runs nvcc and keeps what ptxas says about each kernel beside the object file, for kernel_report.py.
object=
previous=
for argument; do
  [ "$previous" = "-o" ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" 2>"$object.ptxas"
code=$?
grep -v -E '^(ptxas info|\s+[0-9]+ bytes stack frame)' "$object.ptxas" >&2
exit $code
