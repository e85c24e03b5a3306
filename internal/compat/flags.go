// Package compat makes it easy to come from node-driver-registrar: it understands that
// program's flags, answers its health check, and turns a DaemonSet that contains it into
// a drop-in for csi-registrar.
package compat

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/config"
	"csi-registrar/internal/safetext"
	"csi-registrar/internal/unixsock"
)

// Options is what the flags of node-driver-registrar say, in our terms.
type Options struct {
	Socket      string        // --csi-address: where the driver listens, as seen from here
	Endpoint    string        // --kubelet-registration-path: what the kubelet is told
	RegistryDir string        // --plugin-registration-path: the directory that the registration socket goes into
	Timeout     time.Duration // --timeout: GetPluginInfo and Probe
	HTTPAddr    string        // where /healthz is served, over TCP; empty: not at all
	PProf       bool          // --enable-pprof: the profiles too, at HTTPAddr
	Verbosity   int           // -v
	LogFormat   string        // --logging-format: text or json; "auto" if it was not given
	ShowVersion bool          // --version: say it and end
	Probe       bool          // --mode=kubelet-registration-probe: end at once with 0, nothing is looked at

	// Warnings are for people, one sentence each: what is deprecated or has no effect.
	Warnings []string
}

// Defaults of node-driver-registrar 2.17.
const (
	defaultSocket      = "/run/csi/socket"
	defaultRegistryDir = "/registration"
	defaultTimeout     = time.Second
	probeMode          = "kubelet-registration-probe"
)

// callsVerbosity is the -v from which node-driver-registrar logs each call.
const callsVerbosity = 4

// Flags holds what was given on a command line that Register has prepared.
type Flags struct {
	fs                *flag.FlagSet
	o                 Options
	mode              string
	healthPort        int
	connectionTimeout time.Duration
}

// ownFlags are those of our own `run`: alone they do not ask for one driver without a file.
var ownFlags = []string{"config", "config-root", "http-endpoint", "keep-sockets"}

// Register declares on fs the flags of node-driver-registrar 2.17, and those of klog that
// older ones had. Flags that fs has already are left alone: --http-endpoint, which both
// programs have, and our own. A flag that only exists so that old manifests work has an
// empty usage.
func Register(fs *flag.FlagSet) *Flags {
	f := &Flags{fs: fs}
	fs.StringVar(&f.o.Socket, "csi-address", defaultSocket, "`PATH` of the driver's socket, as seen from here")
	fs.StringVar(&f.o.Endpoint, "kubelet-registration-path", "", "`PATH` of the driver's socket as the kubelet sees it; required with these flags")
	fs.StringVar(&f.o.RegistryDir, "plugin-registration-path", defaultRegistryDir, "`DIR` in which the kubelet looks for registration sockets, as seen from here")
	fs.DurationVar(&f.o.Timeout, "timeout", defaultTimeout, "time limit for GetPluginInfo and Probe")
	fs.BoolVar(&f.o.PProf, "enable-pprof", false, "serve profiles under /debug/pprof/ at --http-endpoint")
	fs.Var((*verbosity)(&f.o.Verbosity), "v", "verbosity `number`; from 4 on each call is logged")
	fs.StringVar(&f.o.LogFormat, "logging-format", "auto", "`format` of the log: text or json")
	if fs.Lookup("http-endpoint") == nil {
		fs.String("http-endpoint", "", "TCP `address` that serves /healthz; empty: none")
	}

	fs.IntVar(&f.healthPort, "health-port", 0, "")
	fs.StringVar(&f.mode, "mode", "", "")
	fs.DurationVar(&f.connectionTimeout, "connection-timeout", 0, "")
	fs.BoolVar(&f.o.ShowVersion, "version", false, "")
	for _, i := range ignoredFlags {
		if i.isBool {
			fs.Bool(i.name, false, "")
		} else {
			fs.String(i.name, "", "")
		}
	}
	return f
}

// Wanted reports, once the command line is parsed, whether a flag was used that only
// node-driver-registrar has: then Options tells what to do, and no configuration file is read.
func (f *Flags) Wanted() bool {
	wanted := false
	f.fs.Visit(func(fl *flag.Flag) {
		wanted = wanted || !slices.Contains(ownFlags, fl.Name)
	})
	return wanted
}

// Options reads what was given; rest are the arguments that are no flags. Every error is
// one of usage.
func (f *Flags) Options(rest []string) (Options, error) {
	given := map[string]string{}
	f.fs.Visit(func(fl *flag.Flag) { given[fl.Name] = fl.Value.String() })
	for _, name := range []string{"config", "config-root"} {
		if _, mixed := given[name]; mixed {
			return Options{}, fmt.Errorf("--%s cannot be mixed with the flags of node-driver-registrar: "+
				"they name one driver by themselves, and no file is read", name)
		}
	}
	o := f.o
	o.HTTPAddr = given["http-endpoint"]
	o.Warnings = f.warnings(given, rest)
	if o.ShowVersion {
		return o, nil
	}
	if o.Endpoint == "" {
		return Options{}, errors.New("--kubelet-registration-path is required with the flags of node-driver-registrar: " +
			"the path of the driver's socket as the kubelet sees it")
	}
	if o.Probe = f.mode == probeMode; o.Probe {
		return o, nil
	}
	if f.healthPort > 0 && o.HTTPAddr != "" {
		return Options{}, errors.New("only one of --health-port and --http-endpoint can be set; --health-port is the deprecated one")
	}
	if f.healthPort > 65535 {
		return Options{}, fmt.Errorf("--health-port must be at most 65535, not %d", f.healthPort)
	}
	if f.healthPort > 0 {
		o.HTTPAddr = ":" + strconv.Itoa(f.healthPort)
	}
	if err := o.check(); err != nil {
		return Options{}, err
	}
	return o, nil
}

// check cleans the paths and finds values that cannot work.
func (o *Options) check() error {
	var err error
	if o.Socket, err = absolute("csi-address", o.Socket); err != nil {
		return err
	}
	if o.Endpoint, err = absolute("kubelet-registration-path", o.Endpoint); err != nil {
		return err
	}
	if o.RegistryDir, err = absolute("plugin-registration-path", o.RegistryDir); err != nil {
		return err
	}
	for name, p := range map[string]string{"csi-address": o.Socket, "kubelet-registration-path": o.Endpoint} {
		if err := unixsock.CheckPath(p); err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
	}
	if o.Timeout <= 0 {
		return fmt.Errorf("--timeout must be more than 0, not %v", o.Timeout)
	}
	if o.LogFormat != "auto" && o.LogFormat != "text" && o.LogFormat != "json" {
		return fmt.Errorf("--logging-format must be text or json, not %q", o.LogFormat)
	}
	return nil
}

// absolute drops a unix: scheme, which gRPC knows in the forms unix:///path and unix:/path.
func absolute(name, value string) (string, error) {
	p := strings.TrimPrefix(strings.TrimPrefix(value, "unix:"), "//")
	if !strings.HasPrefix(p, "/") {
		return "", fmt.Errorf("--%s must be an absolute path, with or without unix:// before it, not %s", name, safetext.Quote(value))
	}
	if strings.ContainsRune(p, 0) {
		return "", fmt.Errorf("--%s holds a NUL byte: %s", name, safetext.Quote(value))
	}
	return path.Clean(p), nil
}

func (f *Flags) warnings(given map[string]string, rest []string) []string {
	var out []string
	if f.connectionTimeout != 0 {
		out = append(out, "--connection-timeout is deprecated and has no effect: there is no limit for an absent driver")
	}
	if f.healthPort > 0 {
		out = append(out, "--health-port is deprecated: use --http-endpoint")
	}
	if f.mode != "" {
		out = append(out, "--mode is deprecated: leave it out")
	}
	if f.o.PProf && f.healthPort <= 0 && given["http-endpoint"] == "" {
		out = append(out, "--enable-pprof has no effect without --http-endpoint")
	}
	var ignored []string
	for _, i := range ignoredFlags {
		if _, ok := given[i.name]; ok {
			ignored = append(ignored, "--"+i.name)
		}
	}
	if len(ignored) > 0 {
		out = append(out, "accepted without effect: "+strings.Join(ignored, ", "))
	}
	if len(rest) > 0 {
		out = append(out, fmt.Sprintf("arguments that are no flags are ignored: %q", rest))
	}
	return out
}

// ignoredFlags are those of node-driver-registrar 2.17 and of klog that change nothing
// here. 2.17 itself has lost most of klog's (those with underscores, and logtostderr), but
// manifests still carry them.
var ignoredFlags = []struct {
	name   string
	isBool bool
}{
	{"add_dir_header", true},
	{"alsologtostderr", true},
	{"alsologtostderrthreshold", false},
	{"automaxprocs", true}, // the Go runtime does it by itself
	{"legacy_stderr_threshold_behavior", true},
	{"log-flush-frequency", false},
	{"log-json-info-buffer-size", false},
	{"log-json-split-stream", true},
	{"log-text-info-buffer-size", false},
	{"log-text-split-stream", true},
	{"log_backtrace_at", false},
	{"log_dir", false},
	{"log_file", false},
	{"log_file_max_size", false},
	{"logtostderr", true},
	{"one_output", true},
	{"skip_headers", true},
	{"skip_log_headers", true},
	{"stderrthreshold", false},
	{"vmodule", false},
}

// verbosity is klog's: a number that fits into 31 bits.
type verbosity int

func (v *verbosity) String() string { return strconv.Itoa(int(*v)) }

func (v *verbosity) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return errors.New("must be a number, 0 or more")
	}
	*v = verbosity(n)
	return nil
}

// LogLevel is what the verbosity means to us: debug shows each call.
func (o Options) LogLevel() slog.Level {
	if o.Verbosity >= callsVerbosity {
		return slog.LevelDebug
	}
	return slog.LevelInfo
}

// Driver is the one driver that the flags name, as a table of a configuration file would.
// Its name is not among the flags: the driver says it, and name is what it said.
//
// The socket's owner is not checked, as node-driver-registrar does not: in a container
// the driver's user is often another, and the directory is a mount that nobody else has.
func (o Options) Driver(name string) config.Driver {
	d := config.DefaultDriver(name, o.Socket)
	d.Endpoint = o.Endpoint
	d.Timeout = o.Timeout
	d.SocketOwner = config.OwnerAny
	return d
}
