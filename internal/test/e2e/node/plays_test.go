package node_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/node"
)

var long = flag.Bool("long", false, "play all on each suite, and what waits as long as it would in life")

func TestMain(m *testing.M) {
	// The watches log many lines while the API server is not available.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	built.Main(m)
}

// TestPlays runs the scenarios that need no boot, with pods that write meanwhile.
func TestPlays(t *testing.T) {
	t.Parallel()
	for _, suite := range played("bookworm") {
		t.Run(suite, func(t *testing.T) {
			t.Parallel()
			s := newStage(t, suite)
			for _, p := range plays {
				s.play(p)
			}
			s.print()
		})
	}
}

// played returns the suites to test on: both in a long run.
func played(suite string) []string {
	if *long {
		return node.Suites
	}
	return []string{suite}
}

// killed is systemd's log text for a process that was killed.
var killed = []string{"Main process exited", "Failed with result 'signal'"}

var plays = []play{
	{name: "daemon hangs", journal: []string{"Watchdog timeout", "Main process exited", "Failed with result 'watchdog'", "Killing process"}, do: func(s *stage) {
		const dropIn = "/run/systemd/system/csi-registrar.service.d/watchdog.conf"
		s.Write(dropIn, "[Service]\nWatchdogSec=2s\n")
		s.Run("systemctl", "daemon-reload")
		s.Run("systemctl", "restart", unit)
		s.replaced(unit, func() { s.kill("STOP", unit) })
		s.remove(dropIn)
		s.Run("systemctl", "daemon-reload")
		s.Run("systemctl", "restart", unit)
	}},
	{name: "driver's file removed while its volumes are used", do: func(s *stage) {
		const file = "/usr/lib/csi-registrar/conf.d/20-sample.toml"
		content := s.Read(file)
		s.remove(file)
		defer s.Write(file, content)
		s.Eventually(soon, "the daemon to say why the driver stays", func() error {
			out, err := s.Try("csi-registrar", "status", "--json")
			if !strings.Contains(out, "2 volumes in use, no table") {
				return fmt.Errorf("%s %w", out, err)
			}
			return nil
		})
	}, journal: []string{"disappeared from the configuration"}},
	{name: "package downgraded and upgraded", do: func(s *stage) {
		for _, version := range []string{older, newer} {
			s.replaced(unit, func() { s.Install(version, "csi-registrar") })
			if out := s.Run("csi-registrar", "version"); !strings.Contains(out, version) {
				s.t.Errorf("the version is %q, want %s", out, version)
			}
		}
	}},
	{name: "systemd reloaded and re-executed", do: func(s *stage) {
		s.Run("systemctl", "daemon-reload")
		s.Run("systemctl", "daemon-reexec")
		s.Run("systemctl", "restart", unit)
	}},
	{name: "kubelet restarted", do: func(s *stage) { s.newKubelet("restart") }},
	{name: "kubelet killed", do: func(s *stage) { s.newKubelet("kill", "--signal=KILL") }},
	{name: "kubelet and daemon killed at once", journal: killed, do: func(s *stage) {
		s.replaced(unit, func() {
			s.newKubelet("kill", "--signal=KILL", unit)
		})
	}},
	{name: "driver restarted", do: func(s *stage) { s.Run("systemctl", "restart", driverUnit) }},
	{name: "driver killed", journal: append([]string{"driver"}, killed...), do: func(s *stage) {
		s.replaced(driverUnit, func() { s.kill("KILL", driverUnit) })
	}},
	{name: "driver upgraded", do: func(s *stage) {
		for _, version := range []string{older, newer} {
			s.replaced(driverUnit, func() { s.Install(version, "csi-sample-driver") })
		}
	}},
	{name: "driver hangs", do: func(s *stage) {
		s.kill("STOP", driverUnit)
		time.Sleep(3 * time.Second) // how long it hangs
		s.kill("CONT", driverUnit)
	}},
	{name: "driver's socket replaced", do: func(s *stage) {
		s.Run("systemd-run", "--unit=csi-other", "--collect", "/usr/bin/csi-sample-driver", "--socket", "/run/csi-sample/other.sock", "--data", "/var/lib/csi-sample")
		s.accepts("/run/csi-sample/other.sock")
		s.Run("mv", "/run/csi-sample/other.sock", node.DriverSocket)
		if err := s.registered(soon); err != nil {
			s.t.Fatal(err)
		}
		// The first daemon never removes the other's socket, so stop the other one first.
		s.Run("systemctl", "stop", "csi-other")
		s.Run("systemctl", "restart", driverUnit)
	}},
	{name: "all four restarted at once", do: func(s *stage) {
		s.Run("systemctl", "restart", unit, driverUnit, "containerd.service", "kubelet.service")
	}},
	{name: "containerd restarted", do: func(s *stage) { s.Run("systemctl", "restart", "containerd.service") }},
	{name: "plugins_registry emptied", csiNode: 2, do: func(s *stage) {
		s.Run("sh", "-c", "rm -rf "+node.Registry+"/*")
		s.writesAre(2)
	}},
	{name: "plugins_registry removed", csiNode: 2, do: func(s *stage) {
		// The daemon may publish in it between the removals of what is in it and of itself.
		s.Run("sh", "-c", "for try in 1 2 3; do ! rm -rf "+node.Registry+" || exit 0; done; exit 1")
		// The kubelet watches the removed directory. The new one is outside of the daemon's
		// sandbox, so another daemon takes over.
		s.newKubelet("restart")
	}, journal: []string{"cannot use the plugins_registry"}},
	{name: "stopped and started", csiNode: 2, do: func(s *stage) {
		s.Run("systemctl", "stop", unit)
		s.writesAre(1)
		s.Run("systemctl", "start", unit)
		s.writesAre(2)
	}},
	{name: "stopped inside a restart", csiNode: 2, do: func(s *stage) {
		const dropIn = "/run/systemd/system/csi-registrar.socket.d/slow.conf"
		s.Write(dropIn, "[Socket]\nExecStopPost=+/bin/sh -c 'touch /run/told; sleep 1'\n")
		s.Run("systemctl", "daemon-reload")
		s.Run("systemctl", "--no-block", "restart", unit)
		s.Eventually(soon, "both units to be told that it is a restart", func() error {
			_, err := s.Try("test", "-e", "/run/told")
			return err
		})
		s.Run("systemctl", "stop", unit)
		s.writesAre(1) // by the sweep unit
		s.remove(dropIn)
		s.remove("/run/told")
		s.Run("systemctl", "daemon-reload")
		s.Run("systemctl", "start", unit)
		s.writesAre(2)
	}},
}

// newKubelet restarts or kills the kubelet and waits until the new one has called the daemon.
func (s *stage) newKubelet(how string, more ...string) {
	s.t.Helper()
	before := time.Now()
	s.replaced("kubelet.service", func() {
		s.Run(append([]string{"systemctl", how, "kubelet.service"}, more...)...)
	})
	s.Eventually(soon, "the new kubelet to ask the daemon", func() error {
		var status struct {
			Drivers []struct {
				LastGetInfoAt time.Time `json:"last_get_info_at"`
			}
		}
		out, err := s.Try("csi-registrar", "status", "--json")
		if err := errors.Join(err, json.Unmarshal([]byte(out), &status)); err != nil {
			return err
		}
		if len(status.Drivers) != 1 || status.Drivers[0].LastGetInfoAt.Before(before) {
			return fmt.Errorf("asked last: %v", status.Drivers)
		}
		return nil
	})
}

// writesAre waits until the CSINode was written that often since the scenario began.
func (s *stage) writesAre(count int) {
	s.t.Helper()
	s.Eventually(soon, fmt.Sprintf("%d writes of the CSINode", count), func() error {
		if now := s.writes.Count("CSINode", s.began); now < count {
			return fmt.Errorf("%d so far", now)
		}
		return nil
	})
}

func (s *stage) accepts(socket string) {
	s.t.Helper()
	s.Eventually(soon, socket+" to accept", func() error {
		c, err := net.Dial("unix", s.Path(socket))
		if err != nil {
			return err
		}
		return c.Close()
	})
}

func (s *stage) remove(path string) {
	s.t.Helper()
	if err := os.Remove(s.Path(path)); err != nil && !errors.Is(err, syscall.ENOENT) {
		s.t.Fatal(err)
	}
}
