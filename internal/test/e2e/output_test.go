package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/test/e2e/harness"
	"csi-registrar/internal/test/fake"
)

// venom is the text that a hostile driver returns in every field. Unescaped it would set the
// window's title, clear the screen (by ESC and by the one-byte CSI), forge a log line, overwrite
// earlier text, reverse text, hide it, and end it.
const venom = "\x1b]0;owned\x07\x1b[2J\u009b2J\ntime=now level=ERROR msg=forged\rover \u202eevil\u2066\u200b\x00 end"

// hostileNode is a node with a driver for each text that a driver can return.
func hostileNode(t *testing.T) (n *harness.Node, names []string) {
	t.Helper()
	n = harness.New(t)
	huge, long := strings.Repeat(venom, 1<<20/len(venom)), strings.Repeat(venom, 100)
	for name, be := range map[string]func(*fake.Answers){
		"version.example":   func(b *fake.Answers) { b.Version = long },
		"huge.example":      func(b *fake.Answers) { b.Version = huge },
		"name.example":      func(b *fake.Answers) { b.Name = venom },
		"longname.example":  func(b *fake.Answers) { b.Name = long },
		"node.example":      func(b *fake.Answers) { b.NodeID = venom },
		"longnode.example":  func(b *fake.Answers) { b.NodeID = long },
		"key.example":       func(b *fake.Answers) { b.Topology = map[string]string{venom: "a"} },
		"value.example":     func(b *fake.Answers) { b.Topology = map[string]string{"example/a": venom} },
		"refused.example":   func(*fake.Answers) {},
		"longvalue.example": func(b *fake.Answers) { b.Topology = map[string]string{"example/a": long} },
		"info.example": func(b *fake.Answers) {
			b.Fail = map[string]error{fake.GetPluginInfo: status.Error(codes.Internal, long)}
		},
		"hugeinfo.example": func(b *fake.Answers) {
			b.Fail = map[string]error{fake.GetPluginInfo: status.Error(codes.Internal, huge)}
		},
		"probe.example": func(b *fake.Answers) { b.Fail = map[string]error{fake.Probe: status.Error(codes.Internal, venom)} },
		"nodeinfo.example": func(b *fake.Answers) {
			b.Fail = map[string]error{fake.NodeGetInfo: status.Error(codes.Internal, venom)}
		},
	} {
		d := n.AddDriver(name)
		d.Set(be)
		d.Start()
		names = append(names, name)
	}
	return n, names
}

// settled waits until the daemon has asked all drivers. As the kubelet, it refuses one of them with
// the same venom.
func settled(t *testing.T, n *harness.Node, c *harness.Daemon) {
	t.Helper()
	c.WaitState("name.example", "mismatch", soon)
	c.WaitState("version.example", "published", soon)
	for _, name := range []string{"info.example", "probe.example", "nodeinfo.example", "value.example"} {
		c.WaitStatus(name, "a reason", soon, func(s harness.DriverStatus) bool { return s.Reason != "" && s.Driver == "starting" })
	}
	c.WaitState("refused.example", "published", soon)
	conn, err := grpc.NewClient("unix:"+n.RegSocket("refused.example"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	kubelet := registerapi.NewRegistrationClient(conn)
	if _, err := kubelet.GetInfo(t.Context(), &registerapi.InfoRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := kubelet.NotifyRegistrationStatus(t.Context(), &registerapi.RegistrationStatus{Error: venom}); err != nil {
		t.Fatal(err)
	}
	c.WaitState("refused.example", "refused", soon)
}

// ours are the sequences that csi-registrar itself sends to a terminal: colors.
var ours = regexp.MustCompile(`\x1b\[(?:0|01|02|31|32|33)m`)

// harmless fails the test if a text has an invisible character, or is so long that it would push
// everything else off the screen.
func harmless(t *testing.T, what, text string) {
	t.Helper()
	if len(text) > 100_000 {
		t.Errorf("%s has %d bytes", what, len(text))
	}
	for i, r := range text {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("%s has %U: %q", what, r, text[max(i-100, 0):min(i+100, len(text))])
			return
		}
	}
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "time=now") {
			t.Errorf("%s has a line that a driver wrote: %q", what, line)
		}
	}
}

// harmlessJSON checks a document as it is printed, and every string in it except node IDs, which
// stay unchanged, because users compare them with the CSINode object.
func harmlessJSON(t *testing.T, what, text string) {
	t.Helper()
	harmless(t, what, text)
	dec := json.NewDecoder(strings.NewReader(text))
	for key := (json.Token)(nil); ; {
		before := key
		token, err := dec.Token()
		key = token
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		if s, is := token.(string); is && before != json.Token("node_id") {
			for line := range strings.SplitSeq(s, "\n") { // config_error has several lines
				harmless(t, "a string of "+what, line)
			}
		}
	}
}

// onTerminal runs a command on a terminal of its own and returns its output.
func onTerminal(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer master.Close()
	fd := int(master.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err := errors.Join(err, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0),
		unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 400, Col: 80})); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.Env = append(cmd.Env, "TERM=xterm")
	err = cmd.Start()
	slave.Close()
	if err != nil {
		t.Fatal(err)
	}
	var seen strings.Builder
	for r := bufio.NewReader(master); ; {
		b, err := r.ReadByte()
		if err != nil {
			break // EIO: the last process has closed it
		}
		seen.WriteByte(b)
	}
	_ = cmd.Wait() // 1: not all drivers are registered
	return strings.ReplaceAll(seen.String(), "\r\n", "\n")
}

// No text of a driver, or of the kubelet about it, has an effect on the terminal, in the log or in
// a database of metrics.
func TestHostileOutput(t *testing.T) {
	t.Parallel()
	n, names := hostileNode(t)
	c := n.StartDaemon()
	settled(t, n, c)

	t.Run("terminal", func(t *testing.T) {
		root := []string{"--config-root", n.Etc}
		commands := [][]string{{"status"}, {"doctor"}, {"wait", "--timeout", "10ms"}, {"config", "show"}}
		for _, name := range names {
			commands = append(commands, []string{"status", name}, []string{"doctor", name})
		}
		for _, args := range commands {
			what := strings.Join(args, " ")
			out := onTerminal(t, n.Command(append(args, root...)...))
			if out == "" {
				t.Errorf("%s says nothing", what)
			}
			if colour := strings.Contains(out, "\x1b[31m"); !colour && (what == "status" || what == "doctor") {
				t.Errorf("%s is not in colour: %q", what, out)
			}
			harmless(t, what, ours.ReplaceAllString(out, ""))
		}
		for _, args := range [][]string{{"status", "--json"}, {"doctor", "--json"}} {
			harmlessJSON(t, strings.Join(args, " "), onTerminal(t, n.Command(append(args, root...)...)))
		}
	})
	t.Run("HTTP", func(t *testing.T) {
		for _, path := range []string{"/healthz", "/readyz", "/metrics", "/readyz/refused.example", "/readyz/name.example"} {
			_, body := c.Get(path)
			harmless(t, path, body)
		}
		_, body := c.Get("/v1/status")
		harmlessJSON(t, "/v1/status", body)
	})
	t.Run("log", func(t *testing.T) {
		harmless(t, "the log", c.Log())
		for line := range strings.Lines(c.Log()) {
			if !strings.HasPrefix(line, "time=2") {
				t.Errorf("a line of the log is not ours: %q", line)
			}
		}
	})
	c.Stop()

	t.Run("log as JSON", func(t *testing.T) {
		n.Write("config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n[log]\nlevel = \"debug\"\nformat = \"json\"\n", n.Root))
		c := n.StartDaemon()
		settled(t, n, c)
		c.Stop()
		for line := range strings.Lines(c.Log()) {
			harmlessJSON(t, "the log", line)
		}
	})
	t.Run("journal", func(t *testing.T) {
		n.Write("config.toml", fmt.Sprintf("[kubelet]\nroot_dir = %q\n[log]\nlevel = \"debug\"\nformat = \"journal\"\n", n.Root))
		socket := filepath.Join(n.Dir, "journal")
		entries := journal(t, socket)
		sh := exec.Command("/bin/sh", "-c", `mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal && : >/run/systemd/journal/socket &&
			mount --bind `+socket+` /run/systemd/journal/socket && exec "$0" "$@"`)
		sh.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		c := n.StartDaemonVia(sh)
		settled(t, n, c)
		c.Stop()
		got := entries()
		if len(got) < 2*len(names) {
			t.Errorf("only %d entries: %q", len(got), got)
		}
		for _, entry := range got {
			for field, value := range journalFields(t, entry) {
				harmless(t, "field "+field, value)
			}
		}
	})
}

// journal listens as systemd's journal does. entries stops it and returns the entries.
func journal(t *testing.T, path string) (entries func() []string) {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	var reader sync.WaitGroup
	reader.Go(func() {
		buf := make([]byte, 1<<20)
		for {
			size, err := conn.Read(buf)
			if err != nil {
				return // closed, or the deadline: everything was read
			}
			got = append(got, string(buf[:size]))
		}
	})
	stop := sync.OnceFunc(func() {
		if err := conn.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			t.Error(err)
		}
		reader.Wait()
		conn.Close()
	})
	t.Cleanup(stop)
	return func() []string { stop(); return got }
}

// journalFields parses an entry of the journal's native protocol: NAME=VALUE lines, or NAME, a
// length in 8 bytes and a value that may have line breaks.
func journalFields(t *testing.T, entry string) map[string]string {
	t.Helper()
	fields := map[string]string{}
	for entry != "" {
		line, rest, found := strings.Cut(entry, "\n")
		name, value, inline := strings.Cut(line, "=")
		switch {
		case !found:
			t.Fatalf("no end of line: %q", entry)
		case inline:
			fields[name], entry = value, rest
		default:
			if len(rest) < 8 {
				t.Fatalf("no length: %q", entry)
			}
			size := int(rest[0]) | int(rest[1])<<8 | int(rest[2])<<16
			if len(rest) < 8+size+1 {
				t.Fatalf("too short: %q", entry)
			}
			fields[name], entry = rest[8:8+size], rest[8+size+1:]
		}
	}
	return fields
}
