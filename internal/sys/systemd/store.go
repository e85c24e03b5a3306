package systemd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/unixsock"
)

// ErrStoreFull is wrapped by Keep's error if the manager would drop the descriptor.
var ErrStoreFull = errors.New("the descriptor store of systemd is full")

const (
	// confirmWithin bounds how long a caller waits for the manager: a registration socket
	// must not come later than this because the manager is busy.
	confirmWithin = 300 * time.Millisecond
	// flushWithin bounds what Run does after its context has ended. TimeoutStopSec= is 30 s.
	flushWithin = 8 * time.Second
	// A message that cannot be sent, as when the manager's queue was full for queueTimeout, is
	// tried again after sendPause.
	queueTimeout = time.Second
	sendPause    = 100 * time.Millisecond
)

// StoreMax returns how many descriptors the store of this service may hold, 0 if that is unknown:
// $FDSTORE since systemd 254, otherwise the variable that the unit sets beside
// FileDescriptorStoreMax=. getenv is os.Getenv.
func StoreMax(getenv func(string) string) int {
	limit, _ := strconv.Atoi(cmp.Or(getenv("FDSTORE"), getenv("CSI_REGISTRAR_FDSTORE")))
	return max(limit, 0)
}

// StoreOptions configure a Store.
type StoreOptions struct {
	Max  int      // how many descriptors fit (StoreMax); 0: unknown
	Held []string // the names of those that are in the store already, each as often as it is there
	Log  *slog.Logger
}

// Store is the descriptor store of our service: its descriptors stay open in PID 1 until the
// service is stopped, and are passed by name to the next process (see Receive). The manager reads
// messages in the order in which they were sent and does not answer them, but a BARRIER=1 shows
// when it has read all previous ones. So there is one queue, which Run sends. A descriptor in it
// counts as kept, because the manager accepts each one for which there is room, and the room is
// counted here. May be used by several goroutines.
type Store struct {
	notify  *Notifier
	options StoreOptions
	wake    chan struct{} // a hint for Run, without a payload

	mu       sync.Mutex
	ended    bool           // Run has returned
	names    map[string]int // descriptors in the store, by name, once the queue is sent
	queue    []request      // not sent, in order
	inFlight []request      // sent, but perhaps not read by the manager
}

// request makes fd the only descriptor of a name; -1: none.
type request struct {
	name string
	fd   int
	done chan struct{} // closed when the manager has read it
}

// NewStore returns a store that sends through the notifier while Run runs. With a nil notifier
// Forget does nothing, and Keep must not be called.
func NewStore(n *Notifier, o StoreOptions) *Store {
	s := &Store{notify: n, options: o, wake: make(chan struct{}, 1), names: map[string]int{}}
	for _, name := range o.Held {
		s.names[name]++
	}
	return s
}

// Keep puts a copy of c's descriptor into the store, in place of all descriptors of that name. It
// returns when the manager has it, or after 0.3 s; then it is sent and confirmed later. An error
// means that it will not be kept.
func (s *Store) Keep(ctx context.Context, name string, c syscall.Conn) error {
	// FDNAME ends at the line's end; LISTEN_FDNAMES is a list with colons.
	if name == "" || len(name) > 255 || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || r == ':' }) {
		return fmt.Errorf("cannot keep %q in the descriptor store: not a name for a descriptor", name)
	}
	var fd int
	err := unixsock.Control(c, func(of int) (err error) {
		fd, err = unix.FcntlInt(uintptr(of), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return fmt.Errorf("cannot keep %s: %w", name, err)
	}
	if err := s.request(ctx, name, fd); err != nil {
		return errors.Join(fmt.Errorf("cannot keep %s: %w", name, err), unix.Close(fd))
	}
	return nil
}

// Forget removes all descriptors of that name from the store. It returns when they are removed, or
// ctx is done, or after 0.3 s; then they are removed later. It is no error if there are none. A
// listener is open until its last copy is closed, so the caller must call this and close its own.
func (s *Store) Forget(ctx context.Context, name string) error {
	if s.notify == nil {
		return nil
	}
	if err := s.request(ctx, name, -1); err != nil {
		return fmt.Errorf("cannot forget %s: %w", name, err)
	}
	return nil
}

// request queues a request, and waits for at most confirmWithin until the manager has read it. It
// owns fd if it succeeds.
func (s *Store) request(ctx context.Context, name string, fd int) error {
	done, err := s.enqueue(name, fd)
	if err != nil {
		return err
	}
	rate.Hint(s.wake)
	select {
	case <-done:
	case <-time.After(confirmWithin):
	case <-ctx.Done():
	}
	return nil
}

// enqueue queues a request. Each is sent, in order, so that there is room in the store for each
// descriptor when its turn comes.
func (s *Store) enqueue(name string, fd int) (done chan struct{}, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return nil, errors.New("the descriptor store is not used any more")
	}
	held := 0
	for _, n := range s.names {
		held += n
	}
	// The manager would drop it, unless it replaces one.
	if fd >= 0 && s.options.Max > 0 && held >= s.options.Max && s.names[name] == 0 {
		return nil, fmt.Errorf("%w (%d of %d); raise FileDescriptorStoreMax= of the unit", ErrStoreFull, held, s.options.Max)
	}
	for i, r := range s.queue {
		if r.name == name && r.fd >= 0 { // superseded: only its removal is sent
			_ = unix.Close(r.fd) // a copy that nobody else uses; no error of it matters
			s.queue[i].fd = -1
		}
	}
	delete(s.names, name)
	if fd >= 0 {
		s.names[name] = 1
	}
	done = make(chan struct{})
	s.queue = append(s.queue, request{name, fd, done})
	return done, nil
}

// Receive returns the descriptors of LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES: sockets on which
// the service manager listens, and the contents of the descriptor store. It removes these
// variables, so that children do not use them. Name returns the name of each file; several may have
// one name. The order has no meaning: systemd changes it from one start to the next. There are none
// without the variables, or if they are for another process. Call it once, early.
//
// Never call Fd on a file of a listener that is in use: it makes the socket blocking for all
// processes that share it.
func Receive() []*os.File { return activation.Files(true) }

// Listener returns the listener of a descriptor, which it leaves open. It is an error if it is not
// a socket that listens. The service manager owns its path, so Close does not remove it.
func Listener(f *os.File) (net.Listener, error) {
	listens := 0
	err := unixsock.Control(f, func(fd int) (err error) {
		listens, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		return err
	})
	if err != nil || listens == 0 {
		return nil, errors.Join(errors.New("not a socket that listens"), err)
	}
	return net.FileListener(f)
}
