package cli

// commands lists all commands, in the order of help.
func commands() []command {
	return []command{
		{name: "run", summary: "run the daemon, which keeps the drivers of this node registered",
			about: `With flags of node-driver-registrar (--csi-address,
--kubelet-registration-path, ...) it registers that one driver, under the name
that the driver reports, and reads no file.`,
			setup: setupRun, anyArgs: true},
		{name: "status", args: "[DRIVER]", summary: "show each driver's state, the kubelet's last answer, and what is blocking it",
			about: `The exit code is 0 if all enabled drivers (or the one that is named) are
registered, 1 if not, 3 if the daemon is not running; it is never started.`,
			setup: setupStatus},
		{name: "wait", args: "[DRIVER...]", summary: "wait until drivers are registered",
			about: `Without names it waits for all enabled drivers. A driver need not be configured
yet, nor the daemon running.`,
			setup: setupWait},
		{name: "doctor", args: "[DRIVER...]", summary: "find out why a driver is not registered, and how to fix it",
			about: `It does what the kubelet does, step by step, with the daemon or without it, and
changes nothing. The exit code is 1 if there is a problem.`,
			setup: setupDoctor},
		{name: "bugreport", summary: "collect what a support case needs into one archive, without secrets",
			about: `It works without the daemon, and changes nothing. What cannot be collected is an
entry of the archive that says why; root can collect everything.`,
			setup: setupBugreport},
		{name: "reload", summary: "reload the configuration and report errors", setup: setupReload},
		{name: "reregister", args: "DRIVER", summary: "make the kubelet register a driver again",
			about: `The registration socket is recreated: the kubelet removes the driver from the
node's CSINode object and adds it again about a second later.`,
			setup: setupReregister},
		{name: "trace", args: "[DRIVER]", summary: "show every call between a CSI driver and its caller, without secrets",
			about: `The kubelet's calls to a driver that has endpoint_link = true go through it
until it ends. With --listen and --connect it is put between any two, without
daemon, root or Kubernetes. Every byte is passed on; secrets, and values that
could be confidential, are never shown. It prints a table, and at the end a
summary.`,
			setup: setupTrace},
		{name: "config", summary: "check or show the configuration", sub: []command{
			{name: "check", summary: "report every error in the configuration files",
				about: `Errors go to standard error, a line each: FILE:LINE: what is wrong.
The exit code is 78 if there are errors.`,
				setup: setupConfigCheck},
			{name: "show", summary: "print the merged configuration, each value with its origin", setup: setupConfigShow},
		}},
		{name: "cleanup", summary: "remove the registration sockets if the unit is being stopped",
			about: `For two ExecStopPost= of the unit, --ask outside of its sandbox and --if-stopped
inside: on a restart, a crash or an upgrade the sockets stay, and the kubelet
does not notice.`,
			setup: setupCleanup},
		{name: "import", args: "MANIFEST...", summary: "turn a driver's DaemonSet into a configuration file", setup: setupImport},
		{name: "completion", args: "bash|zsh|fish", summary: "print the completion script for a shell", setup: plain(runCompletion)},
		{name: "version", summary: "print the version", setup: setupVersion},
		{name: "help", args: "[COMMAND]", summary: "explain the commands", setup: plain(runHelp)},

		{name: "__complete", hidden: true, args: "WORD...", summary: "print the completions of the last word", setup: plain(runComplete)},
	}
}
