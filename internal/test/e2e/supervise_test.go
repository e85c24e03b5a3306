package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/sys/process"
	"csi-registrar/internal/test/e2e/built"
	"csi-registrar/internal/test/e2e/harness"
)

// TestSuperviseMemory: the process that feeds a driver's watchdog has at most 5 MB of memory of its
// own. It shares the pages of the program with the daemon, and the kernel can reclaim them.
func TestSuperviseMemory(t *testing.T) {
	n := harness.NewIn(t, "/var/tmp")
	d := n.AddDriver("a.example")
	d.Start()
	k := n.StartKubelet()
	n.StartDaemon()
	k.Registered(0, d.Name, soon)

	address := &net.UnixAddr{Name: filepath.Join(n.Etc, "notify"), Net: "unixgram"}
	manager, err := net.ListenUnixgram("unixgram", address)
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	main, err := process.Open(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer main.Close()
	cmd := exec.Command(built.Registrar(t), "supervise", "--keep", "--socket", d.Socket, "--watchdog", "1s")
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+address.Name, "GOMAXPROCS=1")
	cmd.ExtraFiles = []*os.File{main}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()

	// After a Probe, until the next one a third of a second later.
	const most = 5.0
	least, buf := 1e9, make([]byte, 4096)
	for range 10 {
		if err := manager.SetReadDeadline(time.Now().Add(soon)); err != nil {
			t.Fatal(err)
		}
		size, err := manager.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(buf[:size]), "WATCHDOG=1") {
			least = min(least, memory(t, cmd.Process.Pid, "Pss_Anon:"))
		}
	}
	t.Logf("%.1f MB", least)
	if least > most {
		t.Errorf("%.1f MB of its own, want %.1f at most", least, most)
	}
}
