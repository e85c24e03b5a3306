// Package sys is the wing for Linux and systemd. Its packages would be useful to any daemon that
// manages Unix sockets under systemd: none speaks CSI or with the kubelet. It imports no other
// wing, and every other wing may use it.
//
// Begin with worker, which runs calls that can block and is used everywhere, and unixsock. trust
// decides which files root may believe; process identifies a process and waits for its end; fswatch
// reports that something changed at a path, also at one that does not exist yet; systemd speaks
// with PID 1 and the journal. safetext makes untrusted text safe to print.
package sys
