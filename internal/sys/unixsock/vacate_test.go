package unixsock

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"csi-registrar/internal/test/fake"
)

func TestVacate(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "s")
	if removed, err := Vacate(t.Context(), path); removed || err != nil {
		t.Errorf("nothing there: %t, %v", removed, err)
	}
	l, _, err := Listen(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	held, ok := errors.AsType[*InUse](vacateError(t, path))
	if !ok || !held.Live || held.Holder != (Cred{PID: os.Getpid(), UID: uint32(os.Geteuid())}).String() {
		t.Errorf("a listener: %+v", held)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if removed, err := Vacate(t.Context(), path); !removed || err != nil {
		t.Errorf("a stale socket: removed %t, %v", removed, err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	if held, ok := errors.AsType[*InUse](vacateError(t, path)); !ok || held.Live || held.Holder != "a directory" {
		t.Errorf("a directory: %+v", held)
	}
}

// TestVacateInterrupted checks that the end of the context is not reported as a socket in use.
func TestVacateInterrupted(t *testing.T) {
	path := filepath.Join(fake.ShortDir(t), "s")
	bound(t, path)
	ended := errors.New("the daemon ends")
	ctx, end := context.WithCancelCause(t.Context())
	end(ended)
	removed, err := Vacate(ctx, path)
	if _, statErr := os.Lstat(path); removed || err != ended || statErr != nil {
		t.Errorf("removed %t, %v, %v", removed, err, statErr)
	}
}

func vacateError(t *testing.T, path string) error {
	t.Helper()
	removed, err := Vacate(t.Context(), path)
	if _, statErr := os.Lstat(path); removed || statErr != nil {
		t.Errorf("%s was removed: %t, %v", path, removed, statErr)
	}
	return err
}
