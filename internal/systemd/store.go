package systemd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
)

// Errors of Store.Keep.
var (
	// ErrNoStore: the process has no descriptor store, because it does not run as a
	// service of systemd.
	ErrNoStore = errors.New("there is no descriptor store: not a service of systemd")
	// ErrStoreFull: the manager did not take the descriptor.
	ErrStoreFull = errors.New("the descriptor store of systemd is full")
)

// realNotify is $NOTIFY_SOCKET in a system service. Another manager (a test's, the
// demo's, a container engine's) has another, and PID 1 cannot be asked about its store.
const realNotify = "/run/systemd/notify"

// Store is the descriptor store of our service: what is kept there is open in PID 1 for
// as long as the service is not stopped, and is handed over by name to the next process
// (see Receive). May be used by several goroutines.
type Store struct {
	notify *Notifier
	// count asks how many descriptors are stored and how many may be; nil if nobody
	// can be asked.
	count func(context.Context) (stored, most uint32, err error)
	mu    sync.Mutex // one change at a time, so that counting tells whose was dropped
}

// NewStore returns the store behind the notifier. With a nil notifier Keep fails with
// ErrNoStore and Forget does nothing.
func NewStore(n *Notifier) *Store {
	s := &Store{notify: n}
	if n != nil && n.addr == realNotify {
		s.count = systemManager().storeCount
	}
	return s
}

// Keep puts a copy of c's descriptor into the store and returns when the manager has it.
// The manager says nothing when it drops one, so it is asked how many it holds;
// ErrStoreFull is wrapped if FileDescriptorStoreMax= is reached without this one. If it
// cannot be asked, the descriptor is taken to be kept.
func (s *Store) Keep(ctx context.Context, name string, c syscall.Conn) error {
	if s.notify == nil {
		return fmt.Errorf("cannot keep %s: %w", name, ErrNoStore)
	}
	// FDNAME ends at the line's end; LISTEN_FDNAMES is a list with colons.
	if name == "" || len(name) > 255 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == ':' }) {
		return fmt.Errorf("cannot keep %q in the descriptor store: not a name for a descriptor", name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.put(ctx, name, c); err != nil {
		return err
	}
	held, most, err := s.counted(ctx)
	if err != nil || held < most {
		return nil // not asked, or there was room even after it
	}
	// Up to the brim: it was the last that fitted, or it was dropped. Taking it out
	// tells, and if it was in it fits again.
	if err := s.forget(ctx, name); err != nil {
		return err
	}
	if without, _, err := s.counted(ctx); err == nil && without >= held {
		return fmt.Errorf("cannot keep %s: %w (%d of FileDescriptorStoreMax=%d)", name, ErrStoreFull, held, most)
	}
	return s.put(ctx, name, c)
}

func (s *Store) put(ctx context.Context, name string, c syscall.Conn) error {
	// FDPOLL=0: without it PID 1 would drop a listener at the first sign of an error on it.
	if err := s.notify.sendDescriptor("FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", c); err != nil {
		return fmt.Errorf("cannot keep %s: %w", name, err)
	}
	if err := s.notify.Barrier(ctx); err != nil {
		return fmt.Errorf("cannot tell whether %s is kept: %w", name, err)
	}
	return nil
}

// Forget removes all descriptors of that name from the store and returns when they are
// gone. None of that name is no error. A listener lives until its last copy is closed,
// so withdrawing one takes this as well as closing one's own.
func (s *Store) Forget(ctx context.Context, name string) error {
	if s.notify == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.forget(ctx, name)
}

func (s *Store) forget(ctx context.Context, name string) error {
	if err := s.notify.send("FDSTOREREMOVE=1", "FDNAME="+name); err != nil {
		return fmt.Errorf("cannot forget %s: %w", name, err)
	}
	if err := s.notify.Barrier(ctx); err != nil {
		return fmt.Errorf("cannot tell whether %s is forgotten: %w", name, err)
	}
	return nil
}

var errNobodyToAsk = errors.New("the manager of the descriptor store cannot be asked")

func (s *Store) counted(ctx context.Context) (stored, most uint32, err error) {
	if s.count == nil {
		return 0, 0, errNobodyToAsk
	}
	return s.count(ctx)
}
