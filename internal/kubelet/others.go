package kubelet

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"csi-registrar/internal/status"
	"csi-registrar/internal/unixsock"
)

const (
	scanTime    = 300 * time.Millisecond // for all sockets together
	hangingFor  = 30 * time.Second       // one that did not answer is not waited for again so soon
	maxEntries  = 10000                  // of the folder, that are looked at
	maxAsked    = 64                     // sockets at a time
	maxSubdepth = 8
)

// rivals finds other registrars' sockets in the folder that serve a driver of ours. Two
// sockets of one name would make the kubelet refuse one of them, or (an older one) let
// the removal of one deregister the other.
//
// What a socket told is remembered for as long as it is the same socket. A scan serves
// everybody who asked before it began.
type rivals struct {
	folder string
	isOurs func(path string) bool
	wait   time.Duration // scanTime, longer in tests

	mu    sync.Mutex
	last  *scan // the one that runs, or ran last
	next  *scan // the one that is to begin when it has ended
	known map[file]told
}

// told is what a socket said when it was asked.
type told struct {
	name  string // CSI driver that it serves; empty: none, or not known
	until time.Time
}

type scan struct {
	done   chan struct{}
	served map[string][]string // driver to the paths that serve it
}

func newRivals(folder string, isOurs func(string) bool) *rivals {
	return &rivals{folder: folder, isOurs: isOurs, wait: scanTime}
}

// check looks for another live socket than our own that serves the driver: a
// *ConflictError. Our own file under another name, for somebody moved it, is removed.
func (r *rivals) check(ctx context.Context, driver string, own *publication) error {
	sc, err := r.scan(ctx)
	if err != nil {
		return err
	}
	for _, path := range sc.served[driver] {
		if f, err := lookThrough(path); err == nil && own != nil && f.fileID == own.id {
			if _, err := remove(path, own.id); err != nil { // a link to it is left
				return fmt.Errorf("cannot remove our moved registration socket: %w", err)
			}
			continue
		}
		if a, who, err := knock(ctx, path); a == alive && err == nil {
			return &ConflictError{Driver: driver, Path: path, Holder: process(who)}
		}
	}
	return nil
}

// scan returns a scan that began after the call.
func (r *rivals) scan(ctx context.Context) (*scan, error) {
	r.mu.Lock()
	if sc := r.next; sc != nil { // somebody waits for one already
		r.mu.Unlock()
		select {
		case <-sc.done:
			return sc, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	sc, last := &scan{done: make(chan struct{})}, r.last
	r.next = sc
	r.mu.Unlock()
	if last != nil {
		<-last.done // at most scanTime and the reading of a folder
	}
	r.mu.Lock()
	r.last, r.next = sc, nil
	r.mu.Unlock()
	defer close(sc.done)
	// Others wait for it as well: it does not end with this ctx.
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.wait)
	defer cancel()
	r.run(limited, sc)
	return sc, nil
}

func (r *rivals) run(ctx context.Context, sc *scan) {
	now := time.Now()
	known := make(map[file]told) // what is gone is forgotten
	sc.served = make(map[string][]string)
	var mu sync.Mutex
	note := func(path string, f file, t told) {
		mu.Lock()
		defer mu.Unlock()
		known[f] = t
		if t.name != "" {
			sc.served[t.name] = append(sc.served[t.name], path)
		}
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, maxAsked)
	for _, path := range r.strangers() {
		f, err := lookThrough(path)
		if err != nil || !f.isSocket() {
			continue
		}
		// Only the running scan touches r.known.
		if t, ok := r.known[f]; ok && (t.until.IsZero() || now.Before(t.until)) {
			note(path, f, t)
			continue
		}
		wg.Go(func() {
			select {
			case slots <- struct{}{}:
				defer func() { <-slots }()
			case <-ctx.Done():
				return
			}
			switch name, err := ask(ctx, path); {
			case err == nil:
				note(path, f, told{name: name})
			case time.Since(now) > r.wait/2:
				note(path, f, told{until: now.Add(hangingFor)})
			}
			// A quick error is cheap to find out again.
		})
	}
	wg.Wait()
	r.known = known
}

// strangers are the sockets, and links that may lead to one, which the kubelet sees and
// are not at one of our own paths.
func (r *rivals) strangers() []string {
	var found []string
	left := maxEntries
	var read func(dir string, depth int)
	read = func(dir string, depth int) {
		d, err := os.Open(dir)
		if err != nil {
			return // what cannot be seen cannot be asked
		}
		defer d.Close()
		entries, _ := d.ReadDir(left)
		left -= len(entries)
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			switch {
			case strings.HasPrefix(e.Name(), "."), r.isOurs(path):
			case e.IsDir() && depth < maxSubdepth && left > 0:
				read(path, depth+1)
			case e.Type()&(fs.ModeSocket|fs.ModeSymlink) != 0:
				found = append(found, path)
			}
		}
	}
	read(r.folder, 0)
	return found
}

// ask calls GetInfo as the kubelet does, and returns the CSI driver that is served there;
// empty for a plugin of another kind or a name no driver can have.
func ask(ctx context.Context, path string) (string, error) {
	c, err := dial(ctx, ownAddress(), path)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if _, err := unixsock.PeerCred(c); err != nil {
		return "", err
	}
	var once sync.Once
	cc, err := grpc.NewClient("passthrough:///registrar",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			err := net.ErrClosed
			once.Do(func() { err = nil })
			return c, err // the one connection, once
		}),
		grpc.WithDisableServiceConfig(),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithReadBufferSize(bufferBytes), grpc.WithWriteBufferSize(bufferBytes),
	)
	if err != nil {
		return "", err
	}
	defer cc.Close()
	info, err := registerapi.NewRegistrationClient(cc).GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return "", err
	}
	if info.GetType() != registerapi.CSIPlugin || status.CheckName(info.GetName()) != nil {
		return "", nil
	}
	return info.GetName(), nil
}
