package cli

import "flag"

// commands returns all commands in the order in which help lists them.
func commands() []command {
	return []command{
		{name: "run", summary: "run the daemon, which keeps the drivers of this node registered",
			about: `With flags of node-driver-registrar (--csi-address,
--kubelet-registration-path, ...) it registers that one driver, under the name
that the driver reports, and reads no file.`,
			setup: setupRun, anyArgs: true, ownEnd: true},
		{name: "status", args: "[DRIVER]", summary: "show each driver's state, and why it is not registered",
			about: `The exit code is 0 if all enabled drivers (or DRIVER) are registered, 1 if not
or if a table is invalid, 3 if the daemon is not running. It never starts the
daemon.`,
			setup: setupStatus},
		{name: "wait", args: "[DRIVER...]", summary: "wait until drivers are registered",
			about: `Without names it waits for all enabled drivers; it fails if a table is invalid,
and says so if no driver is configured. The daemon may be started, and drivers
that are named may be configured, later.`,
			setup: setupWait},
		{name: "doctor", args: "[DRIVER...]", summary: "find out why a driver is not registered, and how to fix it",
			about: `It repeats what the kubelet does, step by step, with or without the daemon, and
changes nothing. The exit code is 1 if there is a problem.`,
			setup: setupDoctor},
		{name: "bugreport", summary: "collect diagnostics in one archive, with known secrets removed",
			about: `It works without the daemon and changes nothing. For data that cannot be
collected the archive has an entry with the reason; only root can collect
everything.`,
			setup: setupBugreport},
		{name: "reload", summary: "reload the configuration and report errors",
			about: `A driver without a table stays registered while its volumes are in use; it is
named with their number. The exit code is 0 if the configuration is in force.`,
			setup: setupReload},
		{name: "reregister", args: "DRIVER", summary: "make the kubelet register a driver again",
			about: `The registration socket is recreated: the kubelet removes the driver from the
node's CSINode object and adds it again about a second later.`,
			setup: setupReregister},
		{name: "trace", summary: "show every call between a CSI driver and its caller, without secrets",
			about: `It listens at --listen and forwards each connection to the driver at --connect,
every byte unchanged. It needs no daemon, root or Kubernetes; csi-registrar(1)
shows how the kubelet's calls get there. Secrets are not shown; values that
could be confidential, and error texts, which can repeat secrets, only if --show
names them. It prints a table of the calls and, at the end, a summary.`,
			setup: setupTrace, ownEnd: true},
		{name: "config", summary: "check or show the configuration", sub: []command{
			{name: "check", summary: "report every error in the configuration files",
				about: `Errors are printed on standard error as FILE:LINE: MESSAGE, one per line.
The exit code is 78 if there are errors.`,
				setup: configCommand(checkedText)},
			{name: "show", summary: "print the merged configuration, each value with its origin", setup: configCommand(shownText)},
		}},
		{name: "cleanup", summary: "remove the registration sockets if the unit is being stopped",
			about: `The unit runs it twice in ExecStopPost=: with --ask outside its sandbox and with
--if-stopped inside. After a restart, crash or upgrade the sockets stay, and the
kubelet does not notice.`,
			setup: setupCleanup},
		{name: "import", args: "MANIFEST...", summary: "turn a driver's DaemonSet into a configuration file", setup: setupImport},
		{name: "supervise", summary: "wait until a driver serves, then feed its unit's watchdog",
			about: `For ExecStartPost= of a driver's unit with NotifyAccess=all. It returns when the
driver answers GetPluginInfo and Probe, so that a unit with After= the driver
starts when it serves. With --watchdog a small process stays in the unit's
control group and sends WATCHDOG=1 for as long as Probe is answered; it ends
with the driver.`,
			setup: setupSupervise},
		{name: "version", summary: "print the version", setup: setupVersion},
		{name: "help", args: "[COMMAND]", summary: "explain the commands", anyArgs: true,
			setup: func(*flag.FlagSet) runner { return runHelp }},
	}
}
