#!/bin/sh
# Way C of rollout.md for a chart: with Helm 3, helm upgrade --post-renderer ./split.sh …
# Helm 4 takes only plugins there: helm template … | ./split.sh | kubectl apply -f -
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
csi-registrar import --split csi-registrar.dev/registers --output "$dir" - >&2
kubectl kustomize "$dir"
