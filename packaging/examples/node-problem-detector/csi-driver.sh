#!/bin/sh
# csi-driver.sh DRIVER [ARGUMENT...]: a custom plugin of node-problem-detector. Its exit code is that of
# `csi-registrar status`: 0 is OK there, 1 a problem, anything else unknown (3: the daemon is not
# running). It prints the driver's state, without the reason, which may quote the driver: what a plugin
# prints is in the Node object.
registrar=${CSI_REGISTRAR:-/usr/bin/csi-registrar}
text=$("$registrar" status "$@")
code=$?
if [ "$code" = 3 ]; then
	# It may just be restarted. This and the rest must fit into the plugin's timeout.
	"$registrar" wait --timeout 2s "$@"
	text=$("$registrar" status "$@")
	code=$?
fi
state=$(printf '%s\n' "$text" | sed -n 's/^  state  *//p')
if [ -n "$state" ]; then
	echo "$1: $state"
else
	echo "$1: no state; run csi-registrar status $1 on the node"
fi
exit "$code"
