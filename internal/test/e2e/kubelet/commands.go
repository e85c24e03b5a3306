package kubelet

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// commands reads commands, one per line, until the input ends. The last event of each is "done".
func commands(in io.Reader, api *apiServer, events *events) {
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		if line == "" {
			continue
		}
		err := errors.New("there is no API server with --handler=record")
		if api != nil {
			err = api.command(line)
		}
		done := event{Event: "done", Command: line, Error: text(err)}
		if api != nil {
			done.CSINodeWrites, done.NodeWrites = api.writes()
		}
		events.print(done)
	}
}

func (a *apiServer) writes() (csiNode, node int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.csiNodeWrites, a.nodeWrites
}

func (a *apiServer) command(line string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	word, rest, _ := strings.Cut(line, " ")
	switch {
	case line == "csinode":
		return a.printCSINode()
	case line == "node":
		return a.printNode()
	case line == "api down":
		a.down = true
		return nil
	case line == "api up":
		a.down = false
		return nil
	case word == "label" && strings.Contains(rest, "="):
		k, v, _ := strings.Cut(rest, "=")
		return a.label(k, v)
	}
	return fmt.Errorf("not a command: %q", line)
}

// label sets a label of the Node, or removes it if the value is empty, as an administrator does
// with kubectl. It is not counted as a write of the kubelet.
func (a *apiServer) label(key, value string) error {
	n, err := a.theNode()
	if err != nil {
		return err
	}
	n = n.DeepCopy()
	if value == "" {
		delete(n.Labels, key)
	} else {
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		n.Labels[key] = value
	}
	if err := a.client.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), n, ""); err != nil {
		return err
	}
	return errors.Join(a.printNode(), a.save())
}
