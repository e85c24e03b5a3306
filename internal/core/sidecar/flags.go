// Package sidecar is what csi-registrar needs to take the place of node-driver-registrar: it parses
// its flags and serves its health check.
package sidecar

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
	"csi-registrar/internal/sys/unixsock"
)

// Options holds the values of node-driver-registrar's flags.
type Options struct {
	Socket string // --csi-address: the driver's socket
	// --kubelet-registration-path: the driver's socket as the kubelet sees it.
	Endpoint string
	// --plugin-registration-path: the directory for the registration socket.
	RegistryDir string
	Timeout     time.Duration // --timeout: for GetPluginInfo and Probe
	HTTPAddr    string        // the TCP address for /healthz; empty: none
	PProf       bool          // --enable-pprof: profiles on HTTPAddr
	Level       slog.Level    // -v: debug, which shows each call, from 4 on
	LogFormat   string        // --logging-format: text or json; "auto" if it was not given
	ShowVersion bool          // --version: print the version and exit
	Probe       bool          // --mode=kubelet-registration-probe: exit with 0 without any check

	// Warnings lists deprecated and ignored flags, one sentence each.
	Warnings []string
}

// Defaults of node-driver-registrar 2.18: the driver's socket, and the directory for the
// registration socket.
const (
	DefaultSocket      = "/run/csi/socket"
	DefaultRegistryDir = "/registration"
	defaultTimeout     = time.Second
	probeMode          = "kubelet-registration-probe"
)

// Flags holds the flags that Register declared.
type Flags struct {
	fs                *flag.FlagSet
	o                 Options
	mode              string
	healthPort        int
	connectionTimeout time.Duration
}

// Register declares on fs the flags of node-driver-registrar 2.18, and the klog flags of older
// versions, apart from --http-endpoint, which both programs have: fs must have it. Flags that
// exist only for old manifests have an empty usage.
func Register(fs *flag.FlagSet) *Flags {
	f := &Flags{fs: fs}
	fs.StringVar(&f.o.Socket, "csi-address", DefaultSocket, "`PATH` of the driver's socket, as seen from here")
	fs.StringVar(&f.o.Endpoint, "kubelet-registration-path", "", "`PATH` of the driver's socket as the kubelet sees it; required with these flags")
	fs.StringVar(&f.o.RegistryDir, "plugin-registration-path", DefaultRegistryDir, "`DIR` in which the kubelet looks for registration sockets, as seen from here")
	fs.DurationVar(&f.o.Timeout, "timeout", defaultTimeout, "time limit for GetPluginInfo and Probe")
	fs.BoolVar(&f.o.PProf, "enable-pprof", false, "serve profiles under /debug/pprof/ on --http-endpoint")
	fs.Func("v", "verbosity `number`; from 4 on, each call is logged", func(s string) error {
		n, err := strconv.ParseUint(s, 10, 31) // like klog
		if err != nil {
			return errors.New("must be a number, 0 or more")
		}
		f.o.Level = slog.LevelInfo
		if n >= 4 {
			f.o.Level = slog.LevelDebug
		}
		return nil
	})
	fs.StringVar(&f.o.LogFormat, "logging-format", "auto", "`format` of the log: text or json")

	fs.IntVar(&f.healthPort, "health-port", 0, "")
	fs.StringVar(&f.mode, "mode", "", "")
	fs.DurationVar(&f.connectionTimeout, "connection-timeout", 0, "")
	fs.BoolVar(&f.o.ShowVersion, "version", false, "")
	for name := range strings.FieldsSeq(ignoredBools) {
		fs.Bool(name, false, "")
	}
	for name := range strings.FieldsSeq(ignoredStrings) {
		fs.String(name, "", "")
	}
	return f
}

// HasAny reports whether the parsed command line has a flag of node-driver-registrar. If so, use
// Options instead of the configuration files.
func (f *Flags) HasAny() bool {
	// Those of `run` that node-driver-registrar does not have, or has with the same meaning.
	own := []string{"config", "config-root", "http-endpoint", "keep-sockets"}
	found := false
	f.fs.Visit(func(fl *flag.Flag) {
		found = found || !slices.Contains(own, fl.Name)
	})
	return found
}

// Options returns the values of the flags. rest are the arguments that are not flags. All errors
// are usage errors.
func (f *Flags) Options(rest []string) (Options, error) {
	given := map[string]string{}
	f.fs.Visit(func(fl *flag.Flag) { given[fl.Name] = fl.Value.String() })
	for _, name := range []string{"config", "config-root"} {
		if _, mixed := given[name]; mixed {
			return Options{}, fmt.Errorf("--%s cannot be mixed with the flags of node-driver-registrar: "+
				"they name one driver, and no file is read", name)
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
	switch {
	case f.healthPort <= 0:
	case o.HTTPAddr != "":
		return Options{}, errors.New("only one of --health-port and --http-endpoint can be set; use --http-endpoint, --health-port is deprecated")
	case f.healthPort > 65535:
		return Options{}, fmt.Errorf("--health-port must be at most 65535, not %d", f.healthPort)
	default:
		o.HTTPAddr = ":" + strconv.Itoa(f.healthPort)
	}
	err := o.check()
	return o, err
}

// check validates the values and cleans the paths.
func (o *Options) check() error {
	for _, p := range []struct {
		name  string
		value *string
	}{{"csi-address", &o.Socket}, {"kubelet-registration-path", &o.Endpoint}, {"plugin-registration-path", &o.RegistryDir}} {
		var err error
		if *p.value, err = AbsolutePath(p.name, *p.value); err != nil {
			return err
		}
	}
	if err := cmp.Or(unixsock.CheckPath(o.Socket), unixsock.CheckPath(o.Endpoint)); err != nil {
		return err
	}
	if o.Timeout <= 0 {
		return fmt.Errorf("--timeout must be more than 0, not %v", o.Timeout)
	}
	if !slices.Contains([]string{"auto", "text", "json"}, o.LogFormat) {
		return fmt.Errorf("--logging-format must be text or json, not %q", o.LogFormat)
	}
	return nil
}

// AbsolutePath returns the cleaned path in the value of a flag, without gRPC's unix: or unix://
// before it.
func AbsolutePath(name, value string) (string, error) {
	p := strings.TrimPrefix(strings.TrimPrefix(value, "unix:"), "//")
	if !strings.HasPrefix(p, "/") {
		return "", fmt.Errorf("--%s must be an absolute path, with or without unix:// before it, not %s", name, safetext.Quote(value))
	}
	if strings.ContainsRune(p, 0) {
		return "", fmt.Errorf("--%s has a NUL byte: %s", name, safetext.Quote(value))
	}
	return path.Clean(p), nil
}

func (f *Flags) warnings(given map[string]string, rest []string) []string {
	ignored := slices.DeleteFunc(strings.Fields(ignoredBools+" "+ignoredStrings), func(name string) bool {
		_, ok := given[name]
		return !ok
	})
	slices.Sort(ignored)
	var out []string
	for _, w := range []struct {
		when bool
		text string
	}{
		{f.connectionTimeout != 0, "--connection-timeout is deprecated and has no effect: csi-registrar waits for the driver without limit"},
		{f.healthPort > 0, "--health-port is deprecated: use --http-endpoint"},
		{f.mode != "", "--mode is deprecated: remove it"},
		{f.o.PProf && f.healthPort <= 0 && given["http-endpoint"] == "", "--enable-pprof has no effect without --http-endpoint"},
		{len(ignored) > 0, "accepted without effect: --" + strings.Join(ignored, ", --")},
		{len(rest) > 0, fmt.Sprintf("arguments that are not flags are ignored: %q", rest)},
	} {
		if w.when {
			out = append(out, w.text)
		}
	}
	return out
}

// These flags of node-driver-registrar and of klog have no effect. node-driver-registrar 2.18 has
// dropped most klog flags (logtostderr and those with underscores), but manifests still have them.
// The Go runtime does by itself what automaxprocs is for.
const (
	ignoredBools = "add_dir_header alsologtostderr automaxprocs legacy_stderr_threshold_behavior " +
		"log-json-split-stream log-text-split-stream logtostderr one_output skip_headers skip_log_headers"
	ignoredStrings = "alsologtostderrthreshold log-flush-frequency log-json-info-buffer-size " +
		"log-text-info-buffer-size log_backtrace_at log_dir log_file log_file_max_size stderrthreshold vmodule"
)

// Driver returns the configuration of the driver that the flags describe. name is what the driver
// reported, because no flag has it.
//
// The owner of the socket is not checked, as with node-driver-registrar: in a container the driver
// often runs as another user, and nobody else has the directory mounted.
func (o Options) Driver(name string) config.Driver {
	d := config.DefaultDriver(name, o.Socket)
	d.Endpoint = o.Endpoint
	d.Timeout = o.Timeout
	d.SocketOwner = trust.Anybody
	return d
}

// Handler serves /healthz as node-driver-registrar does on --http-endpoint, and the profiles of
// --enable-pprof if pprof is not nil.
//
// check returns nil while the registration socket is in place, fs.ErrNotExist if there is none (as
// before the driver's first answer), and any other error otherwise. The responses are those of
// node-driver-registrar, for any method: 200 "ok", 404, and 500 with the error. Unlike this
// handler, node-driver-registrar does not listen before the driver has answered.
func Handler(check func() error, pprof http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		code, text := http.StatusOK, "ok"
		switch err := check(); {
		case errors.Is(err, fs.ErrNotExist):
			code, text = http.StatusNotFound, "registration socket does not exist"
		case err != nil:
			code, text = http.StatusInternalServerError, err.Error()
		}
		w.WriteHeader(code)
		_, _ = io.WriteString(w, text) // the client may be gone
	})
	if pprof != nil {
		mux.Handle("/debug/pprof/", pprof)
	}
	return mux
}
