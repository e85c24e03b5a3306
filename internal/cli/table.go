package cli

// commands is the table of all commands, in the order that help shows.
func commands() []command {
	return []command{
		{name: "run", summary: "keep the drivers of this node registered: the daemon",
			about: `With flags of node-driver-registrar (--csi-address,
--kubelet-registration-path, ...) it registers that one driver, under the name
that it gives itself, and reads no file.`,
			setup: setupRun},
		{name: "status", args: "[DRIVER]", summary: "show the drivers: state, the kubelet's last word, and why",
			about: `The exit code is 0 if all enabled drivers (or the one that is named) are
registered, 1 if not, 3 if the daemon does not run; it is never started.`,
			setup: setupStatus},
		{name: "wait", args: "[DRIVER...]", summary: "wait until drivers are registered",
			about: `None named means all enabled ones. A driver that is not configured yet and a
daemon that does not run yet are waited for.`,
			setup: setupWait},
		{name: "doctor", args: "[DRIVER...]", summary: "find out why a driver is not registered, and what mends it",
			about: `It does what the kubelet does, step by step, with the daemon or without it, and
changes nothing. The exit code is 1 if something is wrong.`,
			setup: setupDoctor},
		{name: "reload", summary: "have the daemon read its configuration anew, and say if it is right", setup: setupReload},
		{name: "reregister", args: "DRIVER", summary: "have the kubelet register a driver again",
			about: `The registration socket is made anew: the kubelet takes the driver out of the
node's CSINode object and puts it back, about a second later.`,
			setup: setupReregister},
		{name: "config", summary: "check or show the configuration", sub: []command{
			{name: "check", summary: "name every mistake in the configuration files",
				about: `Mistakes and warnings go to standard error, a line each: FILE:LINE: what is
wrong. The exit code is 78 if there are mistakes.`,
				setup: setupConfigCheck},
			{name: "show", summary: "print the merged configuration, each value with where it comes from", setup: setupConfigShow},
		}},
		{name: "cleanup", summary: "remove the registration sockets if the unit is being stopped",
			about: `For two ExecStopPost= of the unit, --ask outside of its sandbox and --if-stopped
inside: on a restart, a crash or an upgrade the sockets stay, and the kubelet
notices nothing.`,
			setup: setupCleanup},
		{name: "import", args: "MANIFEST...", summary: "turn a driver's DaemonSet into a configuration file", setup: setupImport},
		{name: "demo", summary: "show the whole story on this machine: no cluster, no root", setup: plain(runDemo)},
		{name: "completion", args: "bash|zsh|fish", summary: "print the completion script for a shell", setup: plain(runCompletion)},
		{name: "version", summary: "print the version", setup: setupVersion},
		{name: "help", args: "[COMMAND]", summary: "explain the commands", setup: plain(runHelp)},

		{name: "sample-driver", hidden: true, summary: "serve a CSI driver to try things with", setup: setupSampleDriver},
		{name: "__complete", hidden: true, args: "WORD...", summary: "print what the last word may become", setup: plain(runComplete)},
	}
}
