#!/bin/sh
# Way C of rollout.md for a chart: helm upgrade --post-renderer ./split.sh …
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
csi-registrar import --split csi-registrar.dev/registers --output "$dir" - >&2
kubectl kustomize "$dir"
