package harness

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Event is a line of output of cmd/kubelet.
type Event struct {
	Time          time.Time         `json:"time"`
	Event         string            `json:"event"`
	Driver        string            `json:"driver"`
	Endpoint      string            `json:"endpoint"`
	Versions      []string          `json:"versions"`
	Error         string            `json:"error"`
	TookSeconds   float64           `json:"took_seconds"`
	Drivers       []CSINodeDriver   `json:"drivers"`
	Labels        map[string]string `json:"labels"`
	CSINodeWrites int               `json:"csinode_writes"`
	NodeWrites    int               `json:"node_writes"`
	Command       string            `json:"command"`
}

func (e Event) String() string {
	s := e.Time.Format("05.000 ") + e.Event + " " + e.Driver
	for _, d := range e.Drivers {
		s += fmt.Sprintf(" %s=%s", d.Name, d.NodeID)
	}
	if e.Error != "" {
		s += ": " + e.Error
	}
	return s
}

// CSINodeDriver is an entry of the CSINode object.
type CSINodeDriver struct {
	Name         string   `json:"name"`
	NodeID       string   `json:"node_id"`
	TopologyKeys []string `json:"topology_keys"`
	MaxVolumes   int32    `json:"max_volumes"`
}

// Kubelet is a running kubelet in a process of its own.
type Kubelet struct {
	*process
	stdin io.WriteCloser

	mu      sync.Mutex
	events  []Event
	changed chan struct{} // closed and replaced with each event
}

// StartKubelet starts a kubelet with the node's root directory. The kubelets of a node run one
// after the other and share the content of the API server.
func (n *Node) StartKubelet(args ...string) *Kubelet {
	n.T.Helper()
	n.kubelets++
	cmd := reexec(n.T, "kubelet", append([]string{
		"--root", n.Root, "--until-eof", "--v", "2", "--state", filepath.Join(n.Dir, "api.json"),
	}, args...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		n.T.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		n.T.Fatal(err)
	}
	k := &Kubelet{stdin: stdin, changed: make(chan struct{})}
	read := make(chan struct{})
	n.T.Cleanup(func() {
		<-read
		if n.T.Failed() {
			for _, e := range k.Events() {
				n.T.Log("kubelet:", e)
			}
		}
	})
	k.process = start(n.T, fmt.Sprintf("kubelet %d", n.kubelets), cmd)
	go func() {
		defer close(read)
		k.read(stdout)
	}()
	k.Wait("start", 30*time.Second, func(e Event) bool { return e.Event == "started" })
	return k
}

func (k *Kubelet) read(r io.Reader) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e Event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			k.t.Errorf("kubelet printed %q: %v", lines.Text(), err)
			continue
		}
		k.mu.Lock()
		k.events = append(k.events, e)
		close(k.changed)
		k.changed = make(chan struct{})
		k.mu.Unlock()
	}
}

// Events returns all events so far.
func (k *Kubelet) Events() []Event {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.events)
}

// Mark returns the current position in the events, for WaitAfter and Since.
func (k *Kubelet) Mark() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.events)
}

// Since returns the events after a mark.
func (k *Kubelet) Since(mark int) []Event { return k.Events()[mark:] }

// Wait waits for an event, and also finds earlier ones.
func (k *Kubelet) Wait(what string, limit time.Duration, is func(Event) bool) Event {
	k.t.Helper()
	return k.WaitAfter(0, what, limit, is)
}

// WaitAfter waits for an event after a mark.
func (k *Kubelet) WaitAfter(mark int, what string, limit time.Duration, is func(Event) bool) Event {
	k.t.Helper()
	deadline := time.After(limit)
	for {
		k.mu.Lock()
		events, changed := k.events[mark:], k.changed
		k.mu.Unlock()
		if i := slices.IndexFunc(events, is); i >= 0 {
			return events[i]
		}
		mark += len(events)
		select {
		case <-changed:
		case <-deadline:
			k.t.Fatalf("kubelet: no %s within %v", what, limit)
		}
	}
}

// Registered waits for the successful registration of a driver after a mark.
func (k *Kubelet) Registered(mark int, driver string, limit time.Duration) Event {
	k.t.Helper()
	return k.WaitAfter(mark, "registration of "+driver, limit, func(e Event) bool {
		return e.Event == "register" && e.Driver == driver && e.Error == ""
	})
}

// Refused waits for a refusal of a driver after a mark.
func (k *Kubelet) Refused(mark int, driver string, limit time.Duration) Event {
	k.t.Helper()
	return k.WaitAfter(mark, "refusal of "+driver, limit, func(e Event) bool {
		return (e.Event == "register" || e.Event == "validate") && e.Driver == driver && e.Error != ""
	})
}

// Deregistered waits for the deregistration of a driver after a mark.
func (k *Kubelet) Deregistered(mark int, driver string, limit time.Duration) Event {
	k.t.Helper()
	return k.WaitAfter(mark, "deregistration of "+driver, limit, func(e Event) bool {
		return e.Event == "deregister" && e.Driver == driver
	})
}

// Count counts the events of a kind ("register", "deregister", …) for a driver after a
// mark; an empty driver means any.
func (k *Kubelet) Count(mark int, event, driver string) int {
	n := 0
	for _, e := range k.Since(mark) {
		if e.Event == event && (driver == "" || e.Driver == driver) {
			n++
		}
	}
	return n
}

// Command sends a command and returns the events up to its "done".
func (k *Kubelet) Command(line string) []Event {
	k.t.Helper()
	mark := k.Mark()
	if _, err := io.WriteString(k.stdin, line+"\n"); err != nil {
		k.t.Fatalf("kubelet: %v", err)
	}
	done := k.WaitAfter(mark, "answer to "+line, 10*time.Second, func(e Event) bool {
		return e.Event == "done" && e.Command == line
	})
	if done.Error != "" {
		k.t.Fatalf("kubelet: %s: %s", line, done.Error)
	}
	return k.Since(mark)
}

// CSINode returns the drivers of the CSINode object by name.
func (k *Kubelet) CSINode() map[string]CSINodeDriver {
	k.t.Helper()
	out := map[string]CSINodeDriver{}
	for _, e := range k.Command("csinode") {
		if e.Event == "csinode" {
			clear(out)
			for _, d := range e.Drivers {
				out[d.Name] = d
			}
		}
	}
	return out
}

// Writes returns how often this kubelet has written the CSINode and the Node.
func (k *Kubelet) Writes() (csiNode, node int) {
	k.t.Helper()
	events := k.Command("csinode")
	done := events[len(events)-1]
	return done.CSINodeWrites, done.NodeWrites
}

// Kill ends the kubelet with SIGKILL.
func (k *Kubelet) Kill() {
	k.t.Helper()
	k.end(syscall.SIGKILL, 10*time.Second)
}

// Quiet checks that nothing is registered, refused or deregistered for a while.
func (k *Kubelet) Quiet(mark int, span time.Duration) {
	k.t.Helper()
	timer := time.NewTimer(span)
	defer timer.Stop()
	for {
		k.mu.Lock()
		changed := k.changed
		k.mu.Unlock()
		k.noChurn(mark)
		select {
		case <-changed:
		case <-timer.C:
			k.noChurn(mark)
			return
		}
	}
}

func (k *Kubelet) noChurn(mark int) {
	k.t.Helper()
	var seen []string
	for _, e := range k.Since(mark) {
		if slices.Contains([]string{"validate", "register", "deregister"}, e.Event) {
			seen = append(seen, e.String())
		}
	}
	if seen != nil {
		k.t.Fatalf("the kubelet saw something that it should not:\n%s", strings.Join(seen, "\n"))
	}
}
