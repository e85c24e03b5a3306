package sidecar

import (
	"flag"
	"io"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"csi-registrar/internal/sys/trust"
)

// parse is what `run` does with its command line.
func parse(args ...string) (o Options, ok bool, err error) {
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.String("config", "", "")
	fs.String("config-root", "/", "")
	fs.Bool("keep-sockets", false, "")
	fs.String("http-endpoint", "", "")
	f := Register(fs)
	if err := fs.Parse(args); err != nil {
		return Options{}, false, err
	}
	o, err = f.Options(fs.Args())
	return o, f.HasAny(), err
}

func TestDefaultsAreThePeers(t *testing.T) {
	got, ok, err := parse("--kubelet-registration-path=/var/lib/kubelet/plugins/x/csi.sock")
	if err != nil || !ok {
		t.Fatalf("ok %v, error %v", ok, err)
	}
	want := Options{
		Socket:      "/run/csi/socket",
		Endpoint:    "/var/lib/kubelet/plugins/x/csi.sock",
		RegistryDir: "/registration",
		Timeout:     time.Second,
		LogFormat:   "auto",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestEveryWayToWriteAFlag(t *testing.T) {
	want := Options{
		Socket:      "/csi/csi.sock",
		Endpoint:    "/e/csi.sock",
		RegistryDir: "/reg",
		Timeout:     3 * time.Second,
		HTTPAddr:    ":9808",
		PProf:       true,
		Level:       slog.LevelDebug,
		LogFormat:   "json",
	}
	for _, line := range []string{
		"--csi-address=/csi/csi.sock --kubelet-registration-path=/e/csi.sock --plugin-registration-path=/reg --timeout=3s --http-endpoint=:9808 --enable-pprof --v=5 --logging-format=json",
		"-csi-address /csi/csi.sock -kubelet-registration-path /e/csi.sock -plugin-registration-path /reg/ -timeout 3s -http-endpoint :9808 -enable-pprof=true -v 5 -logging-format json",
		"--csi-address unix:///csi/csi.sock --kubelet-registration-path unix:///e/csi.sock --plugin-registration-path=/reg --timeout 3000ms --http-endpoint :9808 --enable-pprof=1 -v=5 --logging-format json",
		"--csi-address unix:/csi/csi.sock --kubelet-registration-path /e//csi.sock --plugin-registration-path=/reg --timeout 3s --http-endpoint :9808 --enable-pprof=T --v 5 --logging-format json",
	} {
		got, _, err := parse(strings.Fields(line)...)
		if err != nil {
			t.Errorf("%s: %v", line, err)
		} else if !reflect.DeepEqual(got, want) {
			t.Errorf("%s:\ngot  %+v\nwant %+v", line, got, want)
		}
	}
}

// The command lines of published manifests, old ones too, must start.
func TestOldManifestsStart(t *testing.T) {
	const path = "--kubelet-registration-path=/var/lib/kubelet/plugins/x/csi.sock"
	for _, test := range []struct {
		line string
		warn []string // a part of each warning
	}{
		{"--v=5 --csi-address=/csi/csi.sock", nil},
		{"--connection-timeout=15s", []string{"--connection-timeout is deprecated"}},
		{"--connection-timeout=0", nil},
		{"--health-port=9809", []string{"use --http-endpoint"}},
		{"--health-port=-1", nil},
		{"--mode=registration", []string{"--mode is deprecated"}},
		{"--enable-pprof", []string{"no effect without --http-endpoint"}},
		{"--logtostderr", []string{"accepted without effect: --logtostderr"}},
		{"--logtostderr=true --stderrthreshold=ERROR --vmodule a=1 -alsologtostderr -log_dir /tmp -log_file x -log_file_max_size 3 -one_output -skip_headers -skip_log_headers -add_dir_header -log_backtrace_at a.go:3",
			[]string{"--stderrthreshold, --vmodule"}},
		{"--logging-format=text --log-flush-frequency=1s --log-json-split-stream --log-json-info-buffer-size 1Ki --log-text-split-stream=false --log-text-info-buffer-size 0 --automaxprocs=false",
			[]string{"--automaxprocs, --log-flush-frequency"}},
		{"extra", []string{`"extra"`}},
	} {
		o, ok, err := parse(append([]string{path}, strings.Fields(test.line)...)...)
		if err != nil || !ok {
			t.Errorf("%s: ok %v, error %v", test.line, ok, err)
			continue
		}
		if len(o.Warnings) != len(test.warn) {
			t.Errorf("%s: warnings %q, want %d", test.line, o.Warnings, len(test.warn))
			continue
		}
		for i, w := range test.warn {
			if !strings.Contains(o.Warnings[i], w) {
				t.Errorf("%s: warning %q does not contain %q", test.line, o.Warnings[i], w)
			}
		}
	}
}

func TestUsageErrors(t *testing.T) {
	const path = "--kubelet-registration-path=/e/csi.sock "
	for _, test := range []struct{ line, want string }{
		{"--csi-address=/csi/csi.sock", "--kubelet-registration-path is required"},
		{path + "--config /etc/x.toml", "--config cannot be mixed"},
		{path + "--config-root /x", "--config-root cannot be mixed"},
		{"--v=5 --config /etc/x.toml", "--config cannot be mixed"},
		{path + "--csi-address csi.sock", "--csi-address must be an absolute path"},
		{path + "--csi-address tcp://127.0.0.1:1", "--csi-address must be an absolute path"},
		{"--kubelet-registration-path=e/csi.sock", "--kubelet-registration-path must be an absolute path"},
		{path + "--plugin-registration-path=", "--plugin-registration-path must be an absolute path"},
		{"--kubelet-registration-path=/" + strings.Repeat("x", 107), "has 108 bytes"},
		{path + "--csi-address=/" + strings.Repeat("x", 107), "has 108 bytes"},
		{path + "--timeout=0", "--timeout must be more than 0"},
		{path + "--timeout=5", "invalid value"},
		{path + "--health-port=8080 --http-endpoint=:8080", "only one of"},
		{path + "--health-port=65536", "at most 65535"},
		{path + "--logging-format=xml", "text or json"},
		{path + "--v=-1", "0 or more"},
		{path + "--v=99999999999", "0 or more"},
		{path + "--no-such-flag", "no-such-flag"},
		{path + "--logtostderr=perhaps", "invalid boolean"},
	} {
		if _, _, err := parse(strings.Fields(test.line)...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want one with %q", test.line, err, test.want)
		}
	}
}

func TestOurOwnFlagsAloneDoNotAskForIt(t *testing.T) {
	for _, line := range []string{"", "--config /x", "--config-root=/x", "--keep-sockets", "--http-endpoint :9809", "--config=--csi-address"} {
		if _, ok, _ := parse(strings.Fields(line)...); ok {
			t.Errorf("%q is taken for a command line of node-driver-registrar", line)
		}
	}
	for _, line := range []string{"--csi-address /x", "-v=1", "--logtostderr", "--mode x", "--keep-sockets --timeout 1s"} {
		if _, ok, _ := parse(strings.Fields(line)...); !ok {
			t.Errorf("%q is not taken for a command line of node-driver-registrar", line)
		}
	}
}

func TestEndAtOnce(t *testing.T) {
	if o, _, err := parse("--version"); err != nil || !o.ShowVersion {
		t.Errorf("--version: %+v, %v", o, err)
	}
	// As the peer's: the path is asked for first, but not looked at.
	if o, _, err := parse("--mode=kubelet-registration-probe", "--kubelet-registration-path=x"); err != nil || !o.Probe {
		t.Errorf("probe: %+v, %v", o, err)
	}
	if _, _, err := parse("--mode=kubelet-registration-probe"); err == nil {
		t.Error("the probe without a path is no error")
	}
	if o, _, err := parse("--mode=anything", "--kubelet-registration-path=/x"); err != nil || o.Probe {
		t.Errorf("another mode: %+v, %v", o, err)
	}
}

func TestDriverAndLevel(t *testing.T) {
	o, _, err := parse("--csi-address=/csi/csi.sock", "--kubelet-registration-path=/e/csi.sock", "--timeout=7s", "-v=4")
	if err != nil {
		t.Fatal(err)
	}
	d := o.Driver("x.example.com")
	if d.Name != "x.example.com" || d.Socket != "/csi/csi.sock" || d.Endpoint != "/e/csi.sock" ||
		d.Timeout != 7*time.Second || d.SocketOwner != trust.Anybody || !d.Enabled || len(d.SupportedVersions) == 0 {
		t.Errorf("%+v", d)
	}
	for v, want := range map[string]slog.Level{"-v=4": slog.LevelDebug, "-v=3": slog.LevelInfo, "-v=0": slog.LevelInfo} {
		o, _, err := parse("--kubelet-registration-path=/e/csi.sock", "-v=9", v)
		if err != nil || o.Level != want {
			t.Errorf("%s: %s, %v, want %s", v, o.Level, err, want)
		}
	}
}

// Flags that exist only for old manifests are not in help.
func TestDeprecatedFlagsAreHidden(t *testing.T) {
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	Register(fs)
	var shown []string
	fs.VisitAll(func(f *flag.Flag) {
		if f.Usage != "" {
			shown = append(shown, f.Name)
		}
	})
	want := "csi-address enable-pprof kubelet-registration-path logging-format plugin-registration-path timeout v"
	if got := strings.Join(shown, " "); got != want {
		t.Errorf("help shows %s\nwant       %s", got, want)
	}
}

func FuzzFlags(f *testing.F) {
	for _, line := range []string{
		"--csi-address=/csi/csi.sock --kubelet-registration-path=/e/csi.sock --v=5",
		"-csi-address unix:///csi/csi.sock -kubelet-registration-path /e/csi.sock -timeout 1h",
		"--mode=kubelet-registration-probe --kubelet-registration-path=/x",
		"--health-port=1 --http-endpoint=:1 --kubelet-registration-path=/x",
		"--kubelet-registration-path=unix:////x --plugin-registration-path=/a/../../b",
		"--config x --v=3", "--version", "-- x", "-", "---", "--=", "--help",
	} {
		f.Add(strings.ReplaceAll(line, " ", "\n"))
	}
	f.Fuzz(func(t *testing.T, line string) {
		o, ok, err := parse(strings.Split(line, "\n")...)
		if err != nil {
			return
		}
		if !ok {
			t.Fatalf("options without a flag that asks for them: %+v", o)
		}
		if o.Probe || o.ShowVersion {
			return
		}
		for _, p := range []string{o.Socket, o.Endpoint, o.RegistryDir} {
			if !strings.HasPrefix(p, "/") || strings.Contains(p, "\x00") || strings.Contains(p, "/../") {
				t.Fatalf("path %q in %+v", p, o)
			}
		}
		if len(o.Socket) > 107 || len(o.Endpoint) > 107 || o.Timeout <= 0 {
			t.Fatalf("%+v", o)
		}
		for _, w := range o.Warnings {
			if strings.Contains(w, "\n") || !utf8.ValidString(w) {
				t.Fatalf("a warning of more than a line: %q", w)
			}
		}
	})
}
