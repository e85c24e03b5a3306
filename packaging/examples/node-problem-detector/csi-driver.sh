#!/bin/sh
# csi-driver.sh DRIVER [ARGUMENT...]: a custom plugin of node-problem-detector. Its exit code is 0, which is
# OK there, if the kubelet has the driver, or has it within 2 seconds, as after a restart of the daemon; it is
# 1, a problem, if not, and 3, unknown, if the daemon is not running. A driver that restarts stays
# registered, so that its restart does not taint the node. It prints the driver's state without the
# reason, which can quote the driver: the output of a plugin is stored in the Node object.
registrar=${CSI_REGISTRAR:-/usr/bin/csi-registrar}
"$registrar" wait --timeout 2s "$@"
code=$?
text=$("$registrar" status "$@")
[ $? = 3 ] && [ "$code" = 1 ] && code=3
state=$(printf '%s\n' "$text" | sed -n 's/^  state  *//p')
if [ -n "$state" ]; then
	echo "$1: $state"
else
	echo "$1: no state; run csi-registrar status $1 on the node"
fi
exit "$code"
