package system

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// TestConfigurationError checks that an error in a file costs no registration, whatever happens
// meanwhile, and is reported everywhere, and that the fixed file is applied without a command.
func TestConfigurationError(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		const file = "/etc/csi-registrar/conf.d/90-new.toml"
		n.Write(file, "# my new driver\n[driver.\"three.sample.csi\"]\nsockte = \"/run/csi-three.sample.csi/csi.sock\"\n")
		before, mark := n.inodes(), n.mark()

		if out, err := n.Try("systemctl", "reload", unit); err == nil {
			t.Errorf("systemctl reload succeeded: %s", out)
		}
		out, err := n.Try("csi-registrar", "reload")
		if err == nil || !strings.Contains(out, file+":3") || !strings.Contains(out, "sockte") {
			t.Errorf("reload: %v, without file and line: %s", err, out)
		}
		for what, read := range map[string]func() string{
			"status":  n.status,
			"the log": func() string { return n.Journal("-u", unit) },
		} {
			n.says(what, read, file+":")
		}
		const short = "the configuration has errors; " // every user can read it
		n.says("STATUS=", n.statusText, short)
		n.replaced("systemctl", "restart", unit)
		n.waited()
		n.replaced("sh", "-c", "kill -KILL PID")
		n.waited()
		// An upgrade, as in the packages' scripts.
		n.Run("sh", "-c", "cp /usr/bin/csi-registrar /usr/bin/new && mv /usr/bin/new /usr/bin/csi-registrar && systemctl try-restart "+unit)
		n.waited()
		n.quiet(mark)
		if after := n.inodes(); !maps.Equal(before, after) {
			t.Errorf("inodes %v, were %v", after, before)
		}
		n.says("STATUS= after restarts", n.statusText, short)

		n.Run("systemctl", "start", "csi-sample@three.sample.csi")
		n.Write(file, driverConfig("three.sample.csi"))
		n.Eventually(soon, "the fixed file to be applied", func() error {
			events := n.events()[mark:]
			if !slices.ContainsFunc(events, func(e event) bool { return e.Event == "register" && e.Driver == "three.sample.csi" }) {
				return fmt.Errorf("the kubelet saw %v", events)
			}
			return nil
		})
		n.waited()
		n.says("STATUS=, now that it is fixed,", n.statusText, "3 drivers: 3 registered")
	})
}

func (n *node) statusText() string { return n.show(unit, "StatusText") }

// says waits until a text contains the words.
func (n *node) says(what string, read func() string, words string) {
	n.t.Helper()
	n.Eventually(soon, what+" to say "+words, func() error {
		if text := read(); !strings.Contains(text, words) {
			return fmt.Errorf("it says %s", text)
		}
		return nil
	})
}

// TestHTTPSocket checks that the documented command enables the HTTP socket on a running node
// without any write.
func TestHTTPSocket(t *testing.T) {
	onMain(t, func(t *testing.T, suite string) {
		n := registeredNode(t, suite)
		if out, err := n.get("/healthz"); err == nil {
			t.Fatalf("it is enabled as shipped: %s", out)
		}
		var command string
		for line := range strings.Lines(n.Read("/usr/lib/systemd/system/csi-registrar-http.socket")) {
			if text, found := strings.CutPrefix(line, "#     systemctl enable"); found {
				command = "systemctl enable" + text
			}
		}
		before, mark := n.inodes(), n.mark()
		visitors := n.probe()
		n.Run("sh", "-ec", command)
		n.waited()
		n.quiet(mark)
		visitors.neverRefused(t)
		if after := n.inodes(); !maps.Equal(before, after) {
			t.Errorf("inodes %v, were %v", after, before)
		}
		works := func() {
			t.Helper()
			for path, word := range map[string]string{"/healthz": "200", "/readyz": "200", "/metrics": "csi_registrar_build_info"} {
				if out, err := n.get(path); err != nil || !strings.Contains(out, word) {
					t.Errorf("%s: %v\n%s", path, err, out)
				}
			}
			if out, _ := n.get("/v1/status"); !strings.Contains(out, "404") {
				t.Errorf("/v1/status over TCP: %s", out)
			}
		}
		works()
		n.replaced("sh", "-c", "kill -KILL PID")
		n.waited()
		works()
		n.Run("systemctl", "stop", unit)
		if out, err := n.get("/healthz"); err == nil {
			t.Errorf("it answers for a stopped daemon: %s", out)
		}
		n.awaitState(unit, "inactive")
		n.Run("systemctl", "start", unit)
		n.waited()
		works()
	})
}

func (n *node) get(path string) (string, error) {
	return n.Try("bash", "-c", `exec 3<>/dev/tcp/127.0.0.1/9809 && printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&3 && cat <&3`, "get", path)
}
