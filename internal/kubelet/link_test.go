package kubelet

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestLinkPointsWhereItIsToldTo(t *testing.T) {
	path := filepath.Join(shortDir(t), "plugins", "csi-registrar", "a.csi.example.sock")
	for _, target := range []string{"/run/a/csi.sock", "/run/b/csi.sock", "/run/b/csi.sock"} {
		if err := pointLink(path, target); err != nil {
			t.Fatal(err)
		}
		if got, err := os.Readlink(path); got != target {
			t.Errorf("it points to %q (%v), want %q", got, err, target)
		}
	}
	if err := removeLink(path); err != nil {
		t.Error(err)
	}
	if err := removeLink(path); err != nil {
		t.Errorf("once more: %v", err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 0 {
		t.Errorf("%v is left, %v", left, err)
	}
}

func TestLinkLeavesOtherThingsAlone(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"a regular file": func(path string) error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a directory":    func(path string) error { return os.Mkdir(path, 0o700) },
		"a socket": func(path string) error {
			l, err := net.Listen("unix", path)
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		},
	} {
		path := filepath.Join(shortDir(t), "a.sock")
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		before, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range []error{pointLink(path, "/run/a"), removeLink(path)} {
			if err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
			t.Errorf("%s was replaced: %v", name, err)
		}
	}
}

// A client that connects while the link is moved to and fro always finds somebody.
func TestLinkIsNeverMissing(t *testing.T) {
	dir := shortDir(t)
	path, targets := filepath.Join(dir, "link"), []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}
	var ended sync.WaitGroup
	defer ended.Wait()
	for _, target := range targets {
		l, err := net.Listen("unix", target)
		if err != nil {
			t.Fatal(err)
		}
		ended.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		})
		defer l.Close()
	}
	if err := pointLink(path, targets[0]); err != nil {
		t.Fatal(err)
	}
	moved := make(chan error, 1)
	go func() {
		var errs []error
		for i := range 2000 {
			errs = append(errs, pointLink(path, targets[i%2]))
		}
		moved <- errors.Join(errs...)
	}()
	for {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		select {
		case err := <-moved:
			if err != nil {
				t.Error(err)
			}
			return
		default:
		}
	}
}
