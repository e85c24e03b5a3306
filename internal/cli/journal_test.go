package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"csi-registrar/internal/node/status"
)

// A restart without a new registration writes two lines to the log, one for the stop and one for
// the start, and no warning about conditions that end by themselves.
func TestLogOfARestart(t *testing.T) {
	t.Parallel()
	n := newRegisteredNode(t)
	before := n.log.String()
	n.restart(os.Interrupt)
	n.eventually("the driver answers", func() bool { return n.state().Driver == status.Ready })
	n.restart(os.Interrupt)
	logged := func(text string) int { return strings.Count(strings.TrimPrefix(n.log.String(), before), text) }
	n.eventually("both starts are in the log", func() bool { return logged("msg=ready") == 2 })
	var texts []string
	for line := range strings.Lines(strings.TrimPrefix(n.log.String(), before)) {
		_, text, _ := strings.Cut(line, "msg=")
		texts = append(texts, strings.TrimSpace(text))
	}
	if len(texts) != 4 || texts[0] != "stopping" || !strings.HasPrefix(texts[1], "ready ") || texts[2] != "stopping" {
		t.Errorf("two restarts logged\n%s", strings.Join(texts, "\n"))
	}

	before = n.log.String()
	if err := n.daemon.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = n.daemon.Wait() // killed
	if err := os.Remove(filepath.Join(n.root, "k/plugins_registry", registeredName+"-reg.sock")); err != nil {
		t.Fatal(err)
	}
	n.start()
	n.eventually("the driver is registered", func() bool { return n.state().State == string(status.Registered) })
	if after := strings.TrimPrefix(n.log.String(), before); strings.Contains(after, "level=WARN") || strings.Contains(after, "level=ERROR") {
		t.Errorf("a socket that was removed while no daemon ran logged\n%s", after)
	}

	before = n.log.String()
	n.driver.Kill()
	n.eventually("the end of the driver is in the log", func() bool { return logged(`msg="driver is not ready"`) == 1 })
	n.restart(os.Interrupt)
	n.eventually("the log says after a restart that it is not there", func() bool { return logged(`msg="driver is not ready"`) == 2 })
}
