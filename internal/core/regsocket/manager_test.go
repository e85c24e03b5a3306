package regsocket

import (
	"context"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// manager is systemd's descriptor store: copies of descriptors by name.
type manager struct {
	mu   sync.Mutex
	kept map[string][]int
	fail error
	slow time.Duration // of Keep
	log  []string
}

func newManager(t *testing.T) *manager {
	m := &manager{kept: make(map[string][]int)}
	t.Cleanup(func() {
		for name := range m.kept {
			m.drop(name)
		}
	})
	return m
}

func (m *manager) Keep(_ context.Context, name string, c syscall.Conn) error {
	time.Sleep(m.slow)
	if m.fail != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.log = append(m.log, "keep "+name)
		return m.fail
	}
	m.drop(name)
	return m.add(name, c)
}

// add stores another descriptor with that name.
func (m *manager) add(name string, c syscall.Conn) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log = append(m.log, "keep "+name)
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) {
		copy, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			panic(err)
		}
		m.kept[name] = append(m.kept[name], copy)
	})
}

func (m *manager) Forget(_ context.Context, name string) error {
	m.drop(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log = append(m.log, "forget "+name)
	return nil
}

func (m *manager) drop(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, fd := range m.kept[name] {
		unix.Close(fd)
	}
	delete(m.kept, name)
}

// pass hands the listeners of a name to a new process.
func (m *manager) pass(t *testing.T, name string) []*os.File {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	var files []*os.File
	for _, fd := range m.kept[name] {
		copy, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, os.NewFile(uintptr(copy), name))
	}
	return files
}

func (m *manager) count(name string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.kept[name])
}
